"""The answer to a client: a stream of events, or one document."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec
from aiohttp import web

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.chunk_joiner import ChunkJoiner
from rescheduler.openai.openai_request import MESSAGES, ClientRequest, error_body
from rescheduler.openai.openai_response import ResponseCollector
from rescheduler.openai.openai_stream import DONE, event

__all__ = ["ClientAnswer", "ClientGoneError"]

_EVENTS = "text/event-stream; charset=utf-8"
_SIGN_OF_LIFE = b": keep-alive\n\n"
_POLL_SECONDS = 0.05
_MARGIN = 16 << 10
"""Bytes that a slow client has to take before its deadline."""


def _error_event(path: str, body: bytes) -> bytes:
    """Return an error as the end of a stream.

    Clients of `/v1/messages` go by the names of events, and overlook one without.
    """
    if path != MESSAGES:
        return event(body) + event(DONE)
    read = msgspec.json.decode(body)
    error = read.get("error", read) if isinstance(read, dict) else {"message": str(read)}
    return b"event: error\n" + event(msgspec.json.encode({"type": "error", "error": error}))


class ClientGoneError(Exception):
    """Raised when the client has closed its connection, or has stopped reading."""


class ClientAnswer:
    """Writes what a request generates, in the shape that its client asked for.

    Nothing but comments is sent before the first chunk, and no comment for ``keep_alive_seconds``.
    What fails until then has an HTTP status of its own. A client that reads slowly has
    ``client_buffer_kb`` of its answer kept for it, and the engine goes on meanwhile; one that takes
    nothing for ``client_write_seconds`` is disconnected. All that writes raises `ClientGoneError`
    once nobody reads.

    Args:
        expected: returns the further headers of a stream that begins now.
        generated: returns how many tokens the request has, with the chunks that are taken now.

    Attributes:
        headers: of any answer, until it has begun.
        has_content: the client has got more of it than comments.
    """

    def __init__(
        self,
        http: web.Request,
        request: ClientRequest,
        headers: Mapping[str, str],
        options: ProxyOptions,
        expected: Callable[[], Mapping[str, str]] = dict,
        generated: Callable[[], int] = int,
    ) -> None:
        self._expected, self._generated = expected, generated
        self._joiner: ChunkJoiner | None = None
        if request.stream and request.movable and request.stream_interval > 1:
            self._joiner = ChunkJoiner(request.stream_interval)
        self.has_content = False
        self._streams, self._path = request.stream, request.path
        self._clock = asyncio.get_running_loop().time
        self._written = self._clock()
        self._http, self.headers = http, dict(headers)
        self._stream: web.StreamResponse | None = None
        self._events = self._ended = False
        self._writing, self._ending = asyncio.Lock(), False
        self._collector = None if request.stream else ResponseCollector(request)
        self._seconds = options.client_write_seconds
        if http.transport is not None:
            most = max(2 * _MARGIN, options.client_buffer_kb << 10)
            http.transport.set_write_buffer_limits(high=most, low=most - _MARGIN)

    @property
    def begun(self) -> bool:
        """Whether the client has got something, if only headers and a comment."""
        return self._stream is not None

    async def chunks(self, chunks: list[bytes]) -> None:
        """Take chunks, as JSON."""
        if self._collector is not None:
            for chunk in chunks:
                self._collector.add(chunk)
            return
        if self._joiner is not None:
            chunks = self._joiner.take(chunks, self._generated())
        if chunks:
            await self.write(b"".join(map(event, chunks)))

    async def write(self, data: bytes) -> None:
        """Send bytes of a stream of events."""
        self.has_content = True
        await self._write_events(data)

    async def keep_alive(self, seconds: float) -> None:
        """Send a comment whenever a stream has been silent for so many seconds, until cancelled.

        Whoever stands between the proxy and a client cuts silent connections after a minute or so.
        """
        with suppress(ClientGoneError):  # what writes the answer sees to that
            while not self._ending:
                left = self._written + seconds - self._clock()
                if left <= 0:
                    await self.comment(_SIGN_OF_LIFE)
                    left = seconds
                await asyncio.sleep(left)

    async def _write_events(self, data: bytes) -> None:
        self._events, self._written = True, self._clock()
        own = {"Content-Type": _EVENTS, "Cache-Control": "no-cache"}
        async with self._writing:
            await self._write(data, own if self.begun else {**self._expected(), **own})

    async def comment(self, data: bytes) -> None:
        """Send a comment between two events, unless one is being sent, or the end was."""
        if self._streams and not self._writing.locked() and not self._ending:
            await self._write_events(data)

    async def write_part(self, data: bytes, kind: str) -> None:
        """Send a part of a document, whose end is to follow."""
        self.has_content = True
        await self._write(data, {"Content-Type": kind})

    async def end(self) -> web.StreamResponse:
        """Return an answer all of which has been written."""
        self._ending = True
        async with self._writing:
            assert self._stream is not None
            await self._in_time(self._stream.write_eof())
        self._ended = True
        await self._flushed()
        return self._stream

    async def _write(self, data: bytes, headers: Mapping[str, str]) -> None:
        if self._stream is None:
            self._stream = web.StreamResponse(headers={**self.headers, **headers})
            await self._in_time(self._stream.prepare(self._http))
        await self._in_time(self._stream.write(data))

    async def finish(self) -> web.StreamResponse:
        """Return the whole answer."""
        if self._collector is not None:
            return await self.document(200, self._collector.response())
        self._ending = True
        rest = [] if self._joiner is None else self._joiner.rest()
        await self.write(b"".join(map(event, [*rest, DONE])))
        return await self.end()

    async def fail(
        self, status: int, body: bytes, retry_after: int | None = None
    ) -> web.StreamResponse:
        """Return an error: an HTTP status, or the last event of a stream that has begun.

        A document that has begun can only be broken off.
        """
        if self._stream is None:
            if retry_after is not None:
                self.headers["Retry-After"] = str(retry_after)
            return await self.document(status, body)
        if not self._events or self._ended:
            if self._http.transport is not None and not self._ended:
                self._http.transport.abort()
            return self._stream
        self._ending = True
        rest = [] if self._joiner is None else self._joiner.rest()
        await self.write(b"".join(map(event, rest)) + _error_event(self._path, body))
        return await self.end()

    async def fail_with(self, status: int, message: str) -> web.StreamResponse:
        """Return an error of the proxy's own."""
        return await self.fail(status, error_body(status, message))

    async def document(
        self, status: int, body: bytes, kind: str = "application/json"
    ) -> web.StreamResponse:
        """Send one document."""
        headers = {**self.headers, "Content-Type": kind}
        self._stream = web.Response(status=status, body=body, headers=headers)
        await self._in_time(self._stream.prepare(self._http))
        return await self.end()

    async def _flushed(self) -> None:
        """Wait until the client has taken what was kept for it, as long as it takes any."""
        loop, transport = asyncio.get_running_loop(), self._http.transport
        left, since, pause = -1, loop.time(), 0.0
        while transport is not None and not transport.is_closing():
            size = transport.get_write_buffer_size()
            if size == 0:
                return
            if size != left:
                left, since = size, loop.time()
            elif loop.time() - since > self._seconds:
                transport.abort()
                raise ClientGoneError(f"it has read nothing for {self._seconds:g} s")
            await asyncio.sleep(pause)
            pause = _POLL_SECONDS

    async def _in_time(self, written: Awaitable[object]) -> None:
        """Wait until bytes are written, or kept for the client."""
        try:
            async with asyncio.timeout(self._seconds):
                await written
        except TimeoutError as error:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ClientGoneError(f"it has read nothing for {self._seconds:g} s") from error
        except (ConnectionError, RuntimeError) as error:
            raise ClientGoneError(str(error)) from error
