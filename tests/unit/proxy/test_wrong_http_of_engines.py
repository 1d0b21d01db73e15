"""Engines whose HTTP is wrong: its framing, its headers, or more of it than was asked for."""

import asyncio
import json
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
from scripted_cluster import OPTIONS, PROMPT, served
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.placement.upstream import EngineFullError, Upstream, UpstreamError

BODY = (
    b'{"id":"a","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":""}'
    b'],"usage":{"prompt_tokens":3},"kv_transfer_params":{"a":1}}'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SECONDS = 1.0
MEMORY = 8 << 20


class Wrong(NamedTuple):
    """What an engine answers.

    Attributes:
        first: at once.
        forever: again and again then.
        closes: the connection.
        begins: there is a status and all headers, or an error in them.
    """

    first: bytes
    forever: bytes = b""
    closes: bool = False
    begins: bool = True


WRONG = {
    "longer than its body": Wrong(HEAD + b"Content-Length: 5000\r\n\r\n" + BODY, closes=True),
    "longer, and stays": Wrong(HEAD + b"Content-Length: 5000\r\n\r\n" + BODY),
    "an error longer than its body": Wrong(
        b"HTTP/1.1 500 Error\r\nContent-Length: 5000\r\n\r\n" + BODY
    ),
    "shorter than its body": Wrong(HEAD + b"Content-Length: 5\r\n\r\n" + BODY),
    "of nothing": Wrong(HEAD + b"Content-Length: 0\r\n\r\n" + BODY),
    "negative": Wrong(HEAD + b"Content-Length: -5\r\n\r\n" + BODY),
    "signed": Wrong(HEAD + b"Content-Length: +5\r\n\r\n" + BODY),
    "beyond 64 bits": Wrong(HEAD + b"Content-Length: " + b"9" * 25 + b"\r\n\r\n" + BODY),
    "of 5000 digits": Wrong(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + BODY),
    "doubled": Wrong(HEAD + LENGTH + LENGTH + b"\r\n" + BODY),
    "doubled, and different": Wrong(HEAD + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY),
    "listed": Wrong(HEAD + b"Content-Length: 5, 6\r\n\r\n" + BODY),
    "beside chunks": Wrong(HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "missing, and stays": Wrong(HEAD + b"\r\n" + BODY),
    "a header of a megabyte": Wrong(HEAD + b"X: " + bytes(1 << 20) + b"\r\n\r\n"),
    "a name of a megabyte": Wrong(HEAD + b"X" * (1 << 20) + b": a\r\n" + LENGTH + b"\r\n" + BODY),
    "10,000 headers": Wrong(HEAD + b"X: a\r\n" * 10_000 + LENGTH + b"\r\n" + BODY),
    "headers that never end": Wrong(HEAD, b"X: " + b"a" * 1000 + b"\r\n"),
    "a header that never ends": Wrong(HEAD + b"X: ", b"a" * 10_000),
    "a status that never ends": Wrong(b"HTTP/1.1 200 ", b"a" * 10_000),
    "100 for ever": Wrong(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, begins=False),
    "103 for ever": Wrong(
        b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100, begins=False
    ),
    "a chunk without end": Wrong(CHUNKED + b"fffffffffffffff\r\n" + BODY, closes=True),
    "a chunk beyond 64 bits": Wrong(CHUNKED + b"f" * 40 + b"\r\n" + BODY),
    "a negative chunk": Wrong(CHUNKED + b"-5\r\n" + BODY),
    "a chunk's size that never ends": Wrong(CHUNKED, b"0" * 10_000),
    "a chunk's extension that never ends": Wrong(CHUNKED + b"5;a=", b"a" * 10_000),
    "trailers that never end": Wrong(CHUNKED + b"0\r\n", b"X: " + b"a" * 1000 + b"\r\n"),
    "a status of five digits": Wrong(b"HTTP/1.1 20000 OK\r\n" + LENGTH + b"\r\n" + BODY),
    "another protocol": Wrong(b"HTTP/2 200 OK\r\n" + LENGTH + b"\r\n" + BODY),
    "no HTTP": Wrong(b"\x00\x01\x02\r\n\r\n"),
    "a zero byte in a header": Wrong(HEAD + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY),
}
HARMLESS = {
    "trailers": CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nX: a\r\n\r\n",
    "one 100": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + LENGTH + b"\r\n" + BODY,
    "no UTF-8": HEAD + b"X: \xff\xfe\r\n" + LENGTH + b"\r\n" + BODY,
    "a broken cookie": HEAD + b"Set-Cookie: a\x01=;;=\r\n" + LENGTH + b"\r\n" + BODY,
}


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Answer, host: str) -> AsyncIterator[str]:
    """The address of a server that answers so, with its connections closed at the end."""
    connections: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await answer(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, host, 0)
    try:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.sleep(0.01)  # what is being accepted is closed as well
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # what is aborted is closed by the next turn of the loop


@asynccontextmanager
async def engine(wrong: Wrong) -> AsyncIterator[Instance]:
    """An engine that is healthy, and answers everything else wrongly."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(wrong.first)
            while wrong.forever:
                await writer.drain()
                writer.write(wrong.forever)
                await asyncio.sleep(0)
            if not wrong.closes:
                await reader.read()

    async with answering(answer, "127.0.0.1") as url:
        yield Instance("wrong", "decode", url)


@pytest.fixture
async def asks() -> AsyncIterator[Upstream]:
    """What asks engines."""
    made = Upstream(msgspec.structs.replace(OPTIONS, control_seconds=SECONDS / 4))
    yield made
    await made.close()


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer, *instances: Instance
) -> AsyncIterator[aiohttp.ClientSession]:
    """A proxy before engines, none of which is waited for long."""
    options = msgspec.structs.replace(
        OPTIONS,
        first_token_seconds=SECONDS,
        token_seconds=SECONDS,
        control_seconds=SECONDS,
        attempts=3,
    )
    policy = {"name": "round_robin"}
    deployment = Deployment(model="m", instances=[*instances], routing=policy, proxy=options)
    async with (
        served(deployment, tokenizer) as (_, listeners),
        aiohttp.ClientSession(listeners.url) as session,
    ):
        yield session


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_answer_is_a_failure_of_its_engine(asks: Upstream, name: str) -> None:
    async with engine(WRONG[name]) as instance:
        tracemalloc.start()
        try:
            with pytest.raises((UpstreamError, TimeoutError)):  # who waits sets the bound
                async with asyncio.timeout(SECONDS / 4):
                    await asks.prefill(instance, "/v1/completions", b"{}", {})
            with pytest.raises(UpstreamError):
                await asks.get(instance, "/v1/models")
            assert tracemalloc.get_traced_memory()[1] < MEMORY
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_answer_costs_no_request_that_another_engine_can_serve(
    name: str, tokenizer: Tokenizer
) -> None:
    good = ScriptedEngine("good", "decode", tokenizer, {})
    try:
        async with (
            engine(WRONG[name]) as wrong,
            serving(tokenizer, wrong, await good.start()) as session,
        ):

            async def ask(**more: Any) -> None:
                body = {"model": "m", "prompt": PROMPT, "max_tokens": 3, **more}
                async with session.post("/v1/completions", json=body) as response:
                    told = await response.read()
                    assert response.status == 200, told
                    if not more.get("stream"):
                        assert len(json.loads(told)["choices"]) == more.get("n", 1)
                    elif "n" not in more:
                        assert b'"error"' not in told
                    else:  # what the wrong engine has begun to say, its client has got
                        assert told.endswith(b"data: [DONE]\n\n")

            kinds: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 2, "stream": True}]
            if WRONG[name].begins:
                kinds.append({"n": 2})  # else it may take as long as it likes
            await asyncio.gather(*(ask(**kind) for kind in kinds for _ in range(2)))
    finally:
        await good.stop()


@pytest.mark.parametrize("name", ["longer, and stays", "an error longer than its body"])
async def test_the_rest_of_an_answer_that_has_begun_is_not_waited_for_without_end(
    name: str, tokenizer: Tokenizer
) -> None:
    async with engine(WRONG[name]) as wrong, serving(tokenizer, wrong) as session:
        body = {"model": "m", "prompt": PROMPT, "n": 2}
        async with asyncio.timeout(60), session.post("/v1/completions", json=body) as response:
            assert response.status == 502


@pytest.mark.parametrize("name", HARMLESS)
async def test_what_is_only_unusual_is_taken(asks: Upstream, name: str) -> None:
    async with engine(Wrong(HARMLESS[name])) as instance:
        assert await asks.prefill(instance, "/v1/completions", b"{}", {}) == ({"a": 1}, 3)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("9" * 5000, 1), ("9" * 7, 3600), ("7", 7), ("²", 1), ("-1", 1), ("soon", 1), ("", 1)],
)
async def test_an_engine_that_is_full_may_say_anything_of_how_long(
    asks: Upstream, said: str, seconds: int
) -> None:
    headers = f"Retry-After: {said}\r\nContent-Length: 2\r\n\r\n{{}}"
    full = Wrong(f"HTTP/1.1 429 Full\r\n{headers}".encode())
    async with engine(full) as instance:
        with pytest.raises(EngineFullError) as caught:
            await asks.open(instance, "/v1/completions", b"{}", {})
        assert caught.value.seconds == seconds


@asynccontextmanager
async def numbering_engine(more: bytes) -> AsyncIterator[tuple[Instance, list[bytes]]]:
    """An engine that numbers its answers, and says more after each; with the heads it has got."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            body = b"answer %d" % len(heads)
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(body)
            cookie = b"Set-Cookie: client=%d; Path=/\r\n\r\n" % len(heads)
            writer.write(head + cookie + body)
            await asyncio.sleep(0.02)  # the answer is taken for whole by then
            writer.write(more)

    async with answering(answer, "localhost") as url:
        yield Instance("numbers", "decode", url), heads


@pytest.mark.parametrize("more", [HEAD + LENGTH + b"\r\n" + BODY, b"garbage", b"HTTP/1.1 2"])
async def test_what_was_not_asked_for_is_nobodys_answer(asks: Upstream, more: bytes) -> None:
    async with numbering_engine(more) as (instance, heads):
        for number in range(1, 5):
            assert await asks.get(instance, "/v1/models") == b"answer %d" % number
            await asyncio.sleep(0.1)
        assert len(heads) == 4


async def test_no_client_gets_the_cookie_that_an_engine_gave_to_another(asks: Upstream) -> None:
    async with numbering_engine(b"") as (instance, heads):
        for _ in range(3):
            await asks.get(instance, "/v1/models")
        assert not any(b"cookie:" in head.lower() for head in heads)


@asynccontextmanager
async def breaking_engine(
    answers: int, how: Callable[[asyncio.StreamWriter], None]
) -> AsyncIterator[tuple[Instance, list[int]]]:
    """An engine that breaks a connection at the request after so many; with the requests of each.

    A connection is broken once, the third one serves.
    """
    requests: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(0)
        at = len(requests) - 1
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            requests[at] += 1
            if requests[at] > answers and at < 2:
                return how(writer)
            writer.write(HEAD + LENGTH + b"\r\n" + BODY)

    async with answering(answer, "127.0.0.1") as url:
        yield Instance("breaks", "decode", url), requests


def resets(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@pytest.mark.parametrize("how", [asyncio.StreamWriter.close, resets])
async def test_a_kept_connection_that_its_engine_closes_costs_no_request(
    asks: Upstream, how: Callable[[asyncio.StreamWriter], None]
) -> None:
    async with breaking_engine(1, how) as (instance, requests):
        for _ in range(3):
            assert await asks.prefill(instance, "/v1/completions", b"{}", {}) == ({"a": 1}, 3)
        assert requests == [2, 1, 1], "what met a closed connection was sent again, on a new one"


@pytest.mark.parametrize("how", [asyncio.StreamWriter.close, resets])
async def test_a_request_that_breaks_its_own_connection_is_sent_once(
    asks: Upstream, how: Callable[[asyncio.StreamWriter], None]
) -> None:
    async with breaking_engine(0, how) as (instance, requests):
        with pytest.raises(UpstreamError):
            await asks.prefill(instance, "/v1/completions", b"{}", {})
        assert requests == [1], "it may be what killed the engine"
