"""What a proxy exports: scraped from a real one, beside scripted engines."""

import asyncio

import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families
from published_telemetry import Engine, endpoint_of, frames, publisher
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer


def labels_by_name(text: str) -> dict[str, set[str]]:
    """The labels of every sample that a scrape holds."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def scraped_proxy(tokenizer: Tokenizer) -> str:
    """What a proxy exports that has served a request, tried to move it, and heard of another."""
    with publisher(bind=True) as sender:
        telemetry = {"decode-0": endpoint_of(sender)}
        async with cluster(tokenizer, prefix_caching=False, telemetry=telemetry) as it:
            await _serve(it)
            await _publish(sender, it)
            return await it.text("/metrics")


async def _serve(it: Cluster) -> None:
    it.set_decodes(stalls_at=5)
    body = {"prompt": PROMPT, "max_tokens": 20}
    stream = asyncio.create_task(it.stream(body))
    await until(lambda: any(request.generated_tokens == 5 for request in it.requests()))
    _, target = it.source_and_target()
    target.full = True
    assert await it.move() == "no_room"
    it.set_decodes(stalls_at=0)
    await stream


async def _publish(sender: zmq.Socket[bytes], it: Cluster) -> None:
    """Publish as an engine that reckons its budget, until the end of a request is scored."""
    engine, scores = Engine(), it.proxy.metrics.scores
    assert scores is not None
    async with asyncio.timeout(60):
        while not scores.quality.scored:
            sender.send_multipart(frames(engine.start()))
            engine.decode(20)
            snapshot = engine.snapshot()
            gauges = msgspec.structs.replace(snapshot.gauges, prefill_budget=64.0)
            sender.send_multipart(frames(msgspec.structs.replace(snapshot, gauges=gauges)))
            sender.send_multipart(frames(engine.finish()))
            await asyncio.sleep(0.05)
