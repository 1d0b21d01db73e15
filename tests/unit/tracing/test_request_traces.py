"""What a collector gets of requests through the proxy, and what the engines are told."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from collector import Collected, Collector, grpc_collector, http_collector
from scripted_cluster import PROMPT, Cluster, cluster, tokens_of, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.engines.deployment import TraceOptions

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT = 2, 3
FORBIDDEN = "unlikely-words"


@asynccontextmanager
async def traced(
    tokenizer: Tokenizer,
    listen: Callable[[], AbstractContextManager[Collector]] = http_collector,
    sample: float = 1.0,
    trust_clients: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Cluster, Collector]]:
    """A proxy whose traces go to a collector."""
    with listen() as collector:
        traces = TraceOptions(
            endpoint=collector.endpoint, sample=sample, trust_clients=trust_clients
        )
        async with cluster(tokenizer, traces=traces, **options) as it:
            yield it, collector


async def all_of(collector: Collector, requests: int = 1) -> None:
    """Wait until whole requests have come: each ends with the span of that name."""

    def whole(spans: Sequence[Collected]) -> bool:
        return sum(span.name == "request" for span in spans) >= requests

    await asyncio.to_thread(collector.until, whole, f"{requests} requests")


def told(engine: ScriptedEngine) -> list[tuple[str, str]]:
    """The traces and the spans that an engine was asked within."""
    asked = [headers["traceparent"].split("-") for headers in engine.headers]
    assert all(parts[0] == "00" and parts[3] == "01" for parts in asked)
    return [(parts[1], parts[2]) for parts in asked]


async def asked_with(it: Cluster, headers: dict[str, str]) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 2}
    async with it.session.post(it.url + "/v1/completions", json=body, headers=headers) as got:
        assert got.status == 200, await got.text()


@pytest.mark.parametrize("listen", [http_collector, grpc_collector])
async def test_a_request_that_stays_is_one_tree(
    tokenizer: Tokenizer, listen: Callable[[], AbstractContextManager[Collector]]
) -> None:
    async with traced(tokenizer, listen) as (it, collector):
        body = {"model": "m", "prompt": f"{FORBIDDEN} {PROMPT}", "max_tokens": 20}
        chunks = await it.stream(body)
        assert len(tokens_of(chunks)) == 20
        await all_of(collector)
        assert collector.names == {"request": 1, "wait": 2, "prefill": 1, "place": 1, "decode": 1}
        root = collector.one("request")
        assert (root.parent, root.kind, root.failed) == ("", SERVER, False)
        assert root.attributes["gen_ai.operation.name"] == "text_completion"
        assert root.attributes["gen_ai.request.model"] == "m"
        assert root.attributes["gen_ai.request.max_tokens"] == 20
        prompt = len(tokenizer.encode(body["prompt"]).ids)
        assert root.attributes["gen_ai.usage.input_tokens"] == prompt
        assert root.attributes["gen_ai.usage.output_tokens"] == 20
        assert root.attributes["headway.request_id"] in chunks[0]["id"]
        assert root.attributes["headway.outcome"] == "ok"
        for span in collector.spans:
            assert span.trace == root.trace
            assert span.parent == ("" if span is root else root.id)
            assert root.began <= span.began <= span.ended <= root.ended
            assert FORBIDDEN not in str(span)
        decode, place = collector.one("decode"), collector.one("place")
        assert decode.kind == collector.one("prefill").kind == CLIENT
        assert decode.events == ["first token"]
        stages = [span.attributes["headway.stage"] for span in collector.named("wait")]
        assert stages == ["prefill", "decode"]
        assert place.attributes["headway.policy"] == "jsq_load"
        assert place.attributes["headway.instance"] == decode.attributes["headway.instance"]
        assert place.attributes["headway.instances"] == ["decode-0", "decode-1"]
        assert place.attributes["headway.kv_tokens"] == [0, 0]
        used = it.engines[decode.attributes["headway.instance"]]
        assert told(used) == [(root.trace, decode.id)]
        assert told(it.engines["prefill-0"]) == [(root.trace, collector.one("prefill").id)]


async def test_a_request_that_moves_is_one_tree(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (it, collector):
        it.set_decodes(stalls_at=60)  # so that it cannot end before it is frozen

        async def at(tokens: int) -> None:
            if tokens == 10:
                moving = asyncio.create_task(it.move())
                await until(lambda: any(r.freezing for e in it.decodes for r in e.running.values()))
                it.set_decodes(stalls_at=0)
                assert await moving == "moved"

        chunks = await it.stream({"prompt": PROMPT, "max_tokens": 100}, at)
        assert tokens_of(chunks) == it.expected(100)
        await all_of(collector)
        assert collector.names == {
            **{"request": 1, "wait": 2, "prefill": 1, "place": 1, "decode": 2},
            **{"move": 1, "copy": 1, "freeze": 1, "resume": 1},
        }
        root, move = collector.one("request"), collector.one("move")
        before, after = collector.named("decode")
        source, target = before.attributes["headway.instance"], after.attributes["headway.instance"]
        said = {key.removeprefix("headway."): value for key, value in move.attributes.items()}
        assert said.pop("pause_ms") > 0
        asked = {"source": source, "target": target, "reason": "test", "outcome": "moved"}
        assert said == asked
        assert move.parent == root.id
        parts = [collector.one(name) for name in ("copy", "freeze", "resume")]
        assert [part.parent for part in parts] == [move.id] * 3
        assert [part.attributes["headway.instance"] for part in parts] == [target, source, target]
        assert move.began <= parts[0].began <= parts[1].began <= parts[2].began <= move.ended
        assert told(it.engines[source]) == [(root.trace, before.id)]
        assert told(it.engines[target]) == [(root.trace, parts[0].id), (root.trace, after.id)]
        assert not any(span.failed for span in collector.spans)


async def test_a_request_that_is_handed_through_is_traced(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (it, collector):
        status, _, _ = await it.post(
            {"model": "m", "prompt": PROMPT, "n": 2, "max_tokens": 3}, "/v1/completions"
        )
        assert status == 200
        await all_of(collector)
        assert collector.names == {"request": 1, "wait": 1, "place": 1, "decode": 1}
        decode = collector.one("decode")
        used = it.engines[decode.attributes["headway.instance"]]
        assert told(used) == [(decode.trace, decode.id)]


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_a_client_s_trace_goes_on_but_what_is_traced_is_not_its_decision(
    tokenizer: Tokenizer, flags: str
) -> None:
    client = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "them=1"}
    async with traced(tokenizer) as (it, collector):
        await asked_with(it, client)
        await all_of(collector)
        root = collector.one("request")
        assert (root.trace, root.parent) == (TRACE, PARENT)
        assert {span.trace for span in collector.spans} == {TRACE}
        (headers,) = it.engines["prefill-0"].headers
        assert headers["tracestate"] == "them=1"
    async with traced(tokenizer, sample=0.0) as (it, collector):
        await asked_with(it, client)
        (headers,) = it.engines["prefill-0"].headers
        assert headers["traceparent"] == f"00-{TRACE}-{PARENT}-00"
    assert collector.spans == []


async def test_a_trusted_client_decides_what_is_traced(tokenizer: Tokenizer) -> None:
    for flags, sample, traces in (("01", 0.0, 1), ("00", 1.0, 0)):
        async with traced(tokenizer, sample=sample, trust_clients=True) as (it, collector):
            await asked_with(it, {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
            await all_of(collector, traces)
            (headers,) = it.engines["prefill-0"].headers
            assert headers["traceparent"].endswith(f"-{flags}")
        assert len(collector.named("request")) == traces


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        "x" * 8000,
        "00-" + "0" * 32 + f"-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-zz",
        f"00-{TRACE}-{PARENT}-01, 00-{TRACE}-{PARENT}-01",
    ],
)
@pytest.mark.parametrize("sample", [0.0, 1.0])
async def test_a_malformed_traceparent_begins_a_trace_of_its_own(
    tokenizer: Tokenizer, header: str, sample: float
) -> None:
    async with traced(tokenizer, sample=sample) as (it, collector):
        await asked_with(it, {"traceparent": header, "tracestate": "them=1"})
        await all_of(collector, int(sample))
        (headers,) = it.engines["prefill-0"].headers
        assert "tracestate" not in headers
        _, trace, _, flags = headers["traceparent"].split("-")
        assert trace != TRACE
        assert flags == f"{int(sample):02d}"
    assert all((span.trace, span.parent) == (trace, "") for span in collector.named("request"))


async def test_no_other_header_of_a_client_reaches_an_engine(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (it, _):
        await asked_with(it, {"baggage": "a=1", "b3": "1", "X-Secret": "2", "Authorization": "k"})
        for engine in it.engines.values():
            for headers in engine.headers:
                assert headers["Authorization"] == "k"
                assert not {"baggage", "b3", "X-Secret"} & set(headers)


async def test_a_failed_attempt_and_what_came_of_it_are_told_apart(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (it, collector):
        it.decodes[0].fails = 500
        body = {"prompt": PROMPT, "max_tokens": 5}
        await asyncio.gather(*(it.stream(body) for _ in range(8)))
        assert it.decodes[0].bodies
        await asyncio.to_thread(
            collector.until,
            lambda spans: any(
                span.name == "request" and span.id in {s.parent for s in spans if s.failed}
                for span in spans
            ),
            "a request with a failed attempt",
        )
        failed = next(span for span in collector.named("decode") if span.failed)
        assert failed.attributes["error.type"] == "UpstreamError"
        assert failed.attributes["headway.instance"] == "decode-0"
        (root,) = (span for span in collector.named("request") if span.id == failed.parent)
        assert not root.failed
        it.decodes[0].fails = 0


@pytest.mark.parametrize(
    ("status", "outcome", "failed"), [(500, "failed", True), (404, "refused", False)]
)
async def test_a_request_that_ends_badly_says_how(
    tokenizer: Tokenizer, status: int, outcome: str, failed: bool
) -> None:
    async with traced(tokenizer) as (it, collector):
        it.set_decodes(fails=status)
        got, _, _ = await it.post({"model": "m", "prompt": PROMPT, "max_tokens": 5})
        assert got >= 400
        await all_of(collector)
        root = collector.one("request")
        assert (root.attributes["headway.outcome"], root.failed) == (outcome, failed)
        assert root.attributes.get("error.type") == (outcome if failed else None)
        it.set_decodes(fails=0)


async def test_a_client_that_leaves_leaves_a_failed_request(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer) as (it, collector):
        it.set_decodes(stalls_at=5)

        async def leave(tokens: int) -> None:
            if tokens == 5:
                raise aiohttp.ClientError("gone")

        with pytest.raises(aiohttp.ClientError, match="gone"):
            await it.stream({"prompt": PROMPT, "max_tokens": 50}, leave)
        await all_of(collector)
        root, decode = collector.one("request"), collector.one("decode")
        assert (root.failed, root.attributes["error.type"]) == (True, "client_gone")
        assert decode.failed
        assert root.attributes["gen_ai.usage.output_tokens"] == 5


@pytest.mark.parametrize(
    ("model", "traces"),
    [('"' + "m" * 100_000 + '"', 2), ("7", 2), ('"\\ud800"', 1)],  # the last is no JSON
    ids=["long", "number", "surrogate"],
)
async def test_a_model_that_is_none_is_left_out(
    tokenizer: Tokenizer, model: str, traces: int
) -> None:
    async with traced(tokenizer) as (it, collector):
        raw = f'{{"model": {model}, "prompt": "a", "max_tokens": 3}}'
        headers = {"Content-Type": "application/json"}
        url = it.url + "/v1/completions"
        async with it.session.post(url, data=raw, headers=headers) as got:
            assert got.status >= 400
        await asked_with(it, {})
        await all_of(collector, traces)
        models = [span.attributes.get("gen_ai.request.model") for span in collector.spans]
        assert Counter(models)["m"] == 1
        assert set(models) == {"m", None}


async def test_a_share_of_the_requests_is_traced(tokenizer: Tokenizer) -> None:
    async with traced(tokenizer, sample=0.5) as (it, collector):
        flags: list[str] = []
        while not {"00", "01"} <= set(flags):
            assert len(flags) < 200
            await asked_with(it, {})
            flags = [h["traceparent"][-2:] for h in it.engines["prefill-0"].headers]
        await all_of(collector, flags.count("01"))
        assert len(collector.named("request")) == flags.count("01")
