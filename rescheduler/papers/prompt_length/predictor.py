"""A prompt-time length predictor: a classifier of buckets, and the curve they stand for."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.papers.prompt_length.buckets import BucketCurve
from rescheduler.papers.prompt_length.prompt_table import Prompts

__all__ = ["BucketFrequencies", "LengthPredictor", "PromptClassifier"]

FloatArray = npt.NDArray[np.float64]


class PromptClassifier(Protocol):
    """A classifier that uses what is known before the first token.

    Attributes:
        labels: in order.
        tasks: that it was trained on.
    """

    labels: tuple[str, ...]
    tasks: tuple[str, ...]

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return P(label) of each prompt, [n, n_labels]."""
        ...


class BucketFrequencies:
    """Predict the training requests' shares of the buckets, whatever the prompt says.

    By task it is the baseline for every predictor that is given the task: Jain et al. find that
    the hint is what lifts their encoder from 5.5% to 79%.

    Args:
        prompts: of the training requests.
        found: [n] index of each one's bucket.
        labels: the buckets, in order.
        by_task: whether each task has shares of its own; a task that was not trained on has
            those of all.
    """

    def __init__(
        self,
        prompts: Prompts,
        found: npt.NDArray[np.int64],
        labels: Sequence[str],
        by_task: bool = False,
    ) -> None:
        self.labels = tuple(labels)
        self.tasks = tuple(sorted(set(prompts.task)))
        self._overall = self._shares(found)
        task = np.array(prompts.task)
        self._of_task = {name: self._shares(found[task == name]) for name in self.tasks if by_task}

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return the shares for each prompt, [n, n_labels]."""
        return np.stack([self._of_task.get(task, self._overall) for task in prompts.task])

    def _shares(self, found: npt.NDArray[np.int64]) -> FloatArray:
        counts = np.bincount(found, minlength=len(self.labels))
        shares: FloatArray = counts / counts.sum()
        return shares


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
        classifier: PromptClassifier,
        curve: BucketCurve,
        serving_model: str,
        provenance: dict[str, Any],
    ) -> None:
        if classifier.labels != curve.buckets.names:
            raise ValueError(
                f"a classifier of {', '.join(classifier.labels)} with a curve of "
                f"{', '.join(curve.buckets.names)}"
            )
        self.classifier = classifier
        self.curve = curve
        self.serving_model = serving_model
        self.provenance = provenance

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
