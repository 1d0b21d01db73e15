"""How good predictions of answer lengths are: as buckets, and as survival curves."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.metrics import f1_score

from predictor.evaluation.survival_metrics import Outcomes, survival_scores
from predictor.forecasts.forecast import Forecast
from rescheduler.papers.prompt_length.buckets import LengthBuckets
from rescheduler.papers.prompt_length.prompt_table import AnsweredPrompts

__all__ = ["LengthScores", "accuracy_by_task", "crps", "length_scores"]

FloatArray = npt.NDArray[np.float64]

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class LengthScores:
    """Measures of one method on the test requests, before their first token.

    Attributes:
        accuracy: share of requests whose most probable bucket is the true one.
        by_task: the same for each task.
        macro_f1: mean over the buckets that occur of the F1 score, which, unlike the accuracy,
            does not forgive never predicting a rare bucket.
        log_loss: mean of −log P(true bucket), nats.
        mae: of the curve's median, tokens.
        crps: see `crps`, tokens.

    The others are those of `SurvivalScores`.
    """

    accuracy: float
    by_task: dict[str, float]
    macro_f1: float
    log_loss: float
    mae: float
    crps: float
    ibs: float
    concordance: float | None
    auc_within: dict[str, float | None]
    coverage: dict[str, float] | None


def length_scores(
    buckets: LengthBuckets, probabilities: FloatArray, forecast: Forecast, test: AnsweredPrompts
) -> LengthScores:
    """Return every measure of a method by its [n, n_buckets] probabilities and capped forecast."""
    truth, predicted = buckets.of(test.total_tokens), probabilities.argmax(axis=1)
    survival = survival_scores(forecast, test.outcomes)
    true_share = probabilities[np.arange(len(truth)), truth]
    return LengthScores(
        accuracy=float((predicted == truth).mean()),
        by_task=accuracy_by_task(predicted == truth, test),
        macro_f1=float(
            f1_score(truth, predicted, labels=np.unique(truth), average="macro", zero_division=0)
        ),
        log_loss=float(-np.log(np.maximum(true_share, 1e-6)).mean()),
        mae=float(np.abs(forecast.median() - test.total_tokens).mean()),
        crps=crps(forecast, test.outcomes),
        ibs=survival.ibs,
        concordance=survival.concordance,
        auc_within=survival.auc_within,
        coverage=survival.coverage,
    )


def accuracy_by_task(right: npt.NDArray[np.bool_], test: AnsweredPrompts) -> dict[str, float]:
    """Return the share of right answers of each task."""
    task = np.array(test.prompts.task)
    return {str(name): float(right[task == name].mean()) for name in np.unique(task)}


def crps(forecast: Forecast, outcomes: Outcomes) -> float:
    r"""Return the mean continuous ranked probability score, in tokens; lower is better.

    .. math:: \frac{1}{n} \sum_i \sum_{h \ge 0} \big(S_i(h) - [r_i > h]\big)^2

    For a point forecast it is the absolute error, so that curves and points compare (Gneiting
    and Raftery, JASA 2007). Forecasts know the cap, from which on both terms are 0.
    """
    horizons = np.arange(int(outcomes.left.max()), dtype=np.float64)
    total = 0.0
    for start in range(0, len(outcomes), _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(outcomes)))
        longer = outcomes.remaining[rows, None] > horizons
        total += float(((forecast.select(rows).at(horizons) - longer) ** 2).sum())
    return total / len(outcomes)
