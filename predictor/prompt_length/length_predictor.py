"""A prompt-time length predictor: a classifier of buckets, and the curve they stand for."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast
from predictor.prompt_length.bucket_curve import BucketCurve
from predictor.prompt_length.prompt_table import Prompts

__all__ = ["LengthPredictor", "PromptClassifier"]

FloatArray = npt.NDArray[np.float64]


class PromptClassifier(Protocol):
    """What tells labels apart by what is known before the first token.

    Attributes:
        labels: in order.
        tasks: that it was trained on.
    """

    labels: tuple[str, ...]
    tasks: tuple[str, ...]

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return P(label) of each prompt, [n, n_labels]."""
        ...


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
