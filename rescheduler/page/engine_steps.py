"""How long engines' steps take, from how many they had done whenever they were looked at."""

import time
from collections.abc import Callable
from typing import NamedTuple

from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import InstanceKey

__all__ = ["EngineSteps"]


class _Seen(NamedTuple):
    """An engine at work.

    Attributes:
        epoch: of its publisher.
        step: steps that it had done.
        received: when it said so.
        seconds: of a step until then; None before the second look.
    """

    epoch: int
    step: int
    received: float
    seconds: float | None


class EngineSteps:
    """Tells the duration of a step from two looks at an engine that works at both.

    Args:
        telemetry: of the engines.
        clock: monotonic seconds.
    """

    def __init__(
        self, telemetry: TelemetrySubscriber, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._telemetry, self._clock = telemetry, clock
        self._seen: dict[InstanceKey, _Seen] = {}

    def seconds(self) -> dict[str, float]:
        """Look; return the mean seconds of a step since the look before, by name.

        Of an engine with several ranks the slowest one's; nothing of one that idles, is stale, or
        was not at work at the last look.
        """
        now, seen = self._clock(), {}
        with self._telemetry.lock:
            view = self._telemetry.view
            for key, instance in view.instances.items():
                if instance.requests and not view.is_stale(key, now):
                    seen[key] = self._look(key, instance.epoch, instance.step, instance.received)
        self._seen = seen
        slowest: dict[str, float] = {}
        for key, one in seen.items():
            if one.seconds is not None:
                slowest[key.name] = max(one.seconds, slowest.get(key.name, 0.0))
        return slowest

    def _look(self, key: InstanceKey, epoch: int, step: int, received: float) -> _Seen:
        before = self._seen.get(key)
        if before is None or before.epoch != epoch or step < before.step:
            return _Seen(epoch, step, received, None)
        if step == before.step:
            return before  # nothing new has come
        return _Seen(epoch, step, received, (received - before.received) / (step - before.step))
