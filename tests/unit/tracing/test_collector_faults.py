"""Collectors that are not there, and deployments that want none."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scripted_cluster import PROMPT, cluster, tokens_of
from tokenizers import Tokenizer

from rescheduler.engines.deployment import DeploymentError, TraceOptions
from rescheduler.tracing.span import create_tracer

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
from rescheduler.engines.deployment import TraceOptions
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
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 2}
        async with it.session.post(it.url + "/v1/completions", json=body, headers=client) as got:
            assert got.status == 200
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
