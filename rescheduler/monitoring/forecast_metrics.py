"""Metrics for Prometheus: how good the forecasts are, and what the engines publish."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rescheduler.monitoring.forecast_scores import ForecastScores
from rescheduler.telemetry.subscriber import TelemetrySubscriber

__all__ = ["ForecastMetrics"]


class ForecastMetrics(Collector):
    """Reads telemetry and scores whenever Prometheus asks.

    Args:
        clock: monotonic seconds, as the telemetry's.
    """

    def __init__(
        self,
        telemetry: TelemetrySubscriber,
        scores: ForecastScores,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._telemetry, self._scores, self._clock = telemetry, scores, clock
        self._most_lost = 0

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        with self._scores.lock:
            metrics = list(self._forecast_metrics())
        with self._telemetry.lock:
            metrics += self._telemetry_metrics()
        yield from metrics

    def _forecast_metrics(self) -> Iterator[Metric]:
        quality = self._scores.quality
        figures = quality.figures()
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
            value=quality.alarm() is not None,
        )
        yield CounterMetricFamily(
            "headway_forecast_scored_requests",
            "Finished requests whose forecasts were scored.",
            value=quality.scored,
        )

    def _telemetry_metrics(self) -> Iterator[Metric]:
        view, now = self._telemetry.view, self._clock()
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
