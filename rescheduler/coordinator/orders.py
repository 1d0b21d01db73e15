"""Orders to move requests, sent to the proxies that carry their streams."""

import logging
from collections.abc import Mapping

from rescheduler.coordinator.coordinator_metrics import CoordinatorMetrics
from rescheduler.coordinator.mirror import Mirror
from rescheduler.coordinator.session import Session
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.move_outcome import MoveOutcome
from rescheduler.proxy.move_history import MoveHistory

__all__ = ["Orders"]

logger = logging.getLogger("headway.serve")

_OUTCOMES = frozenset(
    {"moved", "rolled_back", "not_copied", "not_frozen", "ended", "no_room", "no_answer", "gone"}
    | {"refused"}
)


class Orders:
    """Has proxies move requests.

    Args:
        sessions: of the proxies, by name.
        metrics: counts the orders.

    Attributes:
        history: of the latest moves.
    """

    def __init__(self, sessions: Mapping[str, Session], metrics: CoordinatorMetrics) -> None:
        self._sessions, self._metrics = sessions, metrics
        self.history = MoveHistory()

    async def move(self, request: Mirror, target: InstanceState, why: str) -> MoveOutcome:
        """Order a request to move; return how that ended, as soon as it is known."""
        source, session = request.instance, self._sessions.get(request.session)
        if source is None or session is None or not request.can_move:
            return MoveOutcome("gone")
        ended = await session.move(request, target, why)
        if ended.outcome not in _OUTCOMES:  # a metric must not get labels without end
            ended = MoveOutcome("other", ended.pause)
        self._metrics.moves.labels(source.name, target.name, ended.outcome).inc()
        if ended.pause is not None:
            self.history.landed(request.id, ended.pause)
        tokens = request.generated_tokens
        self.history.ended(
            request.id, request.name, source.name, target.name, tokens, why, ended.outcome
        )
        logger.info(
            "request %s, %d tokens: %s to %s: %s (%s)",
            request.id,
            request.context_tokens,
            source.name,
            target.name,
            ended.outcome,
            why,
        )
        return ended
