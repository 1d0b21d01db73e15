"""What a proxy and a coordinator both tell Prometheus of their cluster."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Generic

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rescheduler.monitoring.forecast_metrics import ForecastMetrics
from rescheduler.monitoring.forecast_scores import ForecastScores
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.placeable import R

__all__ = ["INSTANCE", "ClusterMetrics"]

INSTANCE = "instance_name"  # `instance` is Prometheus' own name of what it scrapes


class ClusterMetrics(Collector, Generic[R]):
    """Counters, histograms, and gauges that are read whenever Prometheus asks.

    Args:
        prefix: of their names.
        tasks: what is told of the event loop's tasks.
        others: of the same process.

    Attributes:
        scores: of the forecasts; None where no engine publishes any.
    """

    def __init__(
        self, cluster: Cluster[R], prefix: str, tasks: str, others: Sequence[Collector]
    ) -> None:
        self._cluster, self._prefix, self._tasks = cluster, prefix, tasks
        self._registry = CollectorRegistry()
        self._counter = partial(Counter, registry=self._registry)
        self._histogram = partial(Histogram, registry=self._registry)
        self.planning = self._histogram(
            f"{prefix}_migration_planning_seconds", "decisions of the migration planner"
        )
        for collector in (self, *others):
            self._registry.register(collector)
        self.scores: ForecastScores | None = None
        if cluster.telemetry is not None:
            self.scores = ForecastScores(cluster.telemetry)
            self._registry.register(ForecastMetrics(cluster.telemetry, self.scores))

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now."""
        dispatcher, prefix = self._cluster.dispatcher, self._prefix
        waiting = GaugeMetricFamily(
            f"{prefix}_num_requests_waiting", "requests that wait for an instance", labels=["stage"]
        )
        waiting.add_metric(["prefill"], dispatcher.waiting_for_prefill)
        waiting.add_metric(["decode"], len(dispatcher.waiting))
        gauge = partial(GaugeMetricFamily, labels=[INSTANCE, "role"])
        running = gauge(f"{prefix}_num_requests_running", "requests on an instance")
        background = gauge(
            f"{prefix}_num_background_requests_running", "those of background among them"
        )
        tokens = gauge(f"{prefix}_context_tokens", "context tokens of the requests on an instance")
        up = gauge(f"{prefix}_instance_up", "1: in service")
        draining = gauge(f"{prefix}_instance_draining", "1: gets no requests")
        for instance in self._cluster.all:
            labels = [instance.name, instance.instance.role]
            requests = self._cluster.placements.on(instance)
            running.add_metric(labels, len(requests))
            background.add_metric(labels, sum(request.background for request in requests))
            tokens.add_metric(labels, sum(request.context_tokens for request in requests))
            up.add_metric(labels, instance.breaker.closed)
            draining.add_metric(labels, instance.draining)
        yield GaugeMetricFamily(
            f"{prefix}_num_background_requests_waiting",
            "background requests that wait for an instance, beside the others",
            value=dispatcher.waiting_in_background,
        )
        yield from (waiting, running, background, tokens, up, draining)
        tasks = len(asyncio.all_tasks())
        yield GaugeMetricFamily(f"{prefix}_event_loop_tasks", self._tasks, value=tasks)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
