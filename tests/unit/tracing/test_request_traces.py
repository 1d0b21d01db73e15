"""What a collector gets of requests through the proxy, and what the engines are told."""

import asyncio
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest
from collector import Collected, Collector, grpc_collector, http_collector
from live_requests import instance_state, live_request
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_cluster import PROMPT, Cluster, cluster, tokens_of, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.engines.deployment import DeploymentError
from rescheduler.engines.proxy_options import ProxyOptions, TraceOptions
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.routing.heuristics import JSQ
from rescheduler.routing.policy import RoutingPolicy
from rescheduler.step_time.profile import MeanStepTime
from rescheduler.tracing.exporter import otlp_provider
from rescheduler.tracing.span import RequestTracer, create_tracer


@pytest.fixture(autouse=True)
def sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent soon, and however long that takes on a busy machine."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT = 2, 3
FORBIDDEN = "unlikely-words"


@asynccontextmanager
async def traced(
    tokenizer: Tokenizer,
    listen: Callable[[], AbstractContextManager[Collector]] = http_collector,
    sample: float = 1.0,
    trusts: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Cluster, Collector]]:
    """A proxy whose traces go to a collector."""
    with listen() as collector:
        traces = TraceOptions(endpoint=collector.endpoint, sample=sample, trust_clients=trusts)
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


async def asked_with(it: Cluster, headers: dict[str, str], **more: Any) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 2, **more}
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
        assert root.attributes.pop("headway.request_id") in chunks[0]["id"]
        said = {
            "operation.name": "text_completion",
            "request.model": "m",
            "usage.output_tokens": 20,
        }
        said |= {"request.max_tokens": 20}
        said["usage.input_tokens"] = len(tokenizer.encode(body["prompt"]).ids)
        expected = {f"gen_ai.{name}": value for name, value in said.items()}
        assert root.attributes.items() >= (expected | {"headway.outcome": "ok"}).items()
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
        await asked_with(it, {}, n=2)
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
        async with traced(tokenizer, sample=sample, trusts=True) as (it, collector):
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
        await all_of(collector, 8)
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
    async with traced(tokenizer, pool_seconds=1.0) as (it, collector):
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


class Broken(JSQ):
    def assign(self, view: ClusterView) -> Assignment:
        raise RuntimeError("broken")


async def said_of_a_place(policy: RoutingPolicy | None) -> Mapping[str, Any]:
    """The attributes of a placement on one of two instances, the first of which runs a request."""
    exporter = InMemorySpanExporter()
    traces = TraceOptions(endpoint="http://127.0.0.1:1", sample=1.0)
    tracer = RequestTracer(traces, otlp_provider(exporter), exporter)
    options, placements = ProxyOptions(), Placements[LiveRequest]()
    states = [instance_state(name) for name in "ab"]
    other, request = (live_request(name, placements, model="m") for name in ("r", "s"))
    other.place(states[0])
    request.trace, _ = tracer.begin(request.client, "s", {})
    if policy is None:
        request.place(states[1])
    else:
        clock = asyncio.get_running_loop().time
        dispatcher = Dispatcher(placements, states, policy, options, MeanStepTime(), clock)
        assert await dispatcher.place(request) is states[1]
    await until(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    assert span.name == "place"
    await tracer.close()
    return dict(span.attributes or {})


@pytest.mark.parametrize(("policy", "decided"), [(JSQ(), "jsq"), (Broken(), "jsq_load")])
async def test_a_decision_names_who_decided_and_what_it_saw(
    policy: RoutingPolicy, decided: str
) -> None:
    said = await said_of_a_place(policy)
    assert said == {
        "headway.instance": "b",
        "headway.policy": decided,
        "headway.waiting": 1,
        "headway.instances": ("a", "b"),
        "headway.requests": (1, 0),
        "headway.kv_tokens": (len('{"prompt": "a", "model": "m"}') // 4, 0),
    }


async def test_of_a_coordinator_s_decision_only_the_place_is_known() -> None:
    said = await said_of_a_place(None)
    assert said == {"headway.instance": "b", "headway.policy": "coordinator"}


PATHS = pytest.mark.parametrize("path", ["", "/v1/traces"], ids=["grpc", "http"])


@contextmanager
def silent(listens: bool) -> Iterator[str]:
    """An address that refuses connections, or takes them and never answers."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        if listens:
            holder.listen()
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


SENDS = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from rescheduler.commands.event_loop import log_serving
from rescheduler.engines.proxy_options import TraceOptions
from rescheduler.tracing.exporter import ReportedExporter

log_serving(verbose=True)
options = TraceOptions(endpoint=sys.argv[1])
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(ReportedExporter(options)))
for _ in range(3):
    provider.get_tracer("test").start_span("a").end()
provider.shutdown()
"""


@PATHS
def test_a_dead_collector_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with silent(listens=False) as url:
        command = [sys.executable, "-c", SENDS, url + path]
        found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    (line,) = found.stderr.splitlines()
    assert f"traces: {url}{path} takes none, so they are lost: " in line


@pytest.mark.parametrize("room", [pytest.param(4, marks=pytest.mark.slow), 2048])
@PATHS
async def test_requests_are_served_and_the_proxy_ends_though_no_collector_answers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, room: int
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")  # what waits for it never ends
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", str(room))
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with silent(listens=True) as url:
        traces = TraceOptions(endpoint=url + path, sample=1.0)
        async with cluster(tokenizer, traces=traces) as it:
            streams = (it.stream({"prompt": PROMPT, "max_tokens": 5}) for _ in range(10))
            for chunks in await asyncio.gather(*streams):
                assert tokens_of(chunks) == it.expected(5)


async def test_without_traces_a_client_s_headers_go_to_the_engines_as_they_are(
    tokenizer: Tokenizer,
) -> None:
    client = {"traceparent": "anything", "tracestate": "at all"}
    async with cluster(tokenizer) as it:
        await asked_with(it, client)
        for engine in it.engines.values():
            for headers in engine.headers:
                assert {name: headers[name] for name in client} == client


def test_what_opentelemetry_finds_fault_with_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "tar")
    with pytest.raises(DeploymentError, match=r"proxy.traces: .*tar.*OTEL_EXPORTER_OTLP_COMP"):
        create_tracer(TraceOptions(endpoint="http://127.0.0.1:4317"))


def test_the_sdk_s_own_switch_turns_traces_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert create_tracer(TraceOptions(endpoint="http://127.0.0.1:4317", sample=1.0)) is None
