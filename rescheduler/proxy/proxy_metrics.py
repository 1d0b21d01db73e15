"""What the proxy counts and measures, for Prometheus."""

import asyncio
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.placement.placer import Placer

__all__ = ["ProxyMetrics", "watch_loop"]


_INSTANCE = "instance_name"  # `instance` is Prometheus' own name of what it scrapes
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_LATE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_PURPOSES = ("placing", "planning", "page")
_FIRST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ProxyMetrics(Collector):
    """Counters, histograms, and gauges that are read whenever Prometheus asks.

    Args:
        placements: which requests are on which instance.
        instances: all of the deployment.
        dispatcher: with the two pools.
        pool: requests that may wait for an instance.
        others: of the same process.
    """

    def __init__(
        self,
        placements: Placements[LiveRequest],
        instances: Sequence[InstanceState],
        dispatcher: Placer,
        pool: int,
        others: Sequence[Collector] = (),
    ) -> None:
        self._placements, self._instances, self._dispatcher = placements, instances, dispatcher
        self._pool = pool
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "headway_proxy_requests",
            "requests by how they ended",
            ["path", "outcome"],
            registry=registry,
        )
        self.tokens = Counter(
            "headway_proxy_generation_tokens", "tokens relayed", registry=registry
        )
        self.first_token = Histogram(
            "headway_proxy_time_to_first_token_seconds",
            "from a request's arrival to its first token",
            buckets=_FIRST_SECONDS,
            registry=registry,
        )
        self.token_gap = Histogram(
            "headway_proxy_inter_token_latency_seconds",
            "between two tokens of a request",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.migrations = Counter(
            "headway_proxy_migrations",
            "moves by how they ended",
            ["source", "target", "outcome"],
            registry=registry,
        )
        self.copying = Histogram(
            "headway_proxy_migration_copy_seconds",
            "to copy a running request's KV cache to its target, while it decodes",
            buckets=_FIRST_SECONDS,
            registry=registry,
        )
        self.migration_gap = Histogram(
            "headway_proxy_migration_gap_seconds",
            "from the last token at the source to the first at the target",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.recomputed = Counter(
            "headway_proxy_recomputed_requests",
            "requests resumed without their KV cache, by the instance that failed",
            [_INSTANCE],
            registry=registry,
        )
        self.failures = Counter(
            "headway_proxy_instance_failures",
            "failed calls to an instance",
            [_INSTANCE],
            registry=registry,
        )
        self.turned_away = Counter(
            "headway_proxy_turned_away_requests",
            "requests that an instance had too much to do for",
            [_INSTANCE],
            registry=registry,
        )
        self.planning = Histogram(
            "headway_proxy_migration_planning_seconds",
            "decisions of the migration planner",
            registry=registry,
        )
        self._loop_late = Histogram(
            "headway_proxy_event_loop_lag_seconds",
            "by which the event loop is late, for whatever reason",
            buckets=_LATE_SECONDS,
            registry=registry,
        )
        self._loop_stall = Gauge(
            "headway_proxy_event_loop_max_stall_seconds",
            "longest computation of the event loop's thread at a stretch, during which all wait",
            registry=registry,
        )
        self._longest_stall = 0.0
        # From 0 on: Prometheus sees no increase in a series that begins with its first event.
        for instance in instances:
            for counter in (self.recomputed, self.failures, self.turned_away):
                counter.labels(instance.name)
        for collector in (self, *others):
            registry.register(collector)

    def loop_late(self, late: float, computed: float) -> None:
        """Note by how many seconds the event loop was late, and how long it computed until then."""
        self._loop_late.observe(max(0.0, late))
        self._longest_stall = max(self._longest_stall, computed)
        self._loop_stall.set(self._longest_stall)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now."""
        waiting = GaugeMetricFamily(
            "headway_proxy_num_requests_waiting",
            "requests that wait for an instance",
            labels=["stage"],
        )
        waiting.add_metric(["prefill"], self._dispatcher.waiting_for_prefill)
        waiting.add_metric(["decode"], len(self._dispatcher.waiting))
        yield waiting
        yield GaugeMetricFamily(
            "headway_proxy_max_num_requests_waiting",
            "requests that may wait for an instance; further ones are refused",
            value=self._pool,
        )
        running = GaugeMetricFamily(
            "headway_proxy_num_requests_running",
            "requests on an instance",
            labels=[_INSTANCE, "role"],
        )
        tokens = GaugeMetricFamily(
            "headway_proxy_context_tokens",
            "context tokens of the requests on an instance",
            labels=[_INSTANCE, "role"],
        )
        up = GaugeMetricFamily(
            "headway_proxy_instance_up", "1: in service", labels=[_INSTANCE, "role"]
        )
        draining = GaugeMetricFamily(
            "headway_proxy_instance_draining", "1: gets no requests", labels=[_INSTANCE, "role"]
        )
        used = GaugeMetricFamily(
            "headway_proxy_kv_cache_used_blocks",
            "blocks of an instance's KV cache that are not free, says its control socket",
            labels=[_INSTANCE, "role"],
        )
        left_out = CounterMetricFamily(
            "headway_proxy_instances_left_out",
            "decisions taken without an instance, since what it says of itself cannot be used",
            labels=[_INSTANCE, "reason"],
        )
        for instance in self._instances:
            labels = [instance.name, instance.instance.role]
            requests = self._placements.on(instance)
            running.add_metric(labels, len(requests))
            tokens.add_metric(labels, sum(r.context_tokens for r in requests))
            up.add_metric(labels, instance.breaker.closed)
            draining.add_metric(labels, instance.draining)
            if instance.engine is not None and instance.breaker.closed:
                used.add_metric(labels, instance.engine.num_blocks - instance.engine.free_blocks)
            for purpose in _PURPOSES:
                left_out.add_metric([instance.name, purpose], instance.left_out[purpose])
        yield from (running, tokens, up, draining, used, left_out)
        yield GaugeMetricFamily(
            "headway_proxy_event_loop_tasks",
            "asyncio tasks: some for each connection and request, none that stays when they go",
            value=len(asyncio.all_tasks()),
        )

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


_SECONDS = 0.02


async def watch_loop(metrics: ProxyMetrics) -> None:
    """Measure, forever, how late the loop runs what is due, and how long it computes at a stretch.

    The first also counts other programs on the same cores, the second the loop's thread alone.
    """
    loop = asyncio.get_running_loop()
    while True:
        due, computed = loop.time() + _SECONDS, time.thread_time()
        await asyncio.sleep(_SECONDS)
        metrics.loop_late(loop.time() - due, time.thread_time() - computed)
