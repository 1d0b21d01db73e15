"""Ranges of an answer's length, and the survival curve that their probabilities stand for."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from sklearn.metrics import f1_score

from predictor.evaluation.survival_metrics import Outcomes, survival_scores
from predictor.forecasts.forecast import Forecast, ForecastError, SurvivalForecast
from predictor.forecasts.kaplan_meier import survival_edges
from rescheduler.papers.prompt_length.prompt_table import AnsweredPrompts

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Shape = Literal["linear", "geometric"]

_POINTS = 12
"""Grid points in a bucket whose curve is not linear."""


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Ranges of the tokens L that a request generates: bucket k is edges[k] ≤ L < edges[k + 1].

    The last bucket is open. Jain et al. 2025 (§4.1) draw them by completion time, since what a
    router must know is for how long a request will hold its place.

    Attributes:
        edges: where each bucket begins, ascending whole tokens from 0.

    Raises:
        ValueError: the edges are no such list.
    """

    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        edges = self.edges
        if len(edges) < 2 or edges[0] != 0 or edges[1] < 2:
            raise ValueError(
                f"length buckets begin at 0, then at 2 tokens or more, not at {list(edges)}"
            )
        if any(after <= before for before, after in pairwise(edges)):
            raise ValueError(f"length buckets must ascend, {list(edges)} do not")

    def __len__(self) -> int:
        """Return the number of buckets, the open one included."""
        return len(self.edges)

    @property
    def names(self) -> tuple[str, ...]:
        """What tables call the buckets, such as ``250–999``."""
        closed = [f"{low}–{high - 1}" for low, high in pairwise(self.edges)]
        return (*closed, f"≥{self.edges[-1]}")

    def of(self, lengths: npt.NDArray[np.integer]) -> IntArray:
        """Return the bucket that each length is in, [n]."""
        found: IntArray = np.searchsorted(self.edges, lengths, side="right") - 1
        return found.astype(np.int64)

    def masses(self, forecast: Forecast) -> FloatArray:
        """Return P(L in bucket) under forecasts made before the first token, [n, n_buckets]."""
        reached = forecast.at(np.array(self.edges[1:], dtype=np.float64) - 1)
        ends = np.zeros((len(forecast), 1))
        return -np.diff(np.concatenate([ends + 1, reached, ends], axis=1), axis=1)


