"""A prompt-time length predictor: a classifier, its buckets' curve, and their checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from safetensors.numpy import save as numpy_bytes

from data_collection.files import replace_file, write_text_atomically
from predictor.forecasts.forecast import SurvivalForecast
from predictor.models.checkpoint import WEIGHTS, read_config
from predictor.models.checkpoint_card import front_matter, provenance_rows
from predictor.models.hidden_state_mlp import CheckpointError
from rescheduler.papers.prompt_length.buckets import BucketCurve, LengthBuckets
from rescheduler.papers.prompt_length.classifiers import EncoderClassifier, LengthForest
from rescheduler.papers.prompt_length.prompt_table import Prompts

FloatArray = npt.NDArray[np.float64]

_LENGTH, _TASK = "prompt_length", "prompt_task"

_CARD = """\
{front_matter}# {title} for {serving_model}

Before the first token of a request, from its prompt, this {classifier} predicts {what}
(Jain et al. 2025, §4.1 and Appendix C). `rescheduler.papers.prompt_length` has `{load}`.

Tasks it was trained on: {tasks}.{hint}

| | |
|---|---|
{provenance}

Trained on the answers of {serving_model}: another model's have other lengths.
"""


LengthClassifier = EncoderClassifier | LengthForest
"""What tells the bucket of an answer from what is known before its first token."""


class LengthPredictor:
    """Forecast how many tokens requests will generate that have no hidden state yet.

    Args:
        classifier: of length buckets.
        curve: what the buckets stand for.
        serving_model: whose answers it was trained on.
        provenance: commit, versions, dataset, settings, for the card.

    Raises:
        ValueError: classifier and curve have different buckets.
    """

    def __init__(
        self,
        classifier: LengthClassifier,
        curve: BucketCurve,
        serving_model: str,
        provenance: dict[str, Any],
    ) -> None:
        if classifier.labels != curve.buckets.names:
            raise ValueError(
                f"a classifier of {', '.join(classifier.labels)} with a curve of "
                f"{', '.join(curve.buckets.names)}"
            )
        self.classifier, self.curve = classifier, curve
        self.serving_model, self.provenance = serving_model, provenance

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return P(bucket) of each request, [n, n_buckets].

        Raises:
            ValueError: a task was not trained on, and the classifier reads it.
        """
        return self.classifier.probabilities(prompts)

    def forecast(self, prompts: Prompts) -> SurvivalForecast:
        """Forecast the whole answers of n requests, capped by their ``max_tokens``.

        Raises:
            ValueError: as `probabilities` does.
        """
        return self.curve.forecast(self.probabilities(prompts), prompts.max_tokens)


def load_length_predictor(folder: Path) -> LengthPredictor:
    """Load a length predictor, ready to forecast.

    Raises:
        CheckpointError: the folder is no checkpoint, or one of something else, or damaged.
    """
    config = read_config(folder)
    classifier = _load(folder, config, _LENGTH)
    try:
        curve = dict(config["curve"])
        buckets = LengthBuckets(tuple(curve.pop("buckets")))
        return LengthPredictor(
            classifier,
            BucketCurve(buckets, **curve),
            config["serving_model"],
            config["provenance"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json: no length predictor: {error!r}") from error


def load_task_classifier(folder: Path) -> EncoderClassifier:
    """Load a classifier of tasks.

    Raises:
        CheckpointError: the folder is no checkpoint, or one of something else, or damaged.
    """
    classifier = _load(folder, read_config(folder), _TASK)
    assert isinstance(classifier, EncoderClassifier)  # forests classify no tasks
    return classifier


def save_classifier(
    classifier: LengthClassifier,
    curve: BucketCurve | None,
    serving_model: str,
    provenance: Mapping[str, Any],
    folder: Path,
) -> None:
    """Write a classifier of the curve's buckets, or without a curve of tasks.

    ``config.json`` comes last, so that only a whole checkpoint has one.
    """
    from safetensors.torch import save as torch_bytes

    config: dict[str, Any] = {
        "kind": _TASK if curve is None else _LENGTH,
        "serving_model": serving_model,
        "curve": curve and {**asdict(curve), "buckets": list(curve.buckets.edges)},
        "labels": classifier.labels,
        "tasks": classifier.tasks,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    if isinstance(classifier, LengthForest):
        config["classifier"] = "forest"
        weights = numpy_bytes(classifier.nodes)
    else:
        config |= {
            "classifier": "encoder",
            "hinted": classifier.hinted,
            "max_tokens": classifier.max_tokens,
            "dropout": classifier.dropout.p,
        }
        encoder = folder / "encoder"
        encoder.mkdir(exist_ok=True)
        classifier.backbone.config.to_json_file(encoder / "config.json")
        classifier.tokenizer.save_pretrained(encoder)
        own = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
        weights = torch_bytes(own)
    with replace_file(folder / WEIGHTS) as temporary:
        temporary.write_bytes(weights)
    config["provenance"] = dict(provenance)
    write_text_atomically(folder / "README.md", _card(config))
    write_text_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")


def _card(config: dict[str, Any]) -> str:
    title, load, what = "Task classifier", "load_task_classifier", "its task"
    if config["curve"]:
        title, load = "Prompt-time length predictor", "load_length_predictor"
        what = (
            f"which of the buckets {', '.join(config['labels'])} tokens its answer will be in, "
            "and the survival curve that the probabilities stand for"
        )
    return _CARD.format(
        front_matter=front_matter("length-prediction", "llm-serving"),
        title=title,
        load=load,
        classifier=config["classifier"],
        serving_model=config["serving_model"],
        what=what,
        tasks=", ".join(config["tasks"]),
        hint=" The task is appended to the prompt as a hint." if config.get("hinted") else "",
        provenance=provenance_rows(config["provenance"]),
    )


def _load(folder: Path, config: dict[str, Any], kind: str) -> LengthClassifier:
    from safetensors.torch import load_model
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    if config.get("kind") != kind:
        raise CheckpointError(
            f"{folder}: config.json says kind {config.get('kind')!r}, wanted {kind!r}"
        )
    try:
        if config["classifier"] == "forest":
            return LengthForest(config["labels"], config["tasks"], load_file(folder / WEIGHTS))
        auto: Any = AutoModel
        classifier = EncoderClassifier(
            auto.from_config(AutoConfig.from_pretrained(folder / "encoder")),
            AutoTokenizer.from_pretrained(folder / "encoder"),
            *(config[key] for key in ("labels", "tasks", "hinted", "max_tokens", "dropout")),
        )
        load_model(classifier, str(folder / WEIGHTS), strict=True)
        return classifier.eval()
    except Exception as error:  # safetensors, torch and transformers each raise their own
        raise CheckpointError(f"{folder}: cannot be loaded: {error!r}") from error
