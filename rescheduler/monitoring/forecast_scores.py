"""Scores of the requests that end, as the engines report them."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from math import ceil

from rescheduler.monitoring.forecast_quality import ForecastQuality, LastHour, score
from rescheduler.telemetry.subscriber import TelemetrySubscriber

__all__ = ["ForecastScores"]

logger = logging.getLogger("headway.serve")

_SECONDS = 1.0
_MOST = 100
"""Requests that are scored at a time, which takes 0.3 ms each."""


class ForecastScores:
    """Scores the forecasts of the requests that end.

    Attributes:
        lock: held while the scores change; read them under it only.
        quality: of the last requests.
        hour: of those of the last hour.
    """

    def __init__(
        self, telemetry: TelemetrySubscriber, clock: Callable[[], float] = time.monotonic
    ) -> None:
        telemetry.keep_history()
        self._telemetry, self._clock = telemetry, clock
        self.lock = threading.Lock()
        self.quality, self.hour = ForecastQuality(), LastHour()

    def take(self) -> None:
        """Score what has ended since the last call; of very many an even part."""
        ended, now = self._telemetry.take_finished(), self._clock()
        chosen = ended[:: max(1, ceil(len(ended) / _MOST))]
        scored = [one.figures() for one in map(score, chosen) if one is not None]
        with self.lock:
            for figures in scored:
                self.quality.add(figures)
                self.hour.add(figures, now)

    async def run(self) -> None:
        """Score what ends, forever, in a thread."""
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                await asyncio.to_thread(self.take)
            except Exception:
                logger.exception("the forecasts of what has ended cannot be scored")
