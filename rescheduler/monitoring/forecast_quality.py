"""How good the forecasts of running engines are, from the requests that have ended."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.forecasts.recalibration import observed_levels, observed_share
from rescheduler.monitoring.forecast_figures import (
    AGES,
    BAND,
    INTERVALS,
    MIN_REQUESTS,
    ForecastFigures,
)
from rescheduler.telemetry.telemetry_view import FinishedForecasts

__all__ = ["ForecastQuality", "ScoredRequest", "score"]

FloatArray = npt.NDArray[np.float64]

_AGE_STARTS = (1, 128, 512)
_NOMINAL = np.array([[50 - level / 2, 50 + level / 2] for level in INTERVALS]) / 100
_WATCHED_LEVELS = [*_NOMINAL.ravel().tolist(), 0.5]


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

    def figures(self) -> ForecastFigures:
        """Return what the request adds to the figures of many."""
        age = np.searchsorted(_AGE_STARTS, self.generated, side="right")
        error = self.medians - self.remaining
        cut = np.full(len(error), self.cut)
        *ends, early = observed_share(self.levels, cut, _WATCHED_LEVELS)
        low, high = np.reshape(ends, _NOMINAL.shape).T
        return ForecastFigures(
            requests=1,
            forecasts=np.bincount(age, minlength=len(AGES)).astype(np.float64),
            absolute=np.bincount(age, np.abs(error), len(AGES)).astype(np.float64),
            signed=np.bincount(age, error, len(AGES)).astype(np.float64),
            inside=(high - low) * len(error),
            late=float((1 - early) * len(error)),
        )


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

    def __init__(
        self, window: int = 500, band: float = BAND, min_requests: int = MIN_REQUESTS
    ) -> None:
        if not 0 < min_requests <= window or band <= 0:
            raise ValueError(
                f"a window of {window} requests, an alarm from {min_requests} on and beyond "
                f"{band} from nominal do not fit each other"
            )
        self._band, self._min_requests = band, min_requests
        self._requests: deque[ForecastFigures] = deque(maxlen=window)
        self.scored = 0
        self.unscored = 0

    def add(self, finished: FinishedForecasts) -> ScoredRequest | None:
        """Score the forecasts of a request that ended; None if it had no forecasts."""
        scored = score(finished)
        if scored is None:
            self.unscored += 1
            return None
        self.scored += 1
        self._requests.append(scored.figures())
        return scored

    @property
    def in_window(self) -> int:
        """Requests that the figures are of."""
        return len(self._requests)

    def mae(self) -> float | None:
        """Return the mean |median − remaining| in tokens; None before the first request."""
        return self._figures().mae() if self._requests else None

    def bias_by_age(self) -> dict[str, float]:
        """Return the mean of median − remaining in tokens by `AGES`: above 0 is too long."""
        return self._figures().bias_by_age() if self._requests else {}

    def coverage(self) -> dict[int, float] | None:
        """Return the share of ends inside the central 50, 80 and 90% interval.

        None before the first request. Of uncapped curves, see `observed_share`.
        """
        return self._figures().coverage() if self._requests else None

    def alarm(self) -> str | None:
        """Return what is wrong with the intervals, and what to do; None when nothing is."""
        enough = self.in_window >= self._min_requests
        return self._figures().alarm(self._band) if enough else None

    def _figures(self) -> ForecastFigures:
        return ForecastFigures.total(self._requests)


def score(finished: FinishedForecasts) -> ScoredRequest | None:
    """Score the forecasts of a request that ended; None if it was cut short or had none."""
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
