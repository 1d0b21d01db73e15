"""HTTP as bytes: what no client library would send, and all that comes back."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

_HEAD = re.compile(rb"HTTP/(?:0\.9|1\.[01]) (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")


class RawAnswer(NamedTuple):
    """One answer of a server: headers by names in lower case, the body without its framing."""

    status: int
    headers: dict[str, str]
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
    answers = []
    while received:
        answer, received = _answer(received, may_lack_body=sent.startswith(b"HEAD "))
        if answer.status >= 200:
            answers.append(answer)
    return answers


def _answer(received: bytes, may_lack_body: bool) -> tuple[RawAnswer, bytes]:
    head = _HEAD.match(received)
    if head is None:
        raise ValueError(f"no answer of HTTP: {received[:200]!r}")
    status, rest = int(head[1]), received[head.end() :]
    lines = head[2].decode("utf-8").splitlines()
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if (may_lack_body and not rest) or status in (204, 304) or status < 200:
        return RawAnswer(status, headers, b""), rest
    if headers.get("transfer-encoding") == "chunked":
        body, rest = _unchunked(rest)
    else:
        length = int(headers["content-length"])
        if len(rest) < length:
            raise ValueError(f"{length} bytes of a body were said, {len(rest)} came")
        body, rest = rest[:length], rest[length:]
    return RawAnswer(status, headers, body), rest


def _unchunked(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, found, rest = rest.partition(b"\r\n")
        if not found:
            raise ValueError("the chunks do not end")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
        if length == 0:
            return body, rest


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
