"""What the coordinator counts and measures, for Prometheus."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rescheduler.coordination.refused_messages import RefusedMessages
from rescheduler.coordinator.mirror import Mirror
from rescheduler.coordinator.session import Session
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Placements

__all__ = ["CoordinatorMetrics"]


class CoordinatorMetrics(Collector):
    """Counters, histograms, and gauges that are read whenever Prometheus asks.

    Args:
        placements: which requests are on which instance.
        instances: all of the deployment.
        dispatcher: with the two pools.
        sessions: of the proxies.
        refused: messages of theirs.
    """

    def __init__(
        self,
        placements: Placements[Mirror],
        instances: Sequence[InstanceState],
        dispatcher: Dispatcher[Mirror],
        sessions: Mapping[str, Session],
        refused: RefusedMessages,
    ) -> None:
        self._placements, self._instances = placements, instances
        self._dispatcher, self._sessions = dispatcher, sessions
        self._registry = registry = CollectorRegistry()
        self.moves = Counter(
            "headway_coordinator_migrations",
            "orders to move a request, by how they ended",
            ["source", "target", "outcome"],
            registry=registry,
        )
        self.planning = Histogram(
            "headway_coordinator_migration_planning_seconds",
            "decisions of the migration planner",
            registry=registry,
        )
        registry.register(self)
        registry.register(refused)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now."""
        proxies = GaugeMetricFamily("headway_coordinator_num_proxies", "proxies that are connected")
        proxies.add_metric([], sum(session.known for session in self._sessions.values()))
        waiting = GaugeMetricFamily(
            "headway_coordinator_num_requests_waiting",
            "requests that wait for an instance",
            labels=["stage"],
        )
        waiting.add_metric(["prefill"], self._dispatcher.waiting_for_prefill)
        waiting.add_metric(["decode"], len(self._dispatcher.waiting))
        labels = ["instance_name", "role"]
        running = GaugeMetricFamily(
            "headway_coordinator_num_requests_running", "requests on an instance", labels=labels
        )
        tokens = GaugeMetricFamily(
            "headway_coordinator_context_tokens",
            "context tokens of the requests on an instance",
            labels=labels,
        )
        up = GaugeMetricFamily("headway_coordinator_instance_up", "1: in service", labels=labels)
        draining = GaugeMetricFamily(
            "headway_coordinator_instance_draining", "1: gets no requests", labels=labels
        )
        for instance in self._instances:
            values = [instance.name, instance.instance.role]
            requests = self._placements.on(instance)
            running.add_metric(values, len(requests))
            tokens.add_metric(values, sum(request.context_tokens for request in requests))
            up.add_metric(values, instance.breaker.closed)
            draining.add_metric(values, instance.draining)
        yield from (proxies, waiting, running, tokens, up, draining)
        yield GaugeMetricFamily(
            "headway_coordinator_event_loop_tasks",
            "asyncio tasks: one for each request that waits, none that stays when they go",
            value=len(asyncio.all_tasks()),
        )

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
