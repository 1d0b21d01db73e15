"""How good the forecasts of running engines are, from the requests that have ended."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from predictor.forecasts.kaplan_meier import observed_levels, observed_share
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import FinishedForecasts

FloatArray = npt.NDArray[np.float64]

AGES = ("0", "1-127", "128-511", "512+")
"""Generated tokens when a forecast was made, by which errors are grouped."""

INTERVALS = (50, 80, 90)
"""Central intervals, in percent, whose coverage is watched."""

_WINDOW = 500
"""Requests whose forecasts are watched."""

_BAND = 0.1
"""How far the coverage of the 80% interval may be off before it is an alarm."""

MIN_REQUESTS = 50
"""Requests that must have ended before anything is an alarm."""

_ALARMED = 80


class ForecastFigures(NamedTuple):
    """Errors and coverage of the forecasts of some requests, as sums over their forecasts.

    Attributes:
        requests: how many requests.
        forecasts: [n_ages] how many forecasts, by `AGES`.
        absolute: [n_ages] sum of |median − remaining|.
        signed: [n_ages] sum of median − remaining.
        inside: [n_intervals] how many ends fell into each of the `INTERVALS`.
        late: how many ends came after the median.
    """

    requests: int
    forecasts: FloatArray
    absolute: FloatArray
    signed: FloatArray
    inside: FloatArray
    late: float

    @classmethod
    def total(cls, parts: Iterable["ForecastFigures"]) -> "ForecastFigures | None":
        """Return the figures of all the requests of several; None of none."""
        sums: list[Any] = [sum(column) for column in zip(*parts, strict=True)]
        return cls(*sums) if sums else None

    def mae(self) -> float:
        """Return the mean |median − remaining| in tokens."""
        return float(self.absolute.sum() / self.forecasts.sum())

    def bias(self) -> float:
        """Return the mean of median − remaining in tokens: above 0 is too long."""
        return float(self.signed.sum() / self.forecasts.sum())

    def bias_by_age(self) -> dict[str, float]:
        """Return the same by `AGES`, for those of which there are forecasts."""
        forecasts, signed = self.forecasts.tolist(), self.signed.tolist()
        ages = zip(AGES, forecasts, signed, strict=True)
        return {age: tokens / count for age, count, tokens in ages if count}

    def coverage(self) -> dict[int, float]:
        """Return the share of ends inside each of the `INTERVALS`.

        Of uncapped curves, see `observed_share`.
        """
        shares = self.inside / self.forecasts.sum()
        return dict(zip(INTERVALS, shares.tolist(), strict=True))

    def late_share(self) -> float:
        """Return the share of ends after the uncapped median: a half when nothing is biased."""
        return float(self.late / self.forecasts.sum())

    def alarm(self) -> str | None:
        """Return what is wrong with the intervals, and what to do; None when nothing is."""
        share = self.coverage()[_ALARMED]
        if abs(share - _ALARMED / 100) <= _BAND:
            return None
        wrong = "narrow" if share < _ALARMED / 100 else "wide"
        return (
            f"the 80% intervals are too {wrong}: they held {share:.0%} of the ends of the last "
            f"{self.requests} requests. The model, the prompts or the sampling have changed "
            "since the predictor was trained; `headway evaluate recalibrate` mends it from a log "
            "of finished requests"
        )


_AGE_STARTS = (1, 128, 512)
_NOMINAL = np.array([[50 - level / 2, 50 + level / 2] for level in INTERVALS]) / 100
_WATCHED_LEVELS = [*_NOMINAL.ravel().tolist(), 0.5]


@dataclass(frozen=True, slots=True)
class ScoredRequest:
    """A request that ran to its end, and its forecasts against what came.

    Attributes:
        cut: whether ``max_tokens`` ended it.
        generated: [n_forecasts] tokens n when each forecast was made.
        remaining: [n_forecasts] tokens that came after it.
        medians: [n_forecasts] tokens that it expected: its median, capped by ``max_tokens``.
        levels: [n_forecasts] u = P(R ≤ remaining), see `observed_levels`.
    """

    finished: FinishedForecasts
    cut: bool
    generated: FloatArray
    remaining: FloatArray
    medians: FloatArray
    levels: FloatArray

    def figures(self) -> ForecastFigures:
        """Return what the request adds to the figures of many."""
        age = np.searchsorted(_AGE_STARTS, self.generated, side="right")
        error = self.medians - self.remaining
        cut = np.full(len(error), self.cut)
        *ends, early = observed_share(self.levels, cut, _WATCHED_LEVELS)
        low, high = np.reshape(ends, _NOMINAL.shape).T
        return ForecastFigures(
            requests=1,
            forecasts=np.bincount(age, minlength=len(AGES)).astype(np.float64),
            absolute=np.bincount(age, np.abs(error), len(AGES)).astype(np.float64),
            signed=np.bincount(age, error, len(AGES)).astype(np.float64),
            inside=(high - low) * len(error),
            late=float((1 - early) * len(error)),
        )


class ForecastQuality:
    """Errors and coverage over the last 500 requests that ended.

    Every forecast of a request counts once, so that long requests weigh more, as they do
    among the running. Right after a start, short requests are over-represented.

    Attributes:
        scored: requests scored so far, also before the window.
    """

    def __init__(self) -> None:
        self._requests: deque[ForecastFigures] = deque(maxlen=_WINDOW)
        self.scored = 0

    def add(self, figures: ForecastFigures) -> None:
        """Count a request by its figures."""
        self.scored += 1
        self._requests.append(figures)

    def figures(self) -> ForecastFigures | None:
        """Return the figures of the window; None before the first request."""
        return ForecastFigures.total(self._requests)

    def alarm(self) -> str | None:
        """Return what is wrong with the intervals, and what to do; None when nothing is."""
        figures = self.figures()
        if figures is None or figures.requests < MIN_REQUESTS:
            return None
        return figures.alarm()


def score(finished: FinishedForecasts) -> ScoredRequest | None:
    """Score the forecasts of a request that ended; None if it was cut short or had none."""
    event = finished.event
    if event.finish_reason not in ("stop", "length") or not finished.forecasts:
        return None
    forecast = finished.forecast()
    generated = np.array([kept.forecast_at for kept in finished.forecasts], dtype=np.float64)
    before = np.flatnonzero(generated < event.total_tokens)
    if not len(before):
        return None
    forecast, generated = forecast.select(before), generated[before]
    remaining = event.total_tokens - generated
    cut = event.finish_reason == "length"
    return ScoredRequest(
        finished=finished,
        cut=cut,
        generated=generated,
        remaining=remaining,
        medians=forecast.median(),
        levels=observed_levels(forecast.uncapped(), remaining, np.full(len(remaining), cut)),
    )


_KEPT_MINUTES = 60
_RECENT_MINUTES = 15
_WORSE = 1.5


class LastHour:
    """The figures of the requests that ended within the last hour, kept by the minute.

    Nothing here has a clock: times are seconds on one that does not go back.
    """

    def __init__(self) -> None:
        self._minutes: deque[tuple[int, ForecastFigures]] = deque()

    def add(self, figures: ForecastFigures, now: float) -> None:
        """Count a request that ends now by its figures."""
        minute, parts = _minute(now), [figures]
        if self._minutes and self._minutes[-1][0] == minute:
            parts.append(self._minutes.pop()[1])
        total = ForecastFigures.total(parts)
        assert total is not None
        self._minutes.append((minute, total))

    def figures(self, now: float) -> ForecastFigures | None:
        """Return those of the last hour; None if no request has ended in it."""
        self._forget(now)
        return ForecastFigures.total(figures for _, figures in self._minutes)

    def drift(self, now: float) -> str | None:
        """Return in which way the forecasts have become worse within the hour.

        Empty when they have not: the median's error in the last quarter of an hour is at most one
        and a half times that of the time before. None while either has too few requests, or the
        time before is less than a quarter of an hour: the first requests to end are the short ones.
        """
        self._forget(now)
        split = _minute(now) - _RECENT_MINUTES
        if not self._minutes or self._minutes[0][0] > split - _RECENT_MINUTES:
            return None
        before = ForecastFigures.total(one for minute, one in self._minutes if minute <= split)
        recent = ForecastFigures.total(one for minute, one in self._minutes if minute > split)
        if before is None or recent is None:
            return None
        if min(before.requests, recent.requests) < MIN_REQUESTS:
            return None
        if recent.mae() <= _WORSE * before.mae():
            return ""
        return (
            f"the forecasts have become worse: the median was off by {recent.mae():,.0f} tokens "
            f"in the last quarter of an hour, and by {before.mae():,.0f} before. Longer answers "
            "alone can do that"
        )

    def _forget(self, now: float) -> None:
        while self._minutes and self._minutes[0][0] <= _minute(now) - _KEPT_MINUTES:
            self._minutes.popleft()


def _minute(now: float) -> int:
    return int(now // 60)


logger = logging.getLogger("headway.serve")

_SECONDS = 1.0
_MOST = 100
"""Requests that are scored at a time, which takes 0.3 ms each."""


class ForecastScores:
    """Scores the forecasts of the requests that end.

    Attributes:
        lock: held while the scores change; read them under it only.
        quality: of the last requests.
        hour: of those of the last hour.
    """

    def __init__(self, telemetry: TelemetrySubscriber) -> None:
        telemetry.keep_history()
        self._telemetry = telemetry
        self.lock = threading.Lock()
        self.quality, self.hour = ForecastQuality(), LastHour()

    def take(self) -> None:
        """Score what has ended since the last call; of very many an even part."""
        ended, now = self._telemetry.take_finished(), time.monotonic()
        chosen = ended[:: max(1, ceil(len(ended) / _MOST))]
        scored = [one.figures() for one in map(score, chosen) if one is not None]
        with self.lock:
            for figures in scored:
                self.quality.add(figures)
                self.hour.add(figures, now)

    async def run(self) -> None:
        """Score what ends, forever, in a thread."""
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                await asyncio.to_thread(self.take)
            except Exception:
                logger.exception("the forecasts of what has ended cannot be scored")


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
        self._telemetry = telemetry
        self._scores = scores
        self._clock = clock
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
        failures = CounterMetricFamily(
            "headway_instance_scheduler_failures",
            "Times that an engine's own order or choice of victims failed, and vLLM's was used.",
            labels=labels,
        )
        for key, instance in view.instances.items():
            names = [key.name, str(key.rank)]
            failures.add_metric(names, instance.gauges.failures)
            running.add_metric(names, instance.gauges.running)
            waiting.add_metric(names, instance.gauges.waiting)
            usage.add_metric(names, instance.gauges.kv_usage)
            if instance.gauges.prefill_budget is not None:
                budget.add_metric(names, instance.gauges.prefill_budget)
            stale.add_metric(names, view.is_stale(key, now))
        yield from (running, waiting, usage, budget, stale, failures)
