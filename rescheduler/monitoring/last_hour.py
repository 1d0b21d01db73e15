"""How good the forecasts were over the last hour, whether many requests ended in it or few."""

from collections import deque

from rescheduler.monitoring.forecast_figures import MIN_REQUESTS, ForecastFigures
from rescheduler.monitoring.forecast_quality import ScoredRequest

__all__ = ["LastHour"]

_KEPT_MINUTES = 60
_RECENT_MINUTES = 15
_WORSE = 1.5


class LastHour:
    """The figures of the requests that ended within the last hour, kept by the minute.

    Nothing here has a clock: times are seconds on one that does not go back.
    """

    def __init__(self) -> None:
        self._minutes: deque[tuple[int, ForecastFigures]] = deque()

    def add(self, scored: ScoredRequest, now: float) -> None:
        """Count a request that ends now."""
        minute, figures = _minute(now), scored.figures()
        if self._minutes and self._minutes[-1][0] == minute:
            figures = ForecastFigures.total([self._minutes.pop()[1], figures])
        self._minutes.append((minute, figures))

    def figures(self, now: float) -> ForecastFigures | None:
        """Return those of the last hour; None if no request has ended in it."""
        self._forget(now)
        return _total([figures for _, figures in self._minutes])

    def drift(self, now: float) -> str | None:
        """Return in which way the forecasts have become worse within the hour.

        Empty when they have not: the median's error in the last quarter of an hour is at most one
        and a half times that of the time before. None while either has too few requests, or the
        time before is less than a quarter of an hour: the first requests to end are the short ones.
        """
        self._forget(now)
        split = _minute(now) - _RECENT_MINUTES
        if not self._minutes or self._minutes[0][0] > split - _RECENT_MINUTES:
            return None
        before = _total([figures for minute, figures in self._minutes if minute <= split])
        recent = _total([figures for minute, figures in self._minutes if minute > split])
        for one in (before, recent):
            if one is None or one.requests < MIN_REQUESTS:
                return None
        assert before is not None
        assert recent is not None
        if recent.mae() <= _WORSE * before.mae():
            return ""
        return (
            f"the forecasts have become worse: the median was off by {recent.mae():,.0f} tokens "
            f"in the last quarter of an hour, and by {before.mae():,.0f} before. Longer answers "
            "alone can do that"
        )

    def _forget(self, now: float) -> None:
        while self._minutes and self._minutes[0][0] <= _minute(now) - _KEPT_MINUTES:
            self._minutes.popleft()


def _minute(now: float) -> int:
    return int(now // 60)


def _total(parts: list[ForecastFigures]) -> ForecastFigures | None:
    return ForecastFigures.total(parts) if parts else None
