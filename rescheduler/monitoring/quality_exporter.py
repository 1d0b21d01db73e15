"""Metrics for Prometheus: how good the forecasts are, and what the engines publish."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rescheduler.monitoring.forecast_quality import ForecastQuality
from rescheduler.telemetry.telemetry_view import TelemetryView

__all__ = ["QualityExporter"]


class QualityExporter(Collector):
    """Reads view and quality whenever Prometheus asks, under their lock.

    Args:
        lock: held by whoever changes either.
        clock: monotonic seconds, the same as the view's.

    Attributes:
        registry: holds this collector only.
    """

    def __init__(
        self,
        view: TelemetryView,
        quality: ForecastQuality,
        lock: threading.Lock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view, self._quality, self._lock, self._clock = view, quality, lock, clock
        self._most_lost = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        with self._lock:
            metrics = [*self._forecast_metrics(), *self._telemetry_metrics()]
        yield from metrics

    @contextmanager
    def served(self, port: int, host: str = "127.0.0.1") -> Iterator[int]:
        """Serve the metrics over HTTP, from a thread, while the body runs; yield the port.

        Args:
            port: to listen on; 0 takes a free one.
            host: address to listen on; by default this machine only.

        Raises:
            ValueError: the port is in use, or the address is none of this machine.
        """
        try:
            server, thread = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "the port is in use; give another" if used else str(error)
            raise ValueError(f"metrics on {host}:{port}: {why}") from error
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _forecast_metrics(self) -> Iterator[Metric]:
        figures = self._quality.figures()
        error = GaugeMetricFamily(
            "headway_forecast_mae_tokens", "Mean absolute error of the median, rolling."
        )
        bias = GaugeMetricFamily(
            "headway_forecast_bias_tokens",
            "Mean of median less what came, rolling, by tokens generated at the forecast.",
            labels=["age"],
        )
        covered = GaugeMetricFamily(
            "headway_forecast_coverage_ratio",
            "Share of ends inside the central interval of this probability, rolling.",
            labels=["interval"],
        )
        if figures is not None:
            error.add_metric([], figures.mae())
            for age, tokens in figures.bias_by_age().items():
                bias.add_metric([age], tokens)
            for level, share in figures.coverage().items():
                covered.add_metric([str(level / 100)], share)
        yield from (error, bias, covered)
        yield GaugeMetricFamily(
            "headway_forecast_miscalibrated",
            "1 while the coverage of the 80% interval is too far off.",
            value=self._quality.alarm() is not None,
        )
        yield CounterMetricFamily(
            "headway_forecast_scored_requests",
            "Finished requests whose forecasts were scored.",
            value=self._quality.scored,
        )

    def _telemetry_metrics(self) -> Iterator[Metric]:
        view, now = self._view, self._clock()
        self._most_lost = max(self._most_lost, view.lost)  # a late message lowers it again
        messages = CounterMetricFamily(
            "headway_telemetry_message_errors",
            "Telemetry messages that went wrong.",
            labels=["kind"],
        )
        for kind in ("malformed", "lost", "duplicated", "outdated", "foreign"):
            count = self._most_lost if kind == "lost" else getattr(view, kind)
            messages.add_metric([kind], count)
        yield messages
        labels = ["instance_name", "rank"]
        running, waiting, usage, budget, stale = (
            GaugeMetricFamily(f"headway_instance_{name}", text, labels=labels)
            for name, text in (
                ("num_requests_running", "Requests in the running batch."),
                ("num_requests_waiting", "Requests that wait to be scheduled."),
                ("kv_cache_usage_ratio", "Share of the KV cache in use."),
                ("prefill_budget_tokens", "Tokens of new prompts that can be computed in time."),
                ("stale", "1 while the engine has not reported recently."),
            )
        )
        for key, instance in view.instances.items():
            names = [key.name, str(key.rank)]
            running.add_metric(names, instance.gauges.running)
            waiting.add_metric(names, instance.gauges.waiting)
            usage.add_metric(names, instance.gauges.kv_usage)
            if instance.gauges.prefill_budget is not None:
                budget.add_metric(names, instance.gauges.prefill_budget)
            stale.add_metric(names, view.is_stale(key, now))
        yield from (running, waiting, usage, budget, stale)
