"""Which engines lived while the proxy took them out of service, or computed their requests again.

The harness kills, stops and starts the engines, and so knows which of them lived at any time.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from benchmarks.chaos.ledger import Ledger

_STARTED_SECONDS = 5.0
"""After a new engine is ready, for which what befell the old one may still be noticed."""
_CONTINUED_SECONDS = 5.0
"""After SIGCONT, for which an engine taken out of service counts as stopped."""
_SAMPLE_SECONDS = 0.2

_Spell = list[float]  # its begin and end


@dataclass
class Lives:
    """When each engine was dead, and when it was stopped by SIGSTOP.

    An engine counts as dead from just before the harness kills it until five seconds after the next
    one in its place answered ``/health``, and whenever its process has ended on its own. At any
    other time it lives, however slow it is.
    """

    is_running: Callable[[str], bool]
    _dead: dict[str, list[_Spell]] = field(default_factory=lambda: defaultdict(list))
    _stopped: dict[str, list[_Spell]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def dead(self, name: str) -> Iterator[None]:
        with _spell(self._dead[name], _STARTED_SECONDS):
            yield

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        with _spell(self._stopped[name], _CONTINUED_SECONDS):
            yield

    def lived(self, name: str, since: float, until: float) -> bool:
        """Return whether an engine lived during the whole of a time that ends now."""
        return self.is_running(name) and not _within(self._dead[name], since, until)

    def was_stopped(self, name: str, since: float, until: float) -> bool:
        return _within(self._stopped[name], since, until)

    def is_dead(self, name: str) -> bool:
        """Return whether an engine is being killed or started again."""
        return any(end == inf for _, end in self._dead[name])


@contextmanager
def _spell(spells: list[_Spell], further: float) -> Iterator[None]:
    spell = [time.monotonic(), inf]
    spells.append(spell)
    try:
        yield
    finally:
        spell[1] = time.monotonic() + further


def _within(spells: list[_Spell], since: float, until: float) -> bool:
    return any(begin <= until and since <= end for begin, end in spells)


class ServiceWatch:
    """Counts how often the proxy takes an engine out of service, and whether that engine lived.

    The state of each breaker is read from the admin API every 0.2 s: an open one stays open for a
    second at least. An engine is taken out when its breaker was closed at one reading and is not at
    the next; a proxy that has just started has all closed. ``living_out_of_service`` counts it if
    the engine lived, as `Lives` has it, from the one reading to the other, and
    ``stopped_out_of_service`` those among them that were stopped by SIGSTOP, or had been until five
    seconds before; otherwise ``dead_out_of_service`` counts it.
    """

    def __init__(self, lives: Lives, ledger: Ledger) -> None:
        self._lives, self._ledger = lives, ledger
        self._closed: dict[str, bool] = {}
        self._proxy: int | None = None
        self._read = self._began = time.monotonic()

    async def watch(self, read: Callable[[], Any], proxy: Callable[[], int | None]) -> None:
        """Look forever: ``read`` returns the states by name, or None; ``proxy`` its process id."""
        while True:
            states = await read()
            if states is not None:
                self.see(states, proxy(), time.monotonic())
            await asyncio.sleep(_SAMPLE_SECONDS)

    def see(self, states: Mapping[str, str], proxy: int | None, now: float) -> None:
        """Take a reading of the proxy with this process id."""
        if proxy != self._proxy:
            self._closed.clear()
            self._proxy = proxy
        for name, state in states.items():
            if self._closed.get(name, True) and state != "closed":
                self._taken_out(name, now)
            self._closed[name] = state == "closed"
        self._read = now

    def _taken_out(self, name: str, now: float) -> None:
        counts = self._ledger.counts
        if not self._lives.lived(name, self._read, now):
            counts["dead_out_of_service"] += 1
            return
        counts["living_out_of_service"] += 1
        stopped = self._lives.was_stopped(name, self._read, now)
        counts["stopped_out_of_service"] += stopped
        how = "stopped" if stopped else "running"
        self._ledger.notes.append(
            f"{now - self._began:.0f} s: {name} is taken out of service, and lives ({how})"
        )
