"""What anyone may send to the proxy: it is answered, and the next client is served."""

import asyncio
import gc
import gzip
import http.client
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import pytest
from fuzzing import damaged_bytes, fuzzed, json_text
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_cluster import PROMPT, cluster, tokens_of
from strict_engine import StrictEngine
from tokenizers import Tokenizer

from rescheduler.openai.openai_request import CHAT, COMPLETIONS, FORWARDED, NOT_SERVED
from rescheduler.serving import connection


class RawAnswer(NamedTuple):
    """One answer of a server: the body without its framing."""

    status: int
    body: bytes


def raw_request(method: bytes, path: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request."""
    lines = [method + b" " + path + b" HTTP/1.1", *(b": ".join(header) for header in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def exchange(url: str, sent: bytes) -> list[RawAnswer]:
    """Send bytes; return all answers until the server closes the connection.

    Raises:
        ValueError: what came is no HTTP.
    """
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(60):
            received = await reader.read()
    except ConnectionError:  # closed while there was more to send
        received = b""
    finally:
        writer.close()
    answers, stream = [], Received(received)
    while stream.tell() < len(received):
        answer = http.client.HTTPResponse(stream)  # type: ignore[arg-type]
        try:
            answer.begin()
            bodiless = sent.startswith(b"HEAD ") and stream.tell() == len(received)
            assert bodiless or answer.chunked or answer.length is not None, "a body without an end"
            body = b"" if bodiless else answer.read()
        except http.client.RemoteDisconnected:  # after 100 Continue
            break
        except (http.client.HTTPException, OSError) as error:
            raise ValueError(f"no answer of HTTP: {received[:200]!r}") from error
        if answer.status >= 200:
            answers.append(RawAnswer(answer.status, body))
    return answers


class Received(io.BytesIO):
    """What came on a connection, as `http.client` reads a socket; it stays open."""

    def makefile(self, mode: str) -> "Received":
        del mode
        return self

    def close(self) -> None:
        pass


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """Watch the running event loop: collect how long it computes without looking around.

    In seconds that the loop's thread computed, not in those that passed: other processes may take
    the processor away.
    """
    stalls = [0.0]

    async def tick() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            stalls.append(time.thread_time() - before)

    ticking = asyncio.create_task(tick())
    try:
        yield stalls
    finally:
        ticking.cancel()


BATCH = 50
LONGEST_STALL = 0.3
"""Seconds that the event loop computes; the clients and the engines run in it, too."""
SHORT = {"body_seconds": 0.3, "idle_seconds": 0.3, "pool_seconds": 0.5}
INTERNAL = (b"Traceback", b".py", b"127.0.0.1", b"site-packages", b"0x7f")
"""What no client should learn from an error."""
NAMES = (b"prefill-0", b"decode-0", b"decode-1")
"""What only the operator should learn."""

_COMMON = {
    "model": "m", "max_tokens": 3, "min_tokens": 1, "stream": True, "stop": ["never"], "n": 1,
    "stream_options": {"include_usage": True}, "logprobs": None, "request_id": "a-1",
    "priority": 3, "temperature": 0.5, "vllm_xargs": {"slo": 1},
}  # fmt: skip
_MESSAGES = [
    {"role": "user", "content": PROMPT},
    {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {**_COMMON, "prompt": PROMPT},
    CHAT: {**_COMMON, "messages": _MESSAGES, "tools": []},
    "/v1/responses": {"model": "m", "input": PROMPT, "max_output_tokens": 3, "background": False},
    "/v1/embeddings": {"model": "m", "input": [PROMPT, PROMPT]},
    "/tokenize": {"model": "m", "prompt": PROMPT},
}
PATHS = [*FORWARDED, *NOT_SERVED, "/v1/models", "/health", "/ready", "/metrics", "/nowhere"]
PATHS += ["/version", "/ping", "/v1/models/", "/tokenize/", "/nowhere/"]
JSON = (b"Content-Type", b"application/json")
METHODS = [*b"GET PUT DELETE OPTIONS HEAD PATCH TRACE".split(), b"GE\x00T", b""]
HEADERS = b"""Authorization X-Request-Id traceparent tracestate Content-Type Content-Encoding
    Content-Length Transfer-Encoding Accept-Encoding Connection Upgrade Expect Cookie Range
    Host""".split()
VALUES = [*b"gzip deflate br chunked close websocket 100-continue 5 -1".split(), b"9" * 30, b""]
VALUES += [b"application/json; charset=nonsense", b"Bearer \xff", b"\xc3\xa9"]


class Request:
    """Bytes for a connection; whole ones are valid HTTP, so that there has to be an answer."""

    def __init__(self, sent: bytes, whole: bool) -> None:
        self.sent, self.whole = sent, whole

    def __repr__(self) -> str:
        return f"Request({self.sent[:1000]!r}, {self.whole})"


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a body that is valid there, or damaged."""
    path = draw(st.sampled_from(sorted(BODIES)))
    large = draw(st.integers(0, 30))
    if large == 0:
        return path, draw(st.sampled_from(LARGE))
    return path, draw(json_text(BODIES[path]))


LARGE = [
    b'{"model": "m", "prompt": "' + b"a" * 1_000_000 + b'"}',
    b'{"model": "m", "prompt": [' + b"1," * 300_000 + b"1]}",
    b'{"model": "m", "messages": [' + b"{}," * 300_000 + b"{}]}",
    b'{"model": "m", "stop": [' + b'"a",' * 60_000 + b'"a"]}',
    b"{" + b",".join(b'"%d":1' % i for i in range(25_000)) + b"}",
    b"[" * 1_000_000,
    b'{"prompt":' + b"[" * 1_000_000,
    gzip.compress(b" " * 20_000_000),
]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request of which at most a few things are wrong."""
    path, body = draw(bodies())
    method, headers, whole = b"POST", [(b"Host", b"a"), JSON], True
    target = path.encode()
    if draw(st.integers(0, 9)) == 0:
        method = draw(st.sampled_from(METHODS) | st.just(b"POST"))
        target = draw(st.sampled_from([path.encode() for path in PATHS]) | st.binary(max_size=9))
        whole = method.isalpha() and target.startswith(b"/") and target.decode("l1").isprintable()
    packed = body.startswith(b"\x1f\x8b") or draw(st.integers(0, 9)) == 0
    if packed:
        body = body if body.startswith(b"\x1f\x8b") else gzip.compress(body)
        body = draw(st.just(body) | damaged_bytes(body[-200:]).map(lambda end: body[:-200] + end))
        headers.append((b"Content-Encoding", b"gzip"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        name = draw(st.sampled_from(HEADERS))
        value = draw(st.sampled_from(VALUES) | st.binary(max_size=12))
        headers.append((name, value))
        whole = False
    sent_body = body
    if draw(st.integers(0, 9)) == 0:
        headers.append((b"Transfer-Encoding", b"chunked"))
        cut = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:cut], body[cut:]) if part]
        sent_body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    else:
        headers.append((b"Content-Length", b"%d" % len(body)))
    sent = raw_request(method, target, headers) + sent_body
    if draw(st.integers(0, 19)) == 0:
        sent, whole = draw(damaged_bytes(sent[:2000])), False
    return Request(sent, whole)


@contextmanager
def no_errors_logged() -> Iterator[None]:
    """Fail where an error is logged with a traceback."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    logged = [f"{one.name}: {one.getMessage()}: {one.exc_info}" for one in records if one.exc_info]
    assert not logged


def assert_answered(request: Request, answers: list[RawAnswer], secret: tuple[bytes, ...]) -> None:
    assert answers or not request.whole, request
    for answer in answers:
        assert 200 <= answer.status < 600, request
        if answer.status >= 400 and (answer.body or not request.sent.startswith(b"HEAD ")):
            error = json.loads(answer.body)["error"]
            assert isinstance(error["message"], str), request
            assert isinstance(error["type"], str), request
            assert error["code"] == answer.status, request
            assert not [word for word in secret if word in answer.body], (request, answer.body)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> Iterator[None]:
    """What was imported and cached does not count as garbage that a stall is due to."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def sent(path: str, body: bytes, *headers: tuple[bytes, bytes]) -> Request:
    length = (b"Content-Length", b"%d" % len(body))
    head = raw_request(b"POST", path.encode(), [(b"Host", b"a"), JSON, *headers, length])
    return Request(head + body, whole=True)


GZIP = (b"Content-Encoding", b"gzip")
FOUND = [
    sent(COMPLETIONS, b"{}", (b"traceparent", b"\x12")),
    sent(COMPLETIONS, b"{}", (b"Host", b"b")),
    sent(COMPLETIONS, b"{}", (b"Expect", b"\xff")),
    sent(COMPLETIONS, b"{}", (b"Expect", b"much")),
    sent("/nowhere", gzip.compress(bytes(range(256)) * 9)[:-90] + b"x" * 90, GZIP),
    sent(COMPLETIONS, gzip.compress(b" " * 200_000_000), GZIP),
    Request(b"POST /tokenizeHTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", whole=False),
]
"""Requests that had a traceback logged, an answer that is not OpenAI's, or none.

The last one says no version of HTTP, and is answered in that of 0.9.
"""


@fuzzed(batch=BATCH)
@given(batch=st.lists(requests(), min_size=BATCH, max_size=BATCH))
@example(batch=FOUND)
async def test_every_client_is_answered_and_the_next_one_served(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, batch: list[Request]
) -> None:
    monkeypatch.setattr(connection, "CLEANUP_SECONDS", 0.2)  # else a damaged body takes 2 s
    async with cluster(tokenizer, kind=StrictEngine, **SHORT) as it:
        honest = {"prompt": PROMPT, "max_tokens": 5}
        assert tokens_of(await it.stream(honest)) == it.expected(5)
        with no_errors_logged():
            async with watched_loop() as stalls:
                answered = await asyncio.gather(*(exchange(it.url, one.sent) for one in batch))
            for request, answers in zip(batch, answered, strict=True):
                assert_answered(request, answers, INTERNAL + NAMES)
            assert tokens_of(await it.stream(honest)) == it.expected(5)
            await it.idle()
        assert max(stalls) < LONGEST_STALL


@st.composite
def operations(draw: st.DrawFn) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bool]:
    """A method, path and headers for the operator's listener, and whether the token is among them.

    What would drain an instance is not there: the next client is to be served.
    """
    what = draw(st.sampled_from([b"instances", b"drain/", b"undrain/decode-0", b"", b"drain/a/b"]))
    if what == b"drain/":
        what += draw(st.binary(max_size=8).filter(lambda name: not name.startswith(b"decode")))
    method = draw(st.sampled_from([b"POST", b"GET"]) | st.sampled_from(METHODS))
    name = draw(st.sampled_from([*HEADERS, b"Authorization"]))
    value = draw(st.sampled_from(VALUES) | st.binary(max_size=12))
    return method, b"/admin/" + what, [(name, value)] * draw(st.integers(0, 2)), draw(st.booleans())


@fuzzed(batch=BATCH)
@given(batch=st.lists(operations(), min_size=BATCH, max_size=BATCH))
async def test_the_operators_listener_answers_whoever_asks(
    tokenizer: Tokenizer, batch: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bool]]
) -> None:
    async with cluster(tokenizer, kind=StrictEngine, **SHORT) as it:
        token = (b"Authorization", f"Bearer {it.listeners.admin.token}".encode())
        asked = [
            Request(
                raw_request(method, path, [(b"Connection", b"close"), *headers, *[token][:knows]]),
                whole=False,
            )
            for method, path, headers, knows in batch
        ]
        with no_errors_logged():
            answered = await asyncio.gather(
                *(exchange(it.listeners.admin.url, one.sent) for one in asked)
            )
            for request, answers in zip(asked, answered, strict=True):
                secret = INTERNAL if token[1] in request.sent else INTERNAL + NAMES
                assert_answered(request, answers, secret)
                if token[1] not in request.sent:
                    assert all(answer.status >= 400 for answer in answers), request
            assert tokens_of(await it.stream({"prompt": PROMPT, "max_tokens": 5})) == it.expected(5)
