"""From probabilities of length buckets to a survival curve."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import ForecastError, SurvivalForecast
from predictor.forecasts.survival_grid import survival_edges
from predictor.prompt_length.length_buckets import LengthBuckets

__all__ = ["BucketCurve", "Shape"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Shape = Literal["linear", "geometric"]

_POINTS = 12
"""Grid points in a bucket whose curve is not linear."""


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

        with d of these requests ended by themselves: those that their ``max_tokens`` cut count
        in the sum only. Where none is known to have ended there, one is taken to have; where
        none got there, τ is :math:`e_K`.

        Args:
            buckets: of lengths.
            total_tokens: [n] tokens that training requests generated.
            cut: [n] whether they were cut then.
            limit: see the class.
            shape: see the class.
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
