"""What the proxy counts and measures, for Prometheus."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rescheduler.placement.cluster import INSTANCE, Cluster, ClusterMetrics
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Source

_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
_LATE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_PURPOSES = ("placing", "planning", "page")
_EXPECTED = (64, 256, 1024)
_RANGES = ("0-64", "65-256", "257-1024", "1025+")
_FIRST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ProxyMetrics(ClusterMetrics[LiveRequest]):
    """Those of its cluster, and of the requests that it relays."""

    def __init__(self, cluster: Cluster[LiveRequest], others: Sequence[Collector] = ()) -> None:
        tasks = "asyncio tasks: some for each connection and request, none that stays when they go"
        super().__init__(cluster, "headway_proxy", tasks, others)
        self.requests = self._counter(
            "headway_proxy_requests", "requests by how they ended", ["path", "outcome"]
        )
        self.tokens = self._counter("headway_proxy_generation_tokens", "tokens relayed")
        self.first_token = self._histogram(
            "headway_proxy_time_to_first_token_seconds",
            "from a request's arrival to its first token",
            buckets=_FIRST_SECONDS,
        )
        self._wait = self._histogram(
            "headway_proxy_wait_seconds",
            "from a request's arrival to its place on a decode instance, by the output tokens "
            "forecast as it arrived",
            ["expected_tokens"],
            buckets=_FIRST_SECONDS,
        )
        self.length_forecasts = self._counter(
            "headway_proxy_length_forecasts",
            "requests by what forecast their output tokens as they arrived",
            ["source"],
        )
        self._length_errors = self._histogram(
            "headway_proxy_length_forecast_error_factor",
            "how many times as long as forecast an answer was, or as short, by what forecast it",
            ["source"],
            buckets=_FACTORS,
        )
        self.token_gap = self._histogram(
            "headway_proxy_inter_token_latency_seconds",
            "between two tokens of a request",
            buckets=_TOKEN_SECONDS,
        )
        self.migrations = self._counter(
            "headway_proxy_migrations", "moves by how they ended", ["source", "target", "outcome"]
        )
        self.copying = self._histogram(
            "headway_proxy_migration_copy_seconds",
            "to copy a running request's KV cache to its target, while it decodes",
            buckets=_FIRST_SECONDS,
        )
        self.migration_gap = self._histogram(
            "headway_proxy_migration_gap_seconds",
            "from the last token at the source to the first at the target",
            buckets=_TOKEN_SECONDS,
        )
        self.recomputed = self._counter(
            "headway_proxy_recomputed_requests",
            "requests resumed without their KV cache, by the instance that failed",
            [INSTANCE],
        )
        self.unlike_prefills = self._counter(
            "headway_proxy_unlike_prefills",
            "prefills whose KV cache the decode instance cannot read, and so computes itself",
            ["prefill", "decode"],
        )
        self.lost_prefills = self._counter(
            "headway_proxy_prompts_computed_twice",
            "prompts whose lease on the prefill instance ended before a decode instance had room, "
            "and which that computes itself",
            [INSTANCE],
        )
        self.finish_forecasts = self._counter(
            "headway_proxy_finish_forecasts",
            "80% intervals of starts and finishes by where the actual time was: `within` should be "
            "8 of 10",
            ["of", "request", "outcome"],
        )
        self.promises = self._counter(
            "headway_proxy_promises", "promises of when a request finishes", ["outcome"]
        )
        self.failures = self._counter(
            "headway_proxy_instance_failures", "failed calls to an instance", [INSTANCE]
        )
        self.gave_way = self._counter(
            "headway_proxy_background_requests_that_gave_way",
            "background requests that left an instance for another request, and went on later",
            [INSTANCE],
        )
        self.turned_away = self._counter(
            "headway_proxy_turned_away_requests",
            "requests that an instance had too much to do for",
            [INSTANCE],
        )
        self._loop_late = self._histogram(
            "headway_proxy_event_loop_lag_seconds",
            "by which the event loop is late, for whatever reason",
            buckets=_LATE_SECONDS,
        )
        self._loop_stall = Gauge(
            "headway_proxy_event_loop_max_stall_seconds",
            "longest computation of the event loop's thread at a stretch, during which all wait",
            registry=self._registry,
        )
        self._longest_stall = 0.0
        for outcome in ("given", "refused", "none", "kept", "broken", "left"):
            self.promises.labels(outcome)
        self.length_forecasts.labels("none")
        for source in cluster.length_factors.latest:
            self.length_forecasts.labels(source)
            self._length_errors.labels(source)
        # From 0 on: Prometheus sees no increase in a series that begins with its first event.
        for instance in cluster.all:
            for counter in (self.recomputed, self.failures, self.gave_way, self.turned_away):
                counter.labels(instance.name)
            if instance.instance.role == "prefill":
                self.lost_prefills.labels(instance.name)

    def add(self, collector: Collector) -> None:
        """Have a collector's metrics shown, too."""
        self._registry.register(collector)

    def lengths_were(self, factors: Mapping[Source, float]) -> None:
        """Note by which factors the forecasts of an answer's length were wrong, by source."""
        for source, factor in factors.items():
            self._length_errors.labels(source).observe(factor)

    def placed(self, request: LiveRequest) -> None:
        """Note how long a request has waited that has its first place; not one of background."""
        if request.background:
            return
        expected = request.expected_tokens
        range_ = "unknown" if expected is None else _RANGES[bisect_left(_EXPECTED, expected)]
        seconds = asyncio.get_running_loop().time() - request.arrived
        self._wait.labels(range_).observe(seconds)

    def first(self, request: LiveRequest, now: float) -> None:
        """Note when the first token of a request comes; not of one of background."""
        if not request.background:
            self.first_token.observe(now - request.arrived)

    def loop_late(self, late: float, computed: float) -> None:
        """Note by how many seconds the event loop was late, and how long it computed until then."""
        self._loop_late.observe(max(0.0, late))
        self._longest_stall = max(self._longest_stall, computed)
        self._loop_stall.set(self._longest_stall)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now."""
        yield from super().collect()
        yield GaugeMetricFamily(
            "headway_proxy_max_num_requests_waiting",
            "requests that may wait for an instance; further ones are refused",
            value=self._cluster.deployment.proxy.pool,
        )
        used = GaugeMetricFamily(
            "headway_proxy_kv_cache_used_blocks",
            "blocks of an instance's KV cache that are not free, says its control socket",
            labels=[INSTANCE, "role"],
        )
        failed_loads = CounterMetricFamily(
            "headway_proxy_kv_load_failures",
            "reads of another instance's KV cache that failed, so that it was computed again, says "
            "the control socket",
            labels=[INSTANCE],
        )
        left_out = CounterMetricFamily(
            "headway_proxy_instances_left_out",
            "decisions taken without an instance, since what it says of itself cannot be used",
            labels=[INSTANCE, "reason"],
        )
        for instance in self._cluster.all:
            if (engine := instance.engine) is not None and instance.breaker.closed:
                labels = [instance.name, instance.instance.role]
                used.add_metric(labels, engine.num_blocks - engine.free_blocks)
                failed_loads.add_metric(labels[:1], engine.failed_loads)
            for purpose in _PURPOSES:
                left_out.add_metric([instance.name, purpose], instance.left_out[purpose])
        yield from (used, failed_loads, left_out)


_SECONDS = 0.005
"""Between two measurements: so much of the turns before may be counted to a stretch."""


async def watch_loop(metrics: ProxyMetrics) -> None:
    """Measure, forever, how late the loop runs what is due, and how long it computes at a stretch.

    The first also counts other programs on the same cores, the second the loop's thread alone.
    """
    loop = asyncio.get_running_loop()
    while True:
        due, computed = loop.time() + _SECONDS, time.thread_time()
        await asyncio.sleep(_SECONDS)
        metrics.loop_late(loop.time() - due, time.thread_time() - computed)
