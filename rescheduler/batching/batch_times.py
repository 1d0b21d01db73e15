"""The rules by which an engine forms batches, as its steps show how long those take."""

from rescheduler.batching.batch_formation import DECODE_FIRST, FORMATIONS, BatchRules
from rescheduler.batching.batching_config import BatchingConfig
from rescheduler.batching.step_clock import MeasuredStep
from rescheduler.step_time.fit import Recalibration
from rescheduler.step_time.profile import BatchTime

__all__ = ["BatchTimes"]


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
