"""The product-limit estimate of a survival curve from observations of which some were cut."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KaplanMeierCurve"]

FloatArray = npt.NDArray[np.float64]


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
