"""How long steps take, also when one is scheduled while another runs."""

from collections import deque
from typing import NamedTuple

__all__ = ["MeasuredStep", "StepClock"]


class MeasuredStep(NamedTuple):
    """A step that has been computed.

    Attributes:
        new: tokens computed in it.
        context: tokens of context of its requests, once those are computed.
        seconds: that it took.
        estimate: seconds that it was estimated to take.
    """

    new: int
    context: int
    seconds: float
    estimate: float


class _InFlight(NamedTuple):
    scheduled: float
    new: int
    context: int
    estimate: float


class StepClock:
    """Measures steps between their scheduling and their output, in the order of both.

    With asynchronous scheduling a step is scheduled while the one before it still runs. Its time
    then counts from that one's output on: it could not begin before.
    """

    def __init__(self) -> None:
        self._in_flight: deque[_InFlight] = deque()
        self._free_at = 0.0
        self._last_output = 0.0

    def begins(self, now: float) -> float:
        """Return when a step that is scheduled now can begin, as far as that is known.

        Args:
            now: seconds of a monotonic clock, as in all methods.
        """
        return max(now, self._free_at) if self._in_flight else now

    def scheduled(self, now: float, new: int, context: int, estimate: float) -> None:
        """Note a step, also an empty one.

        Args:
            now: when its scheduling began.
            new: tokens computed in it.
            context: tokens of context of its requests, once those are computed.
            estimate: seconds it will take, 0 when nothing is known.
        """
        self._free_at = self.begins(now) + estimate
        self._in_flight.append(_InFlight(now, new, context, estimate))

    def output(self, now: float) -> MeasuredStep | None:
        """Note that the output of the oldest step has come; return it unless it was empty."""
        step = self._in_flight.popleft()
        seconds = now - max(step.scheduled, self._last_output)
        self._last_output = now
        if step.new == 0:
            return None
        return MeasuredStep(step.new, step.context, seconds, step.estimate)
