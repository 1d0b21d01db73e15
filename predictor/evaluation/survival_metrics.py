"""How good survival forecasts are: discrimination, calibration, and both along a request's life.

All measures take what requests generated under their ``max_tokens``: r tokens, ``cut`` where the
cap ended them, ``left`` tokens to the cap when they were forecast.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics import brier_score_loss, roc_auc_score

from predictor.forecasts.forecast import Forecast, SurvivalForecast
from predictor.forecasts.kaplan_meier import observed_levels, observed_share

FloatArray = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

WITHIN = (20, 80, 320)
"""Horizons in tokens of "will it finish within h tokens", what lookahead routing asks."""

LEVELS = (50, 80, 90)
"""Central intervals, in percent, whose coverage is measured."""

_BRIER_STEP = 8
_CONCORDANCE_ROWS = 8_000


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What came of the forecast requests.

    Attributes:
        remaining: [n] tokens that came.
        cut: [n] whether ``max_tokens`` ended the request.
        left: [n] tokens to ``max_tokens`` when it was forecast.
    """

    remaining: npt.NDArray[Any]
    cut: BoolArray
    left: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.remaining)

    def select(self, rows: npt.NDArray[Any]) -> "Outcomes":
        """Return those of some of the requests."""
        return Outcomes(self.remaining[rows], self.cut[rows], self.left[rows])


@dataclass(frozen=True)
class SurvivalScores:
    """Measures of one method on a set of rows.

    Attributes:
        ibs: integrated Brier score; lower is better, 0.25 is a coin.
        brier_within: Brier score of "finishes within h tokens", by h.
        auc_within: area under the ROC curve of the same, by h; None where only one kind occurs.
        concordance: share of comparable pairs in the right order; 0.5 is chance.
        pinball: mean pinball loss over the deciles, tokens.
        coverage: share of ends inside the central interval, by its percentage; None for point
            forecasts, which have no interval.
    """

    ibs: float
    brier_within: dict[str, float]
    auc_within: dict[str, float | None]
    concordance: float | None
    pinball: float
    coverage: dict[str, float] | None


def survival_scores(forecast: Forecast, outcomes: Outcomes) -> SurvivalScores:
    """Return every measure of capped forecasts against what came of them."""
    probabilities = {str(h): within(forecast, outcomes, h) for h in WITHIN}
    covered = None
    if isinstance(forecast, SurvivalForecast):
        levels = levels_of(forecast, outcomes)
        covered = {str(level): coverage(levels, outcomes.cut, level / 100) for level in LEVELS}
    return SurvivalScores(
        ibs=integrated_brier(forecast, outcomes),
        brier_within={h: scores[0] for h, scores in probabilities.items()},
        auc_within={h: scores[1] for h, scores in probabilities.items()},
        concordance=concordance(forecast, outcomes),
        pinball=pinball_loss(forecast, outcomes),
        coverage=covered,
    )


def within(forecast: Forecast, outcomes: Outcomes, h: int) -> tuple[float, float | None]:
    """Return Brier score and AUC of "finishes within h tokens".

    Only rows with more than h tokens left to their cap count: there the answer is known for
    every request, whether it was cut later or not, so that nothing need be reweighted, and
    the cap does not give it away.

    Returns:
        The Brier score, nan where no row counts; the AUC, None where all answers are alike.
    """
    counts = outcomes.left > h
    if not counts.any():
        return float("nan"), None
    finished = outcomes.remaining[counts] <= h
    probability = 1 - forecast.at(float(h))[counts]
    brier = float(brier_score_loss(finished, probability, labels=[False, True]))
    if finished.all() or not finished.any():
        return brier, None
    return brier, float(roc_auc_score(finished, probability))


def integrated_brier(forecast: Forecast, outcomes: Outcomes) -> float:
    r"""Return the Brier score of P(R > h), averaged over h up to the largest cap.

    .. math:: \frac{1}{H} \sum_h \frac{1}{|A_h|} \sum_{i \in A_h}
        \big(S_i(h) - [r_i > h]\big)^2, \quad A_h = \{i : \text{left}_i > h\}

    Rows leave the average at their cap, which is known beforehand, so that every term is of a
    known outcome (Graf et al. 1999 with the censoring distribution known for each row). h runs
    in steps of 8 tokens.
    """
    horizons = np.arange(1, max(2, int(outcomes.left.max())), _BRIER_STEP)
    squared = (forecast.at(horizons) - (outcomes.remaining[:, None] > horizons)) ** 2
    counts = outcomes.left[:, None] > horizons
    rows = counts.sum(axis=0)
    known = rows > 0
    if not known.any():
        return float("nan")
    return float(((squared * counts).sum(axis=0)[known] / rows[known]).mean())


