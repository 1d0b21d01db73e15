"""Whether a proxy and its coordinator need more memory, descriptors or tasks the longer they serve.

    python -m benchmarks.leaks [--requests 100000] --json OUT

A `headway serve` and a `headway coordinator`, each a process of its own, before engines that
compute nothing and fail as they are asked. Clients make short requests, 48 at a time: streamed and
not, completions and chats, two answers at once, bodies of unknown length, with an `X-Request-Id`
and without; some leave in the middle, some send what is refused; some are answered with errors 500
or 429, lose their prefill, or a stream that goes on elsewhere. Every second another engine is
drained, so that requests move; a twentieth are traced.

Memory is read 400 times. Of the first three quarters of the run nothing counts: what is kept on
purpose reaches its limit, such as the names of the latest 50,000 requests that have ended. The rest
is divided into twenty parts. The slope is the median of those from the mean of one part to that of
the next, with the interval that holds the true median in 95% of all cases: so a heap that the
system gets back at once, or a table that doubles, weighs no more than any other part. Descriptors,
threads, tasks and metric series are counted twice while nothing runs and no connection is open,
after a tenth of the requests and at the end; reported is by how many they grew. Series that say how
something ended appear when it first ends so: they are counted by themselves.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import msgspec
import numpy as np
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families
from scipy import stats
from tqdm import tqdm

from benchmarks.support.erratic_engines import FAULTS, MODEL
from benchmarks.support.report import arguments, report
from benchmarks.support.server_process import ServerProcess, headway, server
from rescheduler.demo.load import metric_total
from rescheduler.engines.launch_local import free_ports
from rescheduler.serving.admin_client import admin_token

_AT_ONCE = 48
_SEED = 0
_READINGS = 400
_PARTS = 20
_DRAIN_SECONDS = 1.0
_BEFORE = 10
"""A tenth of the requests is made before anything is counted."""
_SETTLE_SECONDS = 4.0  # longer than unused connections to engines are kept
_POLL_SECONDS = 0.5
_IDLE_SECONDS = 60.0
_SAMPLED = 0.05


def main() -> None:
    parser = arguments("whether anything leaks", quick=False)
    parser.add_argument("--requests", type=int, default=100_000, help="how many (%(default)s)")
    options = parser.parse_args()
    figures, unexpected = asyncio.run(measure(options.requests))
    for name, count in sorted(unexpected.items()):
        print(f"{name}: {count}", file=sys.stderr)
    report("leaks", figures, options.json)


_Holdings = dict[str, int]
"""What a process holds while nothing runs, by name."""


@dataclass
class Process:
    """One of the two that are watched; its memory in KiB by how many requests had ended."""

    name: str
    server: ServerProcess
    url: str
    resident: list[tuple[int, float]] = field(default_factory=list)

    def read(self, requests: int) -> None:
        self.resident.append((requests, self.server.resident_kib()))

    async def metrics(self) -> list[Sample]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        return [one for family in text_string_to_metric_families(text) for one in family.samples]

    async def holdings(self) -> _Holdings:
        samples = await self.metrics()
        tasks = next(one.value for one in samples if one.name.endswith("_event_loop_tasks"))
        outcomes = sum("outcome" in one.labels for one in samples)
        return {
            "descriptors": self.server.descriptors(),
            "threads": self.server.threads(),
            "tasks": int(tasks),
            "series": len(samples) - outcomes,
            "outcome_series": outcomes,
        }


async def measure(requests: int, quiet: bool = False) -> tuple[dict[str, float], Mapping[str, int]]:
    """Return the figures, and how many requests ended as they should not, by kind and outcome."""
    with ExitStack() as stack:
        proxy, coordinator, admin = _started(stack)
        processes = (proxy, coordinator)
        bar = stack.enter_context(tqdm(total=requests, unit="requests", disable=quiet))
        mixed, every = MixedClients(random.Random(_SEED)), max(1, requests // _READINGS)

        def ended() -> None:
            bar.update()
            if mixed.ended % every == 0:
                for process in processes:
                    process.read(mixed.ended)

        async def asked(share: int) -> None:
            connector = aiohttp.TCPConnector(limit=0)
            async with (
                aiohttp.ClientSession(proxy.url, connector=connector) as session,
                _draining(admin),
            ):
                await mixed.ask(session, share, _AT_ONCE, ended)

        first = requests // _BEFORE
        await asked(first)
        before = await asyncio.gather(*(_idle(process) for process in processes))
        began = time.monotonic()
        await asked(requests - first)
        seconds = time.monotonic() - began
        after = await asyncio.gather(*map(_idle, processes, before))
        figures: dict[str, float] = {"requests": mixed.ended}
        figures["requests_per_second"] = (requests - first) / seconds
        for name in OUTCOMES:
            figures[f"requests_{name}"] = mixed.outcomes[name]
        figures["requests_unexpected"] = sum(mixed.unexpected.values())
        metrics, moves = f"{proxy.url}/metrics", "headway_proxy_migrations_total"
        figures["moves"] = await asyncio.to_thread(metric_total, metrics, moves, outcome="moved")
        for process, b, a in zip(processes, before, after, strict=True):
            figures |= _figures(process, b, a)
        return figures, mixed.unexpected


def slope(requests: Sequence[float], kib: Sequence[float]) -> tuple[float, float, float]:
    """Return by how many KiB memory grows in 1,000 requests, and its 95% interval."""
    parts = min(_PARTS, len(kib) // 2)
    x = np.array([part.mean() for part in np.array_split(np.asarray(requests, float), parts)])
    y = np.array([part.mean() for part in np.array_split(np.asarray(kib, float), parts)])
    steps = np.sort(1000 * np.diff(y) / np.diff(x))
    beyond = int(stats.binom.ppf(0.025, len(steps), 0.5)) - 1
    low, high = (float(steps[i]) for i in (max(0, beyond), min(-1, -1 - beyond)))
    return float(np.median(steps)), low, high


def _figures(process: Process, before: _Holdings, after: _Holdings) -> dict[str, float]:
    name, readings = process.name, process.resident
    counted = readings[3 * len(readings) // 4 :]
    growth, low, high = slope([n for n, _ in counted], [kib for _, kib in counted])
    figures = {
        f"{name}_rss_slope_kb_per_1000": growth,
        f"{name}_rss_slope_kb_per_1000_low": low,
        f"{name}_rss_slope_kb_per_1000_high": high,
        f"{name}_rss_mb_first": readings[0][1] / 1024,
        f"{name}_rss_mb_last": readings[-1][1] / 1024,
    }
    return figures | {f"{name}_{key}": after[key] - before[key] for key in after}


def _started(stack: ExitStack) -> tuple[Process, Process, str]:
    """Start everything; return the two that are watched, and the operator's address."""
    collector = stack.enter_context(_span_counter())
    engines = stack.enter_context(
        server([sys.executable, "-m", "benchmarks.support.erratic_engines"])
    )
    ports = free_ports(3)
    config = {
        "model": MODEL,
        "instances": msgspec.json.decode(engines.said),
        "migration": {"name": "survival", "interval_seconds": 1.0},
        "coordinator": {"endpoint": f"tcp://127.0.0.1:{ports[0]}", "port": ports[1]},
        "proxy": {
            "port": 0,
            "admin_port": ports[2],
            "prefill_concurrency": 64,
            "ahead": 256,
            "attempts": 4,
            "backoff_seconds": 0.01,
            "breaker_failures": 16,
            "traces": {"endpoint": collector.endpoint, "sample": _SAMPLED},
        },
    }
    coordinator = stack.enter_context(headway("coordinator", config, logs=False))
    proxy = stack.enter_context(headway("serve", config, logs=False))
    return (
        Process("proxy", proxy, f"http://127.0.0.1:{proxy.port}"),
        Process("coordinator", coordinator, f"http://127.0.0.1:{ports[1]}"),
        f"http://127.0.0.1:{ports[2]}",
    )


