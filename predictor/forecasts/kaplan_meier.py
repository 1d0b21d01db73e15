"""The product-limit estimate of a survival curve from observations of which some were cut."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KaplanMeierCurve", "survival_edges"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KaplanMeierCurve:
    """A step function S(t) = P(T > t).

    Attributes:
        times: [n_steps] ascending values at which something was observed to end.
        survival: [n_steps] S at and after each of them; 1 before the first.
        last_observed: the largest value seen, of ended or cut observations.
    """

    times: FloatArray
    survival: FloatArray
    last_observed: float

    @classmethod
    def estimate(
        cls, values: npt.NDArray[Any], censored: npt.NDArray[np.bool_]
    ) -> "KaplanMeierCurve":
        r"""Estimate S by the product-limit formula (Kaplan and Meier, JASA 1958).

        .. math:: \hat S(t) = \prod_{t_j \le t} \left(1 - \frac{d_j}{m_j}\right)

        with :math:`d_j` observations that ended at :math:`t_j` and :math:`m_j` at least that
        long. One cut at c counts in :math:`m_j` for :math:`t_j \le c` and nowhere else: it
        says that its value is more than c, not what it is.

        Args:
            values: [n] where each ended or was cut.
            censored: [n] whether it was cut.

        Raises:
            ValueError: there are no observations.
        """
        if len(values) == 0:
            raise ValueError("Kaplan-Meier: there are no observations")
        times, ended = np.unique(values[~censored], return_counts=True)
        at_risk = len(values) - np.searchsorted(np.sort(values), times, side="left")
        survival = np.cumprod(1 - ended / at_risk, dtype=np.float64)
        return cls(times.astype(np.float64), survival, float(values.max()))

    def at(self, values: npt.ArrayLike) -> FloatArray:
        """Return S at the given values."""
        steps = np.searchsorted(self.times, values, side="right")
        reached: FloatArray = np.concatenate([[1.0], self.survival])[steps]
        return reached

    def quantile(self, level: float) -> float:
        """Return the first value with S at most 1 - level; the largest seen where none has."""
        i = int(np.searchsorted(-self.survival, level - 1.0, side="left"))
        return float(self.times[i]) if i < len(self.times) else self.last_observed


_FIRST, _DENSE_UNTIL, _OCTAVE = 5, 20, 6
"""Width of the bins near 0, where bins begin to grow, and bins in each doubling from there."""


def survival_edges(limit: int) -> IntArray:
    """Return edges dense near 0 and logarithmic to the model's limit.

    Routing looks tens of tokens ahead, where a bin must be small; far away a relative error is
    what matters, so that bins may grow with the distance.

    Args:
        limit: the last edge: tokens that no request can pass, such as the model's context.

    Returns:
        [n_edges] ascending whole tokens, from 0 to ``limit``.

    Raises:
        ValueError: ``limit`` is not above 20.
    """
    if limit <= _DENSE_UNTIL:
        raise ValueError(
            f"no grid to {limit} tokens in bins of {_FIRST} up to {_DENSE_UNTIL}, then {_OCTAVE} "
            "a doubling"
        )
    dense = np.arange(0, _DENSE_UNTIL, _FIRST)
    bins = max(1, round(_OCTAVE * np.log2(limit / _DENSE_UNTIL)))
    grown = np.geomspace(_DENSE_UNTIL, limit, bins + 1).round()
    edges: IntArray = np.unique(np.concatenate([dense, grown])).astype(np.int64)
    return edges
