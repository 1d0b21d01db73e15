"""One trace of a request that moves: the proxy's spans and those of vLLM in three engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from collector import Collected, Collector
from moving import STORY
from proxying import COMPLETIONS, Client, served
from running_deployment import RunningDeployment

from rescheduler.engines.proxy_options import TraceOptions
from rescheduler.openai.openai_stream import read_events

pytestmark = pytest.mark.timeout(1200)

ATTEMPTS = 5
LONG = {
    "model": "smollm2",
    "prompt": STORY,
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
"""Far longer than it takes to move; nobody reads it to its end."""


def moved(spans: Sequence[Collected]) -> list[Collected]:
    return [s for s in spans if s.name == "move" and s.attributes["headway.outcome"] == "moved"]


async def read_until_it_moves(client: Client, collector: Collector) -> None:
    """Read a stream whose instance is drained, until it has moved; then leave."""
    drained = None
    async with client.session.post(client.proxy + COMPLETIONS, json=LONG) as response:
        assert response.status == 200, await response.text()
        async for chunk in read_events(response.content):
            assert "error" not in chunk, chunk
            if drained is None:
                drained = await client.busy()
                if drained is None:  # over already
                    return
                await client.admin("drain", drained)
            if moved(collector.spans):
                break
    if drained is not None:
        await client.admin("undrain", drained)


def test_a_request_that_moves_between_engines_is_one_trace(
    deployment: RunningDeployment,
    collector: Collector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # of the proxy, ms to a batch

    async def work(client: Client) -> None:
        for _ in range(ATTEMPTS):
            await read_until_it_moves(client, collector)
            if moved(collector.spans):
                return
        raise AssertionError(f"{ATTEMPTS} streams ended before they moved")

    options: Any = {"traces": TraceOptions(endpoint=collector.endpoint, sample=1.0)}
    with served(deployment, tmp_path, **options) as proxy:
        proxy.run(work)
        move = moved(collector.spans)[0]

        def whole(spans: Sequence[Collected]) -> bool:
            ours = [span for span in spans if span.trace == move.trace]
            engines = [span for span in ours if span.name == "llm_request"]
            return any(span.name == "request" for span in ours) and len(engines) >= 3

        collector.until(whole, "the request, and vLLM's spans of it in three places")
    trace = [span for span in collector.spans if span.trace == move.trace]
    print(*trace, sep="\n")  # what a failing test shows
    by_id = {span.id: span for span in trace}
    within = {
        (by_id[span.parent].name, span.service) for span in trace if span.name == "llm_request"
    }
    source, target = move.attributes["headway.source"], move.attributes["headway.target"]
    assert within >= {("prefill", "prefill-0"), ("decode", source), ("copy", target)}
    parts = {span.name for span in trace if span.parent == move.id}
    assert parts == {"copy", "freeze", "resume"}
    assert move.attributes["headway.reason"] == "drain"
    assert move.attributes["headway.pause_ms"] > 0
    decodes = sorted((s for s in trace if s.name == "decode"), key=lambda span: span.began)
    assert [span.attributes["headway.instance"] for span in decodes] == [source, target]
    # No engine records anything by itself, such as the proxy's probes.
    assert all(span.parent for span in collector.spans if span.service != "headway")
