"""Every variant of prompt-time prediction, measured on the same requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predictor.evaluation.comparators import KaplanMeier
from predictor.forecasts.forecast import Forecast
from predictor.models.hidden_state_mlp import HiddenStateMLP
from predictor.training.rows_data_module import request_rows
from rescheduler.papers.prompt_length.buckets import BucketCurve, LengthBuckets, Shape
from rescheduler.papers.prompt_length.encoder import EncoderOptions
from rescheduler.papers.prompt_length.forest import ForestOptions
from rescheduler.papers.prompt_length.predictor import BucketFrequencies, LengthPredictor
from rescheduler.papers.prompt_length.prompt_table import Prompts, PromptSplit
from rescheduler.papers.prompt_length.scores import LengthScores, accuracy_by_task, length_scores
from rescheduler.papers.prompt_length.variants import LengthVariants, TrainingData

__all__ = ["METHODS", "LengthStudy", "StudyOptions", "TaskScores"]

METHODS = {
    "majority": "Most frequent bucket",
    "task_majority": "Most frequent bucket of the task",
    "forest": "Random forest: prompt length, application",
    "encoder": "Encoder",
    "encoder_hint": "Encoder, hint: true task",
    "encoder_predicted_hint": "Encoder, hint: predicted task",
    "kaplan_meier": "Kaplan–Meier, no bucket",
    "hidden_state": "Hidden state at the end of prefill",
}
"""What is measured, and what tables call it."""


@dataclass(frozen=True)
class StudyOptions:
    """How all variants are trained.

    Attributes:
        encoder: which, and how it is fine-tuned.
        forest: how it is grown.
        shape: of the curve inside a bucket.
        limit: tokens that no request passes.
        seed: of every training.
    """

    encoder: EncoderOptions
    forest: ForestOptions
    shape: Shape
    limit: int
    seed: int


@dataclass(frozen=True)
class TaskScores:
    """How well the task can be classified from the prompt (Jain et al. 2025, C.8).

    Attributes:
        accuracy: share of the test prompts whose task was classified correctly.
        majority: that of the most frequent training task.
        by_task: accuracy on each.
    """

    accuracy: float
    majority: float
    by_task: dict[str, float]


class LengthStudy:
    """Trains what an earlier run has not left below a folder, and measures it.

    Args:
        split: the requests.
        buckets: the choices of length buckets, by what they are called.
        described: dataset, prompts and split, as checkpoints record it.
        options: how to train.
        out: folder of the checkpoints.

    Raises:
        ValueError: all training requests are in one bucket.
    """

    def __init__(
        self,
        split: PromptSplit,
        buckets: Mapping[str, LengthBuckets],
        described: Mapping[str, Any],
        options: StudyOptions,
        out: Path,
    ) -> None:
        parts = split.parts
        self._train, self._test = parts["train"], parts["test"]
        self._buckets = dict(buckets)
        for scheme, ranges in self._buckets.items():
            found = ranges.of(self._train.total_tokens)
            if (found == found[0]).all():
                raise ValueError(
                    f"{scheme}: all {len(found)} training requests generated "
                    f"{ranges.names[found[0]]} tokens, in one bucket: there is nothing to learn"
                )
        self._options = options
        self._tasks = tuple(sorted({t for part in parts.values() for t in part.prompts.task}))
        data = TrainingData(
            self._train,
            parts["validation"],
            self._tasks,
            dict(described),
            self._train.rows.session.model,
        )
        self._variants = LengthVariants(data, out, options.encoder, options.forest, options.seed)

    def tasks(self) -> tuple[TaskScores, Prompts] | None:
        """Return how well tasks are classified, and the test prompts with the predicted tasks.

        None where all requests are of one task: there is nothing to classify, and no hint to give.
        """
        if len(self._tasks) < 2:
            return None
        test = self._test.prompts
        predicted = self._variants.task_classifier().predicted(test)
        right = np.array(predicted) == np.array(test.task)
        names, counts = np.unique(self._train.prompts.task, return_counts=True)
        scores = TaskScores(
            accuracy=float(right.mean()),
            majority=float((np.array(test.task) == names[counts.argmax()]).mean()),
            by_task=accuracy_by_task(right, self._test),
        )
        return scores, test.with_tasks(predicted)

    def lengths(
        self,
        scheme: str,
        predicted_tasks: Prompts | None,
        hidden_state: HiddenStateMLP | None,
    ) -> dict[str, LengthScores]:
        """Return the scores of every method for one choice of buckets, by `METHODS`.

        Args:
            scheme: what the choice is called.
            predicted_tasks: the test prompts with predicted tasks; None: hint at nothing.
            hidden_state: what to measure at the end of the same requests' prefill.
        """
        train, test, buckets = self._train, self._test.prompts, self._buckets[scheme]
        found = buckets.of(train.total_tokens)
        curve = BucketCurve.fit(
            buckets, train.total_tokens, train.cut, self._options.limit, self._options.shape
        )

        def frequencies(by_task: bool) -> LengthPredictor:
            shares = BucketFrequencies(train.prompts, found, buckets.names, by_task)
            return LengthPredictor(shares, curve, train.rows.session.model, {})

        methods = {
            "majority": (frequencies(False), test),
            "task_majority": (frequencies(True), test),
            "forest": (self._variants.forest(f"{scheme}-forest", curve), test),
            "encoder": (self._variants.encoder(scheme, curve, False), test),
        }
        if predicted_tasks is not None:
            hinted = self._variants.encoder(f"{scheme}-hint", curve, True)
            methods["encoder_hint"] = hinted, test
            methods["encoder_predicted_hint"] = hinted, predicted_tasks
        scores = {}
        for name, (method, prompts) in methods.items():
            probabilities = method.probabilities(prompts)
            forecast = method.curve.forecast(probabilities, prompts.max_tokens)
            scores[name] = length_scores(buckets, probabilities, forecast, self._test)
        for name, curves in self._unbucketed(hidden_state).items():
            scores[name] = length_scores(buckets, buckets.masses(curves), curves, self._test)
        return scores

    def _unbucketed(self, hidden_state: HiddenStateMLP | None) -> dict[str, Forecast]:
        """Forecasts of the test requests by methods that know no buckets."""
        kaplan_meier = KaplanMeier()
        kaplan_meier.fit(self._train.rows, self._train.rows)
        curves: dict[str, Forecast] = {"kaplan_meier": kaplan_meier.forecast(self._test.rows)}
        if hidden_state is not None:
            curves["hidden_state"] = hidden_state.forecast(request_rows(self._test.rows))
        return curves
