"""What the forecasts of requests that have ended got right, and what wrong."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["AGES", "BAND", "INTERVALS", "MIN_REQUESTS", "ForecastFigures"]

FloatArray = npt.NDArray[np.float64]

AGES = ("0", "1-127", "128-511", "512+")
"""Generated tokens when a forecast was made, by which errors are grouped."""

INTERVALS = (50, 80, 90)
"""Central intervals, in percent, whose coverage is watched."""

BAND = 0.1
"""How far the coverage of the 80% interval may be off before it is an alarm."""

MIN_REQUESTS = 50
"""Requests that must have ended before anything is an alarm."""

_ALARMED = 80


@dataclass(frozen=True, slots=True)
class ForecastFigures:
    """Errors and coverage of the forecasts of some requests, as sums over their forecasts.

    Attributes:
        requests: how many requests.
        forecasts: [n_ages] how many forecasts, by `AGES`.
        absolute: [n_ages] sum of |median − remaining|.
        signed: [n_ages] sum of median − remaining.
        inside: [n_intervals] how many ends fell into each of the `INTERVALS`.
        late: how many ends came after the median.
    """

    requests: int
    forecasts: FloatArray
    absolute: FloatArray
    signed: FloatArray
    inside: FloatArray
    late: float

    @classmethod
    def total(cls, parts: Collection["ForecastFigures"]) -> "ForecastFigures":
        """Return the figures of all the requests of several, at least one."""
        return cls(
            requests=sum(one.requests for one in parts),
            forecasts=np.sum([one.forecasts for one in parts], axis=0),
            absolute=np.sum([one.absolute for one in parts], axis=0),
            signed=np.sum([one.signed for one in parts], axis=0),
            inside=np.sum([one.inside for one in parts], axis=0),
            late=sum(one.late for one in parts),
        )

    def mae(self) -> float:
        """Return the mean |median − remaining| in tokens."""
        return float(self.absolute.sum() / self.forecasts.sum())

    def bias(self) -> float:
        """Return the mean of median − remaining in tokens: above 0 is too long."""
        return float(self.signed.sum() / self.forecasts.sum())

    def bias_by_age(self) -> dict[str, float]:
        """Return the same by `AGES`, for those of which there are forecasts."""
        forecasts, signed = self.forecasts.tolist(), self.signed.tolist()
        ages = zip(AGES, forecasts, signed, strict=True)
        return {age: tokens / count for age, count, tokens in ages if count}

    def coverage(self) -> dict[int, float]:
        """Return the share of ends inside each of the `INTERVALS`.

        Of uncapped curves, see `observed_share`.
        """
        shares = self.inside / self.forecasts.sum()
        return dict(zip(INTERVALS, shares.tolist(), strict=True))

    def late_share(self) -> float:
        """Return the share of ends after the uncapped median: a half when nothing is biased."""
        return float(self.late / self.forecasts.sum())

    def alarm(self, band: float = BAND) -> str | None:
        """Return what is wrong with the intervals, and what to do; None when nothing is.

        Args:
            band: how far the coverage of the 80% interval may be off.
        """
        share = self.coverage()[_ALARMED]
        if abs(share - _ALARMED / 100) <= band:
            return None
        wrong = "narrow" if share < _ALARMED / 100 else "wide"
        return (
            f"the 80% intervals are too {wrong}: they held {share:.0%} of the ends of the last "
            f"{self.requests} requests. The model, the prompts or the sampling have changed "
            "since the predictor was trained; `headway recalibrate` mends it from a log of "
            "finished requests"
        )
