"""Orders to move requests, sent to the proxies that carry their streams."""

from collections.abc import Mapping

from rescheduler.coordinator.coordinator_metrics import CoordinatorMetrics
from rescheduler.coordinator.mirror import Mirror
from rescheduler.coordinator.session import Session
from rescheduler.placement.instance_state import InstanceState

__all__ = ["Orders"]


class Orders:
    """Has proxies move requests.

    Args:
        sessions: of the proxies, by name.
        metrics: counts the orders.
    """

    def __init__(self, sessions: Mapping[str, Session], metrics: CoordinatorMetrics) -> None:
        self._sessions, self._metrics = sessions, metrics

    async def move(self, request: Mirror, target: InstanceState, why: str) -> str:
        """Order a request to move; return how that ended, as soon as it is known."""
        source, session = request.instance, self._sessions.get(request.session)
        if source is None or session is None:
            return "gone"
        outcome = await session.move(request, target, why)
        self._metrics.moves.labels(source.name, target.name, outcome).inc()
        return outcome
