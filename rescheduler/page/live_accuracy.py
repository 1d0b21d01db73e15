"""How good the forecasts that a proxy hears have been, for as long as somebody watches."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rescheduler.monitoring.forecast_figures import MIN_REQUESTS
from rescheduler.monitoring.forecast_quality import score
from rescheduler.monitoring.last_hour import LastHour
from rescheduler.page.snapshot import Accuracy
from rescheduler.telemetry.subscriber import TelemetrySubscriber

__all__ = ["LiveAccuracy"]


class LiveAccuracy:
    """Scores the requests that end while somebody watches; nothing is kept otherwise.

    Args:
        telemetry: that the requests are heard of by.
        clock: monotonic seconds.
    """

    def __init__(
        self, telemetry: TelemetrySubscriber, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._telemetry, self._clock = telemetry, clock
        self._hour = LastHour()
        self._scoring = threading.Lock()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have the forecasts of running requests kept while the body runs."""
        self._telemetry.keep_history(True)
        try:
            yield
        finally:
            self._telemetry.keep_history(False)

    def now(self) -> Accuracy | None:
        """Score what has ended, and return the figures of the last hour; None without any."""
        with self._scoring:
            now = self._clock()
            for finished in self._telemetry.take_finished():
                scored = score(finished)
                if scored is not None:
                    self._hour.add(scored, now)
            figures, drift = self._hour.figures(now), self._hour.drift(now)
        if figures is None:
            return None
        alarm = None if figures.requests < MIN_REQUESTS else figures.alarm() or ""
        return Accuracy(
            requests=figures.requests,
            coverage=[round(share, 4) for share in figures.coverage().values()],
            error=round(figures.mae(), 1),
            bias=round(figures.bias(), 1),
            late=round(figures.late_share(), 4),
            alarm=alarm,
            drift=drift,
        )
