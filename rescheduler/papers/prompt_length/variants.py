"""The variants of prompt-time prediction: each trained once, and kept as a checkpoint."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_collection.versions import machine, source_commit, versions
from predictor.models.checkpoint import read_config
from rescheduler.papers.prompt_length.buckets import BucketCurve
from rescheduler.papers.prompt_length.checkpoint import (
    load_length_predictor,
    load_task_classifier,
    save_length_predictor,
    save_task_classifier,
)
from rescheduler.papers.prompt_length.encoder import (
    EncoderClassifier,
    EncoderOptions,
    train_classifier,
)
from rescheduler.papers.prompt_length.forest import ForestOptions, LengthForest
from rescheduler.papers.prompt_length.predictor import LengthPredictor
from rescheduler.papers.prompt_length.prompt_table import AnsweredPrompts
from rescheduler.papers.text_models.text_batches import LabelledTexts

__all__ = ["LengthVariants", "TrainingData"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingData:
    """What variants are trained on.

    Attributes:
        train: what they learn from.
        validation: what chooses the best pass.
        tasks: of all requests, in order.
        described: dataset, prompts and split, as checkpoints record it.
        serving_model: whose answers these are.
    """

    train: AnsweredPrompts
    validation: AnsweredPrompts
    tasks: tuple[str, ...]
    described: dict[str, Any]
    serving_model: str


class LengthVariants:
    """Trains a variant, or loads it where an earlier run with the same settings left it.

    Args:
        data: what to train on.
        out: folder of the checkpoints, one a variant.
        encoder: which, and how it is fine-tuned.
        forest: how it is grown.
        seed: of every training.
    """

    def __init__(
        self,
        data: TrainingData,
        out: Path,
        encoder: EncoderOptions,
        forest: ForestOptions,
        seed: int,
    ) -> None:
        self._data = data
        self._out = out
        self._encoder = encoder
        self._forest = forest
        self._seed = seed

    def task_classifier(self) -> EncoderClassifier:
        """Return the classifier of tasks (Jain et al. 2025, C.8).

        Raises:
            ValueError: the folder holds one of other settings, or there is only one task.
        """
        folder, settings = self._out / "task", self._settings(asdict(self._encoder))
        if self._is_there(folder, settings):
            return load_task_classifier(folder)
        place = {task: i for i, task in enumerate(self._data.tasks)}
        train, validation = (
            np.array([place[task] for task in part.prompts.task])
            for part in (self._data.train, self._data.validation)
        )
        classifier, trained = self._fine_tuned(folder, self._data.tasks, False, train, validation)
        provenance = self._provenance(settings, trained)
        save_task_classifier(classifier, self._data.serving_model, provenance, folder)
        return classifier

    def encoder(self, name: str, curve: BucketCurve, hinted: bool) -> LengthPredictor:
        """Return an encoder that predicts the curve's buckets (§4.1), with the hint or without.

        Raises:
            ValueError: the folder holds one of other settings.
        """
        folder = self._out / name
        settings = self._settings(
            {"curve": asdict(curve), "hinted": hinted, **asdict(self._encoder)}
        )
        if self._is_there(folder, settings):
            return load_length_predictor(folder)
        train, validation = (
            curve.buckets.of(part.total_tokens)
            for part in (self._data.train, self._data.validation)
        )
        classifier, trained = self._fine_tuned(
            folder, curve.buckets.names, hinted, train, validation
        )
        predictor = LengthPredictor(
            classifier, curve, self._data.serving_model, self._provenance(settings, trained)
        )
        save_length_predictor(predictor, folder)
        return predictor

    def forest(self, name: str, curve: BucketCurve) -> LengthPredictor:
        """Return a forest on prompt length and application (C.12).

        Raises:
            ValueError: the folder holds one of other settings.
        """
        folder, data = self._out / name, self._data
        settings = self._settings({"curve": asdict(curve), **asdict(self._forest)})
        if self._is_there(folder, settings):
            return load_length_predictor(folder)
        forest = LengthForest.grow(
            data.train.prompts,
            curve.buckets.of(data.train.total_tokens),
            curve.buckets.names,
            data.tasks,
            self._forest,
            self._seed,
        )
        predictor = LengthPredictor(
            forest, curve, data.serving_model, self._provenance(settings, {})
        )
        save_length_predictor(predictor, folder)
        return predictor

    def _fine_tuned(
        self,
        folder: Path,
        labels: tuple[str, ...],
        hinted: bool,
        train: IntArray,
        validation: IntArray,
    ) -> tuple[EncoderClassifier, dict[str, Any]]:
        options, data = self._encoder, self._data
        classifier = EncoderClassifier.pretrained(
            options.model, labels, data.tasks, hinted, options.max_tokens, options.dropout
        )
        print(f"{folder.name}: fine-tuning on {len(data.train)} prompts", flush=True)
        trained = train_classifier(
            classifier,
            LabelledTexts(classifier.token_ids(data.train.prompts), train),
            LabelledTexts(classifier.token_ids(data.validation.prompts), validation),
            options,
            folder,
            self._seed,
        )
        return classifier, trained

    def _settings(self, own: dict[str, Any]) -> dict[str, Any]:
        """Everything that a variant is a consequence of, as JSON gives it back."""
        settings = {**self._data.described, "seed": self._seed, **own}
        known: dict[str, Any] = json.loads(json.dumps(settings))
        return known

    def _is_there(self, folder: Path, settings: dict[str, Any]) -> bool:
        if not (folder / "config.json").is_file():
            return False
        if read_config(folder).get("provenance", {}).get("settings") != settings:
            raise ValueError(
                f"{folder} was trained with other settings: give another --out, or move it away"
            )
        print(f"{folder.name}: trained already", flush=True)
        return True

    def _provenance(self, settings: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
        return {
            "settings": settings,
            **trained,
            "commit": source_commit(),
            "versions": versions(),
            "machine": machine(),
        }
