"""What the proxy and the watch export: scraped from real ones, beside no engine."""

import asyncio
import threading

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from published_telemetry import frames, snapshot
from scripted_cluster import PROMPT, cluster, until
from tokenizers import Tokenizer

from predictor.live.telemetry_messages import (
    FinishedEvent,
    encode_survival,
)
from rescheduler.monitoring.forecast_quality import ForecastQuality
from rescheduler.monitoring.quality_exporter import QualityExporter
from rescheduler.telemetry.telemetry_view import (
    FinishedForecasts,
    InstanceKey,
    KeptForecast,
    TelemetryView,
)

__all__ = ["labels_by_name", "scraped_proxy", "scraped_watch"]

_EDGES = (0, 100, 1000)


def labels_by_name(text: str) -> dict[str, set[str]]:
    """The labels of every sample that a scrape holds."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def scraped_proxy(tokenizer: Tokenizer) -> str:
    """What a proxy exports that has served a request, and tried to move it."""
    async with cluster(tokenizer, prefix_caching=False) as it:
        for engine in it.decodes:
            engine.stalls_at = 5
        body = {"prompt": PROMPT, "max_tokens": 20}
        stream = asyncio.create_task(it.stream(body))
        await until(lambda: any(request.generated_tokens == 5 for request in it.requests()))
        _, target = it.source_and_target()
        target.full = True
        assert await it.move() == "no_room"
        for engine in it.decodes:
            engine.stalls_at = 0
        await stream
        return await it.text("/metrics")


def scraped_watch() -> str:
    """What a watch exports that has heard of an engine, and of a request that ended."""
    (curve,) = encode_survival(np.array([[1.0, 0.5, 0.0]]))
    view, quality, engine = TelemetryView(), ForecastQuality(), InstanceKey("decode-0", 0)
    gauges = {"running": 1, "kv_usage": 0.1, "kv_capacity_tokens": 1000, "prefill_budget": 64.0}
    view.receive(frames(snapshot(engine.name, edges=_EDGES, **gauges)), 0.0)
    event = FinishedEvent("request", "stop", 9, 150, 200)
    kept = [KeptForecast(0, 200, curve)]
    quality.add(FinishedForecasts(engine, "m", "c", event, _EDGES, kept))
    return generate_latest(QualityExporter(view, quality, threading.Lock()).registry).decode()