def concordance(forecast: Forecast, outcomes: Outcomes) -> float | None:
    """Return Harrell's concordance of the forecast means, None where no pair is comparable.

    Of the forecasts without their cap, as cut requests count as cut. A pair counts when it is
    known which of the two ended first. At most 8,000 rows, evenly taken, since pairs grow with
    their square.
    """
    import torch
    from torchsurv.metrics.cindex import ConcordanceIndex

    rows = np.arange(0, len(outcomes), -(-len(outcomes) // _CONCORDANCE_ROWS))
    some = outcomes.select(rows)
    if some.cut.all():
        return None
    first = some.remaining[~some.cut].min()
    if not ((some.remaining > first) | (some.cut & (some.remaining == first))).any():
        return None
    value = ConcordanceIndex()(
        torch.from_numpy(-forecast.select(rows).uncapped().mean().astype(np.float32)),
        torch.from_numpy(~some.cut),
        torch.from_numpy(some.remaining.astype(np.float32)),
    )
    return float(value) if bool(torch.isfinite(value)) else None


def pinball_loss(forecast: Forecast, outcomes: Outcomes) -> float:
    r"""Return the mean over the deciles of the quantile loss, in tokens.

    .. math:: \max\big(q (r - \hat r_q), (q - 1)(r - \hat r_q)\big)

    Forecast and truth are both of the tokens that come under the cap, so cut requests count.
    """
    deciles = np.arange(1, 10) / 10
    errors = outcomes.remaining[:, None] - forecast.quantile(deciles)
    return float(np.maximum(deciles * errors, (deciles - 1) * errors).mean())


def levels_of(forecast: SurvivalForecast, outcomes: Outcomes) -> FloatArray:
    """Return each row's u = P(R ≤ r), uniform when calibrated; a lower bound where cut."""
    return observed_levels(forecast.uncapped(), outcomes.remaining, outcomes.cut)


def coverage(levels: FloatArray, cut: BoolArray, level: float) -> float:
    """Return the share of requests that ended inside the central interval.

    Of a request that its cap ended, the part of "the cap" that lies inside counts, see
    `observed_share`.
    """
    low, high = observed_share(levels, cut, [(1 - level) / 2, (1 + level) / 2])
    return float(high - low)


def d_calibration(levels: FloatArray, cut: BoolArray) -> tuple[FloatArray, float]:
    """Return the share of requests by decile of u, and the test of its uniformity.

    A cut request counts evenly over the deciles above its level (Haider et al., JMLR 2020).
    The p-value assumes independent requests: give one row a request.

    Returns:
        [10] shares, each 1/10 when calibrated; and the chi-squared test's p-value.
    """
    from scipy.stats import chisquare

    shares = np.diff(observed_share(levels, cut, np.linspace(0, 1, 11)))
    return shares, float(chisquare(shares * len(levels)).pvalue)


@dataclass(frozen=True)
class ErrorSummary:
    """Absolute errors |ŷ - y| in tokens."""

    mae: float
    median_ae: float
    p90_ae: float


@dataclass(frozen=True)
class ErrorBin:
    """Mean absolute error of the rows whose key lies in [low, high)."""

    low: int
    high: int
    rows: int
    mae: float


def summarise_errors(predicted: Floats, remaining: IntArray) -> ErrorSummary:
    """Return mean, median and 90th percentile of the absolute error, in tokens.

    Raises:
        ValueError: the arrays are empty, differ in length or hold NaN.
    """
    errors = _absolute_errors(predicted, remaining)
    summary = errors.mean(), np.median(errors), np.percentile(errors, 90)
    return ErrorSummary(*map(float, summary))


def error_by_bin(
    predicted: Floats, remaining: IntArray, key: IntArray, edges: Sequence[int]
) -> list[ErrorBin]:
    """Return the MAE by a key [n_rows]: tokens already generated (STAR's Figure 7), or true length.

    Bin i is [edges[i], edges[i+1]); empty ones are left out.
    """
    errors = _absolute_errors(predicted, remaining)
    bins = []
    for low, high in itertools.pairwise(edges):
        inside = (key >= low) & (key < high)
        if inside.any():
            bins.append(ErrorBin(low, high, int(inside.sum()), float(errors[inside].mean())))
    return bins


def _absolute_errors(predicted: Floats, remaining: IntArray) -> Floats:
    if predicted.shape != remaining.shape or predicted.size == 0:
        raise ValueError(f"{predicted.shape} predictions for {remaining.shape} rows")
    errors: Floats = np.abs(predicted - remaining)
    if not np.isfinite(errors).all():
        raise ValueError(f"{int((~np.isfinite(errors)).sum())} predictions are not finite")
    return errors
