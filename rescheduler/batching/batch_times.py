"""How long steps take: as measured, also where they overlap, and as estimated."""

from collections import deque
from typing import NamedTuple

from rescheduler.batching.batch_formation import DECODE_FIRST, FORMATIONS, BatchRules
from rescheduler.batching.batching_config import BatchingConfig
from rescheduler.step_time.fit import Recalibration
from rescheduler.step_time.profile import BatchTime

__all__ = ["BatchTimes", "MeasuredStep", "StepClock"]


class MeasuredStep(NamedTuple):
    """A step that has been computed.

    Attributes:
        new: tokens computed in it.
        context: tokens of context of its requests, once those are computed.
        seconds: that it took.
    """

    new: int
    context: int
    seconds: float


class _InFlight(NamedTuple):
    scheduled: float
    new: int
    context: int


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
        self._in_flight.append(_InFlight(now, new, context))

    def output(self, now: float) -> MeasuredStep | None:
        """Note that the output of the oldest step has come; return it unless it was empty."""
        step = self._in_flight.popleft()
        seconds = now - max(step.scheduled, self._last_output)
        self._last_output = now
        if step.new == 0:
            return None
        return MeasuredStep(step.new, step.context, seconds)


class BatchTimes:
    """Starts from a profile and, if asked, learns from every step.

    Args:
        config: formation and budget.
        profile: a, b and c as they were measured; None when nothing is known.
        max_tokens: most tokens of a batch.

    Attributes:
        rules: of the next batch.
        known: whether anything is known of the seconds of a batch.
    """

    def __init__(self, config: BatchingConfig, profile: BatchTime | None, max_tokens: int) -> None:
        self.known = profile is not None
        batch = profile or BatchTime(0.0, 0.0, 0.0)
        self.rules = BatchRules(
            formation=FORMATIONS.get(config.formation, DECODE_FIRST),
            constant=batch.constant,
            per_new=batch.per_new,
            per_context=batch.per_context,
            max_tokens=max_tokens,
            token_budget=min(config.token_budget or max_tokens, max_tokens),
        )
        learns = self.known and config.recalibrate
        self._recalibration = Recalibration(batch) if learns else None

    def seconds(self, new: int, context: int) -> float:
        """Return the estimated seconds of a batch, 0 when nothing is known or it is empty."""
        rules = self.rules
        batch = BatchTime(rules.constant, rules.per_new, rules.per_context)
        return batch.seconds(new, context) if new else 0.0

    @property
    def seconds_a_token(self) -> float:
        """Estimated seconds of a prompt's token, b + c."""
        return self.rules.per_new + self.rules.per_context

    def learn(self, step: MeasuredStep) -> None:
        """Take a step into account."""
        if self._recalibration is None:
            return
        self._recalibration.update(step.new, step.context, step.seconds)
        a, b, c = self._recalibration.batch
        if a != self.rules.constant or b != self.rules.per_new or c != self.rules.per_context:
            self.rules = self.rules._replace(constant=a, per_new=b, per_context=c)
