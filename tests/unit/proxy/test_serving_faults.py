"""What one client, or one ordinary setting, must not do to the service."""

import asyncio
import gzip
import io
import json
import logging
import os
import re
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from scripted_cluster import PROMPT, Cluster, cluster, tokens_of, until
from tokenizers import Tokenizer

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.engines.deployment import DeploymentError
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.guarded_policy import GuardedPolicy, crowded_view
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.upstream import engine_key
from rescheduler.proxy.token_relay import ClientAnswer, ClientGoneError
from rescheduler.routing.policy import create_policy
from rescheduler.serving import connection

BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
LONG: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 5000, "stream": True}
PADDING = 20_000

_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def stalled(it: Cluster, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A client that asks and does not read."""
    host, port = it.url.removeprefix("http://").split(":")
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        sent = json.dumps(body).encode()
        head = _HEAD + f"Content-Length: {len(sent)}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(client, head.encode() + sent)
        yield client


async def test_engines_with_a_key_are_probed_with_the_proxys_and_asked_with_the_clients(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    async with cluster(tokenizer, engine_key_file=str(key)) as it:
        it.set_engines(key="s3cret")
        decode = it.proxy.cluster.instances["decode-0"]
        decode.breaker.failed(asyncio.get_running_loop().time(), certain=True)
        await until(lambda: decode.breaker.closed)
        own = {"Authorization": "Bearer s3cret"}
        assert (await it.post(BODY))[0] == 401
        async with it.session.get(it.url + "/v1/models") as response:
            assert response.status == 401
        async with it.session.get(it.url + "/v1/models", headers=own) as response:
            assert response.status == 200
        async with it.session.post(it.url + "/v1/completions", json=BODY, headers=own) as response:
            assert response.status == 200
        assert it.in_service


async def test_a_probe_that_is_not_allowed_shows_an_engine_that_works(it: Cluster) -> None:
    it.engines["decode-0"].key = "unknown to the proxy"
    decode = it.proxy.cluster.instances["decode-0"]
    decode.breaker.failed(asyncio.get_running_loop().time(), certain=True)
    await until(lambda: decode.breaker.closed)


@pytest.mark.parametrize("key", ["secret\n", "sec\nret", "sec\0ret"])
def test_a_key_that_cannot_be_read_or_that_no_header_can_hold_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    file = tmp_path / "key"
    file.write_text(f"a{key}b")
    with pytest.raises(DeploymentError, match=r"engine_key_file: (the key holds a line end|.*NUL)"):
        engine_key(ProxyOptions(engine_key_file=str(file)))
    with pytest.raises(DeploymentError, match=r"engine_key_file: .*No such file"):
        engine_key(ProxyOptions(engine_key_file=str(tmp_path / "none")))
    if "\0" not in key:  # no variable holds that
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(DeploymentError, match="VLLM_API_KEY: the key holds a line end"):
            engine_key(ProxyOptions())


@pytest.mark.parametrize("pinned", [{}, {"thinking_token_budget": 100}])
@pytest.mark.cluster(token_seconds=1.0, client_write_seconds=1.5, client_buffer_kb=64)
async def test_clients_that_do_not_read_are_disconnected_and_no_engine_is_blamed(
    it: Cluster, pinned: dict[str, Any]
) -> None:
    it.set_decodes(padding=PADDING)
    async with stalled(it, LONG | pinned), stalled(it, LONG | pinned):
        await until(lambda: it.proxy.running == 2)
        await until(lambda: it.proxy.running == 0)
        await it.idle()
        assert it.in_service
        status, _, _ = await it.post(BODY)
        assert status == 200


@pytest.mark.cluster(decodes=1, client_buffer_kb=256)
async def test_who_reads_in_gulps_does_not_change_how_long_a_step_seems(it: Cluster) -> None:
    """What has gathered behind a client comes at once, which is no engine's pace."""
    it.set_engines(token_seconds=0.01, padding=64_000)
    loop, step = asyncio.get_running_loop(), it.proxy.cluster.step
    step.seconds = 0.01
    async with stalled(it, LONG) as client:
        await until(lambda: any(request.client_blocks for request in it.requests()))
        for _ in range(4):
            await asyncio.sleep(0.4)  # some forty tokens gather
            taken = 0
            while taken < 2 << 20:
                taken += len(await loop.sock_recv(client, 1 << 20))
        assert step.seconds > 0.009


@pytest.mark.cluster(client_buffer_kb=4096)
async def test_a_client_that_reads_slowly_loses_nothing_and_keeps_its_engine_only_while_it_decodes(
    it: Cluster,
) -> None:
    it.set_decodes(padding=5000)
    read = asyncio.Event()

    async def at(tokens: int) -> None:
        if tokens == 1:
            await until(lambda: not it.requests())
            read.set()

    await it.answered(300, at)
    assert read.is_set()


def test_a_connection_serves_many_requests_on_either_loop(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with cluster(tokenizer) as it:
            reader, writer = await it.connect()
            for stream in (True, False, True):
                sent = json.dumps(BODY | {"stream": stream}).encode()
                head = _HEAD + f"Content-Length: {len(sent)}\r\n\r\n"
                writer.write(head.encode() + sent)
                headers = await reader.readuntil(b"\r\n\r\n")
                assert headers.startswith(b"HTTP/1.1 200 ")
                if stream:
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    (length,) = re.findall(rb"Content-Length: (\d+)", headers)
                    await reader.readexactly(int(length))
            writer.close()

    for run in (asyncio.run, uvloop.run):
        run(work())


@pytest.mark.cluster(concurrent_migrations=1, client_buffer_kb=64)
async def test_a_client_that_does_not_read_holds_up_no_other_clients_move(it: Cluster) -> None:
    it.set_decodes(padding=PADDING)
    async with stalled(it, LONG):
        await until(lambda: any(request.client_blocks for request in it.requests()))
        blocked = it.live()
        assert not blocked.can_move
        assert await it.move() == "gone"

        async def move_other() -> str:
            other = next((one for one in it.requests() if one is not blocked), None)
            if other is None:
                return "gone"
            decodes = it.proxy.cluster.decodes
            target = next(one for one in decodes if one is not other.instance)
            return (await it.proxy.migrator.move(other, target, "test")).outcome

        async def at(tokens: int) -> None:
            """Once more if it was just being written to: then it cannot move."""
            moved = any(one.done() and one.result() == "moved" for one in outcomes)
            if tokens >= 10 and not moved and all(one.done() for one in outcomes):
                outcomes.append(asyncio.create_task(move_other()))

        outcomes: list[asyncio.Task[str]] = []
        await it.answered(200, at)
        assert "moved" in await asyncio.gather(*outcomes)


@pytest.mark.cluster(breaker_failures=1)
async def test_poison_is_tried_twice_and_takes_no_instance_out_of_service(it: Cluster) -> None:
    it.set_decodes(poisoned="POISON")
    for number in range(6):
        status, answer, _ = await it.post({**BODY, "prompt": f"POISON {number}"})
        assert status == 502
        told = json.dumps(answer)
        assert not any(name in told for name in (*it.engines, "127.0.0.1", "scripted"))
        assert it.in_service
    asked = [body["prompt"] for body in it.asked]
    assert [asked.count(f"POISON {number}") for number in range(6)] == [2] * 6
    it.engines["prefill-0"].poisoned = "POISON"
    assert (await it.post({**BODY, "prompt": "POISON"}))[0] == 502
    assert it.in_service
    assert (await it.post(BODY))[0] == 200


@pytest.mark.cluster(breaker_failures=2, probe_seconds=60.0)
async def test_an_instance_whose_errors_others_do_not_make_leaves_service(it: Cluster) -> None:
    it.engines["decode-0"].poisoned = PROMPT
    for _ in range(8):
        assert (await it.post(BODY))[0] == 200
    assert not it.proxy.cluster.instances["decode-0"].breaker.closed
    assert it.proxy.cluster.instances["decode-1"].breaker.closed


@pytest.mark.cluster(decodes=3, breaker_failures=1, attempts=4)
async def test_half_of_the_instances_stay_in_service_whatever_requests_see(it: Cluster) -> None:
    it.set_decodes(breaks_at=1)
    for _ in range(3):
        assert (await it.post(BODY))[0] == 502
    closed = [it.proxy.cluster.instances[engine.name].breaker.closed for engine in it.decodes]
    assert sum(closed) >= 2


@pytest.mark.cluster(largest_body_mb=1)
async def test_a_large_body_is_refused_before_it_is_read(it: Cluster) -> None:
    reader, writer = await it.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    async with it.session.post(it.url + "/v1/completions", data=chunked(2_000_000)) as response:
        assert response.status == 413
        assert "larger than 1 MiB" in (await response.json())["error"]["message"]


async def chunked(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 50_000):
        yield b" " * 50_000


@pytest.mark.cluster(largest_body_mb=2, bodies_mb=3, body_seconds=3.0)
async def test_bodies_have_a_deadline_and_a_budget(it: Cluster) -> None:
    reader, writer = await it.connect()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\n\r\n"
        + b" " * 1_500_000
    )
    await writer.drain()
    await asyncio.sleep(0.1)
    second = io.BytesIO(json.dumps({**BODY, "prompt": "a" * 1_500_000}).encode())
    async with it.session.post(it.url + "/v1/completions", data=second) as response:
        assert response.status == 503
        assert "too many large" in (await response.json())["error"]["message"]
        assert response.headers["Retry-After"] == "1"
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    await until(lambda: it.proxy.running == 0)
    assert (await it.post(BODY))[0] == 200


@pytest.mark.cluster(bodies_mb=16)
async def test_small_bodies_of_unknown_length_take_no_more_than_they_have(it: Cluster) -> None:
    it.set_decodes(hangs=True)

    async def ask() -> int:
        kind = {"Content-Type": "application/json"}
        url = it.url + "/v1/completions"
        async with it.session.post(url, data=pieces(), headers=kind) as response:
            return response.status

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(BODY).encode()

    asked = [asyncio.create_task(ask()) for _ in range(40)]
    await until(lambda: it.proxy.running == 40 or any(one.done() for one in asked))
    it.set_decodes(hangs=False)
    assert await asyncio.gather(*asked) == [200] * 40


@pytest.mark.cluster(bodies_mb=16)
async def test_what_is_announced_and_not_sent_takes_nothing_from_others(it: Cluster) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 8388608\r\n\r\n"
    silent = []
    for _ in range(8):
        _, writer = await it.connect()
        writer.write(head)
        await writer.drain()
        silent.append(writer)
    await asyncio.sleep(0.1)
    assert (await it.post(BODY))[0] == 200
    for writer in silent:
        writer.close()


@pytest.mark.cluster(bodies_mb=16, largest_body_mb=4, connections=16)
async def test_no_address_holds_more_than_half_of_the_memory_or_of_the_connections(
    it: Cluster,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4194304\r\n\r\n"
    greedy = []
    for _ in range(3):
        reader, writer = await it.connect(local_addr=("127.0.0.2", 0))
        writer.write(head + b" " * 4_100_000)
        greedy.append((reader, writer))
    refused = [asyncio.create_task(reader.readline()) for reader, _ in greedy]
    await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
    told = [one.result() for one in refused if one.done()]
    assert len(told) == 1 and told[0].startswith(b"HTTP/1.1 503 ")
    assert (await it.post({**BODY, "user": "a" * 30_000}))[0] == 200
    for task in refused:
        task.cancel()
    for _, writer in greedy:
        writer.close()
    await until(lambda: it.listeners.connections <= 1)
    many = [await it.connect(local_addr=("127.0.0.3", 0)) for _ in range(10)]
    full = [await reader.readline() for reader, _ in many[8:]]
    assert all(line.startswith(b"HTTP/1.1 503 ") for line in full)
    assert (await it.post(BODY))[0] == 200
    for _, writer in many:
        writer.close()


async def test_idle_connections_do_not_shut_the_operator_out(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(connection, "_OPERATORS", 8)
    async with cluster(tokenizer) as it:
        host, port = it.listeners.admin.url.removeprefix("http://").split(":")
        async with asyncio.timeout(60):
            for sent in (b"", b"GET /admin/instances HTTP/1.1\r\nX-Slow: "):
                connected = [await asyncio.open_connection(host, int(port)) for _ in range(10)]
                for _, writer in connected[:8]:
                    writer.write(sent)
                for reader, _ in connected[8:]:
                    assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
                reader, writer = connected[0]
                with suppress(ConnectionError):
                    while not reader.at_eof():  # a byte of a header now and then
                        writer.write(b"x" if sent else b"")
                        await writer.drain()
                        with suppress(TimeoutError):
                            await asyncio.wait_for(reader.read(), 0.05)
                for reader, _ in connected[1:8]:
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
                for _, writer in connected:
                    writer.close()
                await asyncio.sleep(0.05)
            assert (await it.admin("GET", "instances"))[0] == 200


@pytest.mark.cluster(idle_seconds=0.5)
async def test_a_connection_without_a_request_is_closed(it: Cluster) -> None:
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: "):
        reader, writer = await it.connect()
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


async def test_a_body_that_cannot_be_decompressed_is_the_clients_fault(it: Cluster) -> None:
    damaged = gzip.compress(json.dumps(BODY).encode())[:-20] + b"x" * 20
    headers = {"Content-Encoding": "gzip", "Connection": "close"}
    for data in (b"no gzip", damaged):
        async with it.session.post(
            it.url + "/v1/completions", data=data, headers=headers
        ) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nowhere"])
@pytest.mark.parametrize("expects", ["100-continue", "\x80much"])
async def test_what_a_client_expects_is_answered(it: Cluster, path: str, expects: str) -> None:
    reader, writer = await it.connect()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: {expects}\r\n\r\n"
    writer.write(head.encode("latin-1"))
    first = await reader.readuntil(b"\r\n\r\n")
    if expects == "100-continue":
        assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        first = await reader.readuntil(b"\r\n\r\n")
        assert first.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
    else:
        assert first.startswith(b"HTTP/1.1 417")
        body = await reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", first)[0]))
        assert "100-continue" in json.loads(body)["error"]["message"]
    writer.close()


@pytest.mark.cluster(probe_seconds=60.0)
async def test_file_descriptors_that_run_out_are_nobodys_fault_but_ours(it: Cluster) -> None:
    async with it.session.get(it.url + "/health"):
        pass  # this connection is kept
    connector = it.proxy.cluster.upstream._session.connector
    assert isinstance(connector, aiohttp.TCPConnector)
    await until(lambda: not connector._conns)  # else one that is kept would serve
    await asyncio.sleep(0.2)  # both ends are closed now
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 30, limit[1]),
    )
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        status, answer, headers = await it.post(BODY)
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        await asyncio.sleep(1.2)  # then listeners that could not accept try again
    assert status == 503
    assert "too many connections" in answer["error"]["message"]
    assert headers["Retry-After"] == "1"
    assert it.in_service
    assert (await it.post(BODY))[0] == 200


@pytest.mark.cluster(prefill_seconds=1.0)
async def test_a_prefill_that_its_engine_has_lost_is_released_and_tried_again(it: Cluster) -> None:
    prefill = it.engines["prefill-0"]
    prefill.answers_late = True

    async def lose() -> None:
        for attempt in (1, 2):
            await until(lambda n=attempt: len(prefill.bodies) == n)
            await asyncio.sleep(1.0)  # it is known there first
            prefill.prefilling.clear()

    losing = asyncio.create_task(lose())
    await it.answered(5)
    await losing
    hops = [body["kv_transfer_params"]["headway"]["hop"] for body in prefill.bodies]
    assert hops == [0, 1], "a release of the first attempt spares the second"
    await until(lambda: not prefill.kept)


@pytest.mark.parametrize("how", ["answers 500", "does not listen"])
@pytest.mark.cluster(attempts=2, probe_seconds=60.0, pool_seconds=1.0)
async def test_a_prefill_that_no_decode_instance_takes_is_released(it: Cluster, how: str) -> None:
    for engine in it.decodes:
        if how == "answers 500":
            engine.fails = 500
        else:
            await engine.stop()
    status, _, _ = await it.post(BODY)
    assert status == 502 or (status == 503 and how == "does not listen")
    assert it.engines["prefill-0"].bodies
    await it.idle()
    for engine in it.decodes:
        if how != "answers 500":
            await engine.start()


async def test_a_proxy_that_ends_refuses_requests_and_says_so_in_streams_that_it_cuts(
    it: Cluster,
) -> None:
    cut: list[dict[str, Any]] = []

    async def at(tokens: int) -> None:
        if tokens == 5:
            await it.listeners.stop()
            async with kept.get(it.url + "/ready") as response:
                assert response.status == 503
                assert response.headers["Connection"] == "close"
            cutting.append(asyncio.create_task(it.proxy.cut()))

    cutting: list[asyncio.Task[None]] = []
    async with aiohttp.ClientSession() as kept:
        async with kept.get(it.url + "/health"):
            pass
        cut = await it.stream({"prompt": PROMPT, "max_tokens": 5000}, at)
    *passed, error = cut
    assert tokens_of(passed) == it.expected(len(tokens_of(passed)))
    assert error["error"]["code"] == 503
    assert "shutting down" in error["error"]["message"]
    await cutting[0]


async def test_the_operators_listener_wants_a_token_and_the_clients_has_no_such_thing(
    it: Cluster,
) -> None:
    async with it.session.post(it.url + "/admin/drain/decode-0") as response:
        assert response.status == 404
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xff"}):
        async with it.session.post(
            it.listeners.admin.url + "/admin/drain/decode-0", headers=headers
        ) as response:
            assert response.status == 401
    assert not it.proxy.cluster.instances["decode-0"].draining
    assert (await it.admin("POST", "drain/decode-0"))[0] == 200


@pytest.mark.parametrize("how", ["raises", "is slow"])
def test_a_policy_that_fails_is_replaced_for_a_while(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    now, computed = 0.0, 0.0
    view = crowded_view(3)
    policy = create_policy("round_robin")
    calls = 0

    class Failing(type(policy)):  # type: ignore[misc]
        def assign(self, view: ClusterView) -> Assignment:
            nonlocal calls, computed
            calls += 1
            computed += 0.3
            if how == "raises":
                raise ZeroDivisionError("scripted")
            return policy.assign(view)

    guarded = GuardedPolicy(Failing(), lambda: now, lambda: computed)
    by_load = create_policy("jsq_load").assign(view).instance.tolist()
    with caplog.at_level(logging.ERROR):
        first = guarded.assign(view)
    assert first == (by_load if how == "raises" else policy.assign(view).instance.tolist())
    (record,) = caplog.records
    assert "by least load instead" in record.getMessage()
    now = 29.0
    assert guarded.assign(view) == by_load
    assert calls == 1
    now = 31.0
    guarded.assign(view)
    assert calls == 2


async def test_a_client_that_leaves_as_it_is_refused_is_no_failure_of_ours(
    it: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*refusal: Any) -> None:
        raise ClientGoneError("Cannot write to closing transport")

    async def full(request: LiveRequest) -> None:
        raise RequestRefusedError(429, "64 requests wait already; try again later")

    monkeypatch.setattr(ClientAnswer, "fail", gone)
    monkeypatch.setattr(it.proxy, "forecast", full)
    with pytest.raises(aiohttp.ClientError):
        await it.post(BODY)
    assert "failed" not in caplog.text
