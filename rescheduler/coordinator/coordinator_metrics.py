"""What the coordinator counts and measures, for Prometheus."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from rescheduler.coordination.refused_messages import RefusedMessages
from rescheduler.coordinator.mirror import Mirror
from rescheduler.coordinator.session import Session
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.cluster_metrics import ClusterMetrics

__all__ = ["CoordinatorMetrics"]


class CoordinatorMetrics(ClusterMetrics[Mirror]):
    """Those of its cluster, and of the proxies.

    Attributes:
        moves: orders to move a request.
    """

    def __init__(
        self, cluster: Cluster[Mirror], sessions: Mapping[str, Session], refused: RefusedMessages
    ) -> None:
        self._sessions = sessions
        tasks = "asyncio tasks: one for each request that waits, none that stays when they go"
        super().__init__(cluster, "headway_coordinator", tasks, [refused])
        self.moves = self._counter(
            "headway_coordinator_migrations",
            "orders to move a request, by how they ended",
            ["source", "target", "outcome"],
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now."""
        yield from super().collect()
        connected = sum(session.known for session in self._sessions.values())
        yield GaugeMetricFamily(
            "headway_coordinator_num_proxies", "proxies that are connected", value=connected
        )
