"""How good the forecasts of running engines are, from the requests that have ended."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.forecasts.recalibration import observed_levels, observed_share
from rescheduler.telemetry.telemetry_view import FinishedForecasts

__all__ = ["AGES", "INTERVALS", "ForecastQuality", "ScoredRequest"]

FloatArray = npt.NDArray[np.float64]

AGES = ("0", "1-127", "128-511", "512+")
"""Generated tokens when a forecast was made, by which errors are grouped."""

INTERVALS = (50, 80, 90)
"""Central intervals, in percent, whose coverage is watched."""

_AGE_STARTS = (1, 128, 512)
_NOMINAL = np.array([[50 - level / 2, 50 + level / 2] for level in INTERVALS]) / 100
_ALARMED = 80


@dataclass(frozen=True, slots=True)
class ScoredRequest:
    """A request that ran to its end, and its forecasts against what came.

    Attributes:
        finished: as it was received.
        cut: whether ``max_tokens`` ended it.
        generated: [n_forecasts] tokens n when each forecast was made.
        remaining: [n_forecasts] tokens that came after it.
        medians: [n_forecasts] tokens that it expected: its median, capped by ``max_tokens``.
        levels: [n_forecasts] u = P(R ≤ remaining), see `observed_levels`.
    """

    finished: FinishedForecasts
    cut: bool
    generated: FloatArray
    remaining: FloatArray
    medians: FloatArray
    levels: FloatArray


class ForecastQuality:
    """Errors and coverage over the last requests that ended.

    Every forecast of a request counts once, so that long requests weigh more, as they do
    among the running. Right after a start, short requests are over-represented.

    Args:
        window: requests that count.
        band: how far the coverage of the 80% interval may be off before it is an alarm.
        min_requests: requests that must have ended before there is an alarm.

    Attributes:
        scored: requests scored so far, also before the window.
        unscored: requests that ended otherwise (abort, error ...) or without a forecast.

    Raises:
        ValueError: the window is shorter than ``min_requests``, or a number is not positive.
    """

    def __init__(self, window: int = 500, band: float = 0.1, min_requests: int = 50) -> None:
        if not 0 < min_requests <= window or band <= 0:
            raise ValueError(
                f"a window of {window} requests, an alarm from {min_requests} on and beyond "
                f"{band} from nominal do not fit each other"
            )
        self._band, self._min_requests = band, min_requests
        self._requests: deque[_Sums] = deque(maxlen=window)
        self.scored = 0
        self.unscored = 0

    def add(self, finished: FinishedForecasts) -> ScoredRequest | None:
        """Score the forecasts of a request that ended; None if it had no forecasts."""
        scored = _score(finished)
        if scored is None:
            self.unscored += 1
            return None
        self.scored += 1
        self._requests.append(_sums(scored))
        return scored

    @property
    def in_window(self) -> int:
        """Requests that the figures are of."""
        return len(self._requests)

    def mae(self) -> float | None:
        """Return the mean |median − remaining| in tokens; None before the first request."""
        forecasts, absolute = self._total("forecasts"), self._total("absolute")
        return float(absolute.sum() / forecasts.sum()) if self._requests else None

    def bias_by_age(self) -> dict[str, float]:
        """Return the mean of median − remaining in tokens by `AGES`: above 0 is too long."""
        return self._by_age("signed")

    def coverage(self) -> dict[int, float] | None:
        """Return the share of ends inside the central 50, 80 and 90% interval.

        None before the first request. Of uncapped curves, see `observed_share`.
        """
        if not self._requests:
            return None
        shares = self._total("inside") / self._total("forecasts").sum()
        return dict(zip(INTERVALS, shares.tolist(), strict=True))

    def alarm(self) -> str | None:
        """Return what is wrong with the intervals, and what to do; None when nothing is."""
        coverage = self.coverage()
        if coverage is None or self.in_window < self._min_requests:
            return None
        share = coverage[_ALARMED]
        if abs(share - _ALARMED / 100) <= self._band:
            return None
        wrong = "narrow" if share < _ALARMED / 100 else "wide"
        return (
            f"the 80% intervals are too {wrong}: they held {share:.0%} of the ends of the last "
            f"{self.in_window} requests. The model, the prompts or the sampling have changed "
            "since the predictor was trained; `headway recalibrate` mends it from a log of "
            "finished requests"
        )

    def _by_age(self, name: str) -> dict[str, float]:
        if not self._requests:
            return {}
        forecasts, total = self._total("forecasts"), self._total(name)
        return {age: float(total[i] / forecasts[i]) for i, age in enumerate(AGES) if forecasts[i]}

    def _total(self, name: str) -> FloatArray:
        total: FloatArray = np.sum([getattr(sums, name) for sums in self._requests], axis=0)
        return total


@dataclass(frozen=True, slots=True)
class _Sums:
    """What one request adds to each figure.

    Attributes:
        forecasts: [n_ages] how many there are.
        absolute: [n_ages] sum of |median − remaining|.
        signed: [n_ages] sum of median − remaining.
        inside: [n_intervals] how many ends fell into each interval.
    """

    forecasts: FloatArray
    absolute: FloatArray
    signed: FloatArray
    inside: FloatArray


def _score(finished: FinishedForecasts) -> ScoredRequest | None:
    event = finished.event
    if event.finish_reason not in ("stop", "length") or not finished.forecasts:
        return None
    forecast = finished.forecast()
    generated = np.array([kept.forecast_at for kept in finished.forecasts], dtype=np.float64)
    before = np.flatnonzero(generated < event.total_tokens)
    if not len(before):
        return None
    forecast, generated = forecast.select(before), generated[before]
    remaining = event.total_tokens - generated
    cut = event.finish_reason == "length"
    return ScoredRequest(
        finished=finished,
        cut=cut,
        generated=generated,
        remaining=remaining,
        medians=forecast.median(),
        levels=observed_levels(forecast.uncapped(), remaining, np.full(len(remaining), cut)),
    )


def _sums(scored: ScoredRequest) -> _Sums:
    age = np.searchsorted(_AGE_STARTS, scored.generated, side="right")
    error = scored.medians - scored.remaining
    ends = observed_share(scored.levels, np.full(len(error), scored.cut), _NOMINAL.ravel())
    low, high = ends.reshape(_NOMINAL.shape).T
    return _Sums(
        forecasts=np.bincount(age, minlength=len(AGES)).astype(np.float64),
        absolute=np.bincount(age, np.abs(error), len(AGES)).astype(np.float64),
        signed=np.bincount(age, error, len(AGES)).astype(np.float64),
        inside=(high - low) * len(error),
    )