class _SpanCounter(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts what it is sent by OTLP over gRPC."""

    endpoint = ""
    spans = 0

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        del context
        scopes = (scope for resource in request.resource_spans for scope in resource.scope_spans)
        self.spans += sum(len(scope.spans) for scope in scopes)
        return ExportTraceServiceResponse()


@contextmanager
def _span_counter() -> Iterator[_SpanCounter]:
    """Listen on a free port, in a thread of this process."""
    counter = _SpanCounter()
    server = grpc.server(ThreadPoolExecutor(1))
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(counter, server)  # type: ignore[no-untyped-call]
    counter.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield counter
    finally:
        server.stop(None).wait()


@asynccontextmanager
async def _draining(admin: str) -> AsyncIterator[None]:
    port = int(admin.rpartition(":")[2])
    headers = {"Authorization": f"Bearer {admin_token(port)}"}

    async def drain() -> None:
        async with aiohttp.ClientSession(admin, headers=headers) as session:
            while True:
                for name in ("decode-0", "decode-1"):
                    await post(session, f"/admin/drain/{name}")
                    try:
                        await asyncio.sleep(_DRAIN_SECONDS / 2)
                    finally:  # never both of them: nothing would be served
                        await post(session, f"/admin/undrain/{name}")
                    await asyncio.sleep(_DRAIN_SECONDS / 2)

    async def post(session: aiohttp.ClientSession, path: str) -> None:
        async with session.post(path) as response:
            assert response.status == 200, await response.text()

    draining = asyncio.create_task(drain())
    try:
        yield
    finally:
        draining.cancel()
        await asyncio.wait([draining])
        if not draining.cancelled():
            draining.result()


async def _idle(process: Process, before: _Holdings | None = None) -> _Holdings:
    """Return what a process holds once that no longer changes, or is as it was before."""
    deadline, last = time.monotonic() + _IDLE_SECONDS, before
    while True:
        await asyncio.sleep(_SETTLE_SECONDS if before is None else _POLL_SECONDS)
        held = await process.holdings()
        alike = last is not None and held == last | {"outcome_series": held["outcome_series"]}
        if alike or time.monotonic() > deadline:
            return held
        last = before or held


_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_LONG_TOKENS = 30
"""Tokens of a request that runs for long enough to be moved when its engine is drained."""


@dataclass(frozen=True)
class _Kind:
    """What a client asks, how often, and the outcomes that are as they should be."""

    weight: float
    expected: tuple[str, ...]
    body: dict[str, Any]
    path: str = _COMPLETIONS
    leaves: bool = False
    raw: bytes = b""
    chunked: bool = False


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
KINDS: dict[str, _Kind] = {
    "completion": _Kind(8, ("ok",), {}),
    "streamed completion": _Kind(20, ("ok",), {"stream": True}),
    "chat": _Kind(6, ("ok",), {}, _CHAT),
    "streamed chat": _Kind(14, ("ok",), {"stream": True}, _CHAT),
    "two answers": _Kind(4, ("ok",), {"n": 2}),
    "two streamed answers": _Kind(4, ("ok",), {"n": 2, "stream": True}),
    "streamed chat with tools": _Kind(3, ("ok",), {"stream": True, "tools": [_TOOL]}, _CHAT),
    "long": _Kind(6, ("ok",), {"stream": True, "max_tokens": _LONG_TOKENS}),
    "chunked body": _Kind(5, ("ok",), {"stream": True}, chunked=True),
    "embeddings": _Kind(3, ("ok",), {"input": "a"}, "/v1/embeddings"),
    "leaves at once": _Kind(3, ("left",), {"stream": True}, leaves=True),
    "leaves a long stream": _Kind(
        4, ("left",), {"stream": True, "max_tokens": _LONG_TOKENS}, leaves=True
    ),
    "leaves two answers": _Kind(2, ("left",), {"n": 2, "stream": True}, leaves=True),
    "invalid JSON": _Kind(3, ("400",), {}, raw=b'{"model": '),
    "reserved field": _Kind(2, ("400",), {"kv_transfer_params": {}}),
    "unknown model": _Kind(3, ("404",), {"model": "unknown"}),
    "unknown path": _Kind(1, ("404",), {}, "/v1/unknown"),
    "too long": _Kind(3, ("400",), {"user": "too long"}),
    "error 500": _Kind(2, ("502",), {"user": "error 500"}),
    "error 429": _Kind(2, ("429",), {"user": "error 429"}),
    "error event": _Kind(2, ("502",), {"user": "error event", "stream": True}),
    "prefill 500": _Kind(2, ("ok",), {"user": "prefill 500", "stream": True}),
    "breaks": _Kind(2, ("ok",), {"user": "breaks", "stream": True}),
}
"""By what a client asks for."""
OUTCOMES = ("ok", "left", "400", "404", "429", "502", "503", "cut", "broken", "unexpected")
"""How a request may end: its last event or its whole answer came, its client left, its HTTP status;
its stream ended without its end, or its connection broke; something else."""

assert {kind.body["user"] for kind in KINDS.values() if "user" in kind.body} == set(FAULTS)


class MixedClients:
    def __init__(self, generator: random.Random) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.unexpected: Counter[str] = Counter()
        self.ended = 0
        self._random = generator
        self._names, self._weights = list(KINDS), [kind.weight for kind in KINDS.values()]

    async def ask(
        self, session: aiohttp.ClientSession, requests: int, at_once: int, ended: Callable[[], None]
    ) -> None:
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                (name,) = self._random.choices(self._names, self._weights)
                outcome = await self._ask(session, KINDS[name])
                self.outcomes[outcome] += 1
                if outcome not in KINDS[name].expected:
                    self.unexpected[f"{name}: {outcome}"] += 1
                self.ended += 1
                ended()

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def _ask(self, session: aiohttp.ClientSession, kind: _Kind) -> str:
        number = self._random.getrandbits(64)
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, **kind.body}
        if kind.path == _CHAT:
            body["messages"] = [{"role": "user", "content": f"Tell me of river {number}"}]
        elif kind.path == _COMPLETIONS:
            body["prompt"] = f"Tell me of river {number}"
        raw = kind.raw or json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if number % 2:
            headers["X-Request-Id"] = f"request-{number:x}"
        if number % 3 == 0:
            headers["traceparent"] = f"00-{number:032x}-{number | 1:016x}-01"
        if number % 11 == 0:
            headers["Connection"] = "close"
        data = _pieces(raw) if kind.chunked else raw
        try:
            async with session.post(kind.path, data=data, headers=headers) as response:
                if response.status != 200:
                    await response.read()
                    status = str(response.status)
                    return status if status in OUTCOMES else "unexpected"
                if kind.leaves:
                    if number % 5:
                        await response.content.readany()
                    response.close()
                    return "left"
                return _ended(await response.read(), streams=bool(body.get("stream")))
        except (aiohttp.ClientError, ConnectionError):
            return "broken"


def _ended(answer: bytes, streams: bool) -> str:
    if not streams:
        return "ok"
    if b'"error"' in answer:
        return "502"
    return "ok" if b"[DONE]" in answer[-32:] else "cut"


async def _pieces(raw: bytes) -> AsyncIterator[bytes]:
    yield raw[:20]
    await asyncio.sleep(0)
    yield raw[20:]


if __name__ == "__main__":
    main()