@dataclass(frozen=True)
class BucketOptions:
    """Buckets as a configuration gives them, in one of three ways.

    Attributes:
        edges: where each bucket after the first begins, in tokens.
        width: or: tokens in each bucket,
        until: up to so many, from where on the last one is open.
        seconds: or: completion times, ascending; the paper's (§4.1) are 0.5 and 2 s,
        tokens_per_second: at so many tokens a second, 1/(a + b + c·context) of a profile; 500 in
            the paper, 250 and 1000 tokens. (Its third bucket ends at 4 s, which would be 2000
            tokens, and is printed as 4000.)
    """

    edges: tuple[int, ...] | None = None
    width: int | None = None
    until: int | None = None
    seconds: tuple[float, ...] | None = None
    tokens_per_second: float | None = None

    def buckets(self) -> LengthBuckets:
        """Return the buckets.

        Raises:
            ValueError: not exactly one way is given, or it gives no buckets.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        match given:
            case {"edges": edges} if len(given) == 1:
                return LengthBuckets((0, *edges))
            case {"width": width, "until": until} if len(given) == 2:
                if width < 2 or until < width:
                    raise ValueError(f"no buckets of {width} tokens until {until}")
                return LengthBuckets(tuple(range(0, until + width, width)))
            case {"seconds": seconds, "tokens_per_second": rate} if len(given) == 2:
                if not 0 < rate < np.inf:
                    raise ValueError(f"tokens per second must be positive, not {rate}")
                return LengthBuckets((0, *(round(end * rate) for end in seconds)))
        raise ValueError(
            "buckets are given by edges, by width and until, or by seconds and tokens_per_second"
        )


@dataclass(frozen=True, slots=True)
class BucketCurve:
    r"""How the ends of a bucket's requests are spread over its tokens.

    .. math:: S(h) = \sum_{j > k} p_j + p_k \big(1 - F_k(h)\big),
        \qquad e_k - 1 \le h \le e_{k+1} - 1

    for h in the bucket k that begins at :math:`e_k`, so that every bucket keeps its probability.
    With 1 in place of :math:`e_0`, the shortest answer, F is

    - ``linear``: :math:`(h + 1 - e_k) / (e_{k+1} - e_k)`, each length of a bucket alike;
    - ``geometric``: :math:`\log\frac{h + 1}{e_k} \big/ \log\frac{e_{k+1}}{e_k}`, each ratio of
      lengths alike;
    - in the open bucket :math:`1 - e^{-(h + 1 - e_K) / \tau}`.

    Attributes:
        buckets: K + 1 of them.
        tail_mean: τ in tokens.
        limit: tokens that no request passes, such as the model's context.
        shape: of F in the closed buckets.

    Raises:
        ForecastError: τ is not positive, or the limit is not beyond the last bucket's start.
    """

    buckets: LengthBuckets
    tail_mean: float
    limit: int
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        if not 0 < self.tail_mean < np.inf or self.shape not in ("linear", "geometric"):
            raise ForecastError(f"no curve of shape {self.shape!r} with tail {self.tail_mean}")
        if self.limit <= self.buckets.edges[-1]:
            raise ForecastError(
                f"the last bucket begins at {self.buckets.edges[-1]} tokens, the limit is "
                f"{self.limit}"
            )

    @classmethod
    def fit(
        cls,
        buckets: LengthBuckets,
        total_tokens: npt.NDArray[Any],
        cut: npt.NDArray[np.bool_],
        limit: int,
        shape: Shape = "linear",
    ) -> "BucketCurve":
        r"""Return the curve whose tail has the exponential of highest likelihood.

        .. math:: \tau = \frac{1}{d} \sum_{i : L_i \ge e_K} (L_i + 1 - e_K)

        over training requests, of which [n] ``total_tokens`` came and ``cut`` says whether their
        ``max_tokens`` ended them; d ended by themselves. Where none is known to have ended there,
        one is taken to have; where none got there, τ is :math:`e_K`.
        """
        start = buckets.edges[-1]
        inside = np.asarray(total_tokens) >= start
        beyond = float((np.asarray(total_tokens)[inside] + 1 - start).sum())
        ended = int((~cut[inside]).sum())
        return cls(buckets, beyond / max(ended, 1) if beyond else float(start), limit, shape)

    @property
    def edges(self) -> IntArray:
        """The forecasts' grid in tokens: edges of the buckets, and points between where curved."""
        bounds = [0, *(edge - 1 for edge in self.buckets.edges[1:])]
        points = [np.array(bounds)]
        if self.shape == "geometric":
            points += [
                np.geomspace(low + 1, high + 1, _POINTS).round() - 1
                for low, high in pairwise(bounds)
            ]
        tail = self.limit - bounds[-1]
        points.append(bounds[-1] + (survival_edges(tail) if tail > 20 else np.arange(tail + 1)))
        return np.unique(np.concatenate(points)).astype(np.int64)

    def forecast(
        self, probabilities: npt.ArrayLike, max_tokens: npt.ArrayLike = np.inf
    ) -> SurvivalForecast:
        """Return the forecasts of n requests whose first token is still to come.

        They age like any others: after j tokens a request is known to be longer than j.

        Args:
            probabilities: [n, n_buckets], in any scale.
            max_tokens: one number, or [n]: no request generates more.

        Raises:
            ForecastError: the probabilities have another shape, are negative, or sum to 0.
        """
        masses = np.asarray(probabilities, dtype=np.float64)
        if masses.ndim != 2 or masses.shape[1] != len(self.buckets):
            raise ForecastError(
                f"probabilities of shape {masses.shape} for {len(self.buckets)} length buckets"
            )
        sums = masses.sum(axis=1, keepdims=True)
        if not np.isfinite(sums).all() or (masses < 0).any() or (sums <= 0).any():
            raise ForecastError("probabilities of length buckets are negative, or none is positive")
        edges = self.edges
        curves = masses / sums @ self._mass_left(edges).T
        curves = np.minimum.accumulate(np.clip(curves, 0.0, 1.0), axis=1)  # rounding must not rise
        curves[:, 0] = 1.0
        return SurvivalForecast.new(edges, curves, max_tokens)

    def _mass_left(self, h: IntArray) -> FloatArray:
        """Return the part 1 − F of each bucket's mass that lies beyond h, [n_h, n_buckets]."""
        length = h[:, None] + 1.0  # the shortest that is longer than h
        starts = np.maximum(np.array(self.buckets.edges, dtype=np.float64), 1)
        low, high = starts[:-1], starts[1:]
        if self.shape == "geometric":
            ended = np.log(length / low) / np.log(high / low)
        else:
            ended = (length - low) / (high - low)
        tail = np.exp(-np.maximum(length - starts[-1], 0) / self.tail_mean)
        left: FloatArray = np.concatenate([1 - np.clip(ended, 0, 1), tail], axis=1)
        return left


_ROWS_AT_ONCE = 256


Scores = dict[str, Any]
"""Measures of one method, by name, see `length_scores`."""


def length_scores(
    buckets: LengthBuckets, probabilities: FloatArray, forecast: Forecast, test: AnsweredPrompts
) -> Scores:
    """Return every measure of a method by its [n, n_buckets] probabilities and capped forecast.

    ``accuracy`` is the share of requests whose most probable bucket is the true one, ``by_task``
    the same for each task; ``macro_f1`` the mean over the buckets that occur of the F1 score,
    which, unlike the accuracy, does not forgive never predicting a rare bucket; ``log_loss`` the
    mean of −log P(true bucket), nats; ``mae`` the error of the curve's median, tokens; ``crps`` see
    `crps`. The others are those of `SurvivalScores`.
    """
    truth, predicted = buckets.of(test.total_tokens), probabilities.argmax(axis=1)
    survival = survival_scores(forecast, test.outcomes)
    true_share = probabilities[np.arange(len(truth)), truth]
    f1 = f1_score(truth, predicted, labels=np.unique(truth), average="macro", zero_division=0)
    return {
        "accuracy": float((predicted == truth).mean()),
        "by_task": accuracy_by_task(predicted == truth, test),
        "macro_f1": float(f1),
        "log_loss": float(-np.log(np.maximum(true_share, 1e-6)).mean()),
        "mae": float(np.abs(forecast.median() - test.total_tokens).mean()),
        "crps": crps(forecast, test.outcomes),
        "ibs": survival.ibs,
        "concordance": survival.concordance,
        "auc_within": survival.auc_within,
        "coverage": survival.coverage,
    }


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
