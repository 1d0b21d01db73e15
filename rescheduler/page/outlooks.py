"""What the page is told of finish times and of the load ahead: what was forecast, and what came."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rescheduler.finish_times.ahead_metrics import wanted_instances
from rescheduler.page.snapshot import Finishes, Outlook
from rescheduler.placement.instance_state import InstanceState
from rescheduler.proxy.finish_reports import FinishReports

__all__ = ["SECONDS", "WANTED_SECONDS", "Outlooks"]

SECONDS = 60.0
"""Ahead, of the load that is compared with what comes."""
WANTED_SECONDS = 300.0
"""Ahead, of the load that instances are wanted for."""
_LATE_SECONDS = 2.0
"""By which a forecast of now may be older than that."""
_DEVIATIONS = 1.2816
"""Of a normal variable, within which it is with a probability of 0.8."""


class _Foretold(NamedTuple):
    at: float
    tokens: list[int]


class Outlooks:
    """Looks ahead whenever the page looks, and keeps what it saw until that has come."""

    def __init__(
        self,
        reports: FinishReports,
        decodes: list[InstanceState],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._reports, self._decodes = reports, decodes
        self._clock = clock or asyncio.get_running_loop().time
        self._foretold: deque[_Foretold] = deque()

    def now(self) -> Outlook | None:
        """Return what is expected, and what had been of now; None while nothing is known."""
        load, later = (
            self._reports.finish_times.load.at(seconds, arrivals=True)
            for seconds in (SECONDS, WANTED_SECONDS)
        )
        if load is None or later is None:
            return None
        spread = _DEVIATIONS * load.tokens_deviation
        tokens = [round(max(0.0, load.tokens + by)) for by in (-spread, 0.0, spread)]
        now = self._clock()
        self._foretold.append(_Foretold(now, tokens))
        due = now - SECONDS
        while len(self._foretold) > 1 and self._foretold[1].at <= due:
            self._foretold.popleft()
        oldest = self._foretold[0]
        came = due - _LATE_SECONDS < oldest.at <= due
        wanted = wanted_instances(later, self._decodes)
        return Outlook(
            seconds=SECONDS,
            tokens=tokens,
            foretold=oldest.tokens if came else [],
            wanted=wanted,
        )

    def finishes(self) -> Finishes | None:
        """Return how forecasts and promises of finishes came out; None without any."""
        held, promises = self._reports.held, self._reports.promised
        if not held and not promises:
            return None
        return Finishes(
            forecasts=len(held),
            held=round(sum(held) / len(held), 4) if held else None,
            kept=promises["kept"],
            broken=promises["broken"],
            refused=promises["refused"],
        )
