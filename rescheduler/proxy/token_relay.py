"""The tokens of one engine's stream, on their way to the client."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import aiohttp
import msgspec
from aiohttp import web

from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.continued_text import ChunkJoiner
from rescheduler.openai.openai_request import MESSAGES, error_body
from rescheduler.openai.openai_response import ResponseCollector
from rescheduler.openai.openai_stream import DONE, Chunk, EventReader, event, read_chunk
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.guarded_policy import longest_prompt
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest, TokenArrival
from rescheduler.placement.prober import OutlierDetection
from rescheduler.placement.request_states import Frozen, Kept, Unanswered
from rescheduler.placement.stream_watch import Wait
from rescheduler.placement.upstream import UpstreamError, reported_error
from rescheduler.proxy.migrator import Migrator
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.tracing.span import Span

logger = logging.getLogger("headway.serve")

_SLOW_SECONDS = 0.25
"""For which tokens wait for a client that reads slowly."""
_WAITED_SECONDS = 1e-3
"""A write that takes longer has waited for its client: tokens may have gathered meanwhile."""

SeesTokens = Callable[[LiveRequest, TokenArrival, int, float], None]
"""Is told of tokens of a request as they come, how many, and when."""


@dataclass(slots=True, eq=False)
class EngineStream:
    """An engine's answer while it is read.

    Attributes:
        wait: for its next token.
        heard: an event has come that is no error.
        heard_at: when, on the loop's clock; infinite before.
        finished: the request's last token has come.
        progress: tokens that have come, or texts without them.
        held_back: its client has let it wait: its tokens came at the engine's pace, but are read
            at the client's.
        counts: the first and the last event that say how many tokens it has.
    """

    request: LiveRequest
    instance: InstanceState
    wait: Wait
    response: aiohttp.ClientResponse
    span: Span
    heard: bool = False
    finished: bool = False
    progress: int = 0
    heard_at: float = inf
    held_back: bool = False
    counts: list[bytes] = field(default_factory=list)


class TokenRelay:
    """Reads engines' streams and hands them on.

    Args:
        seen: is told of the tokens.
    """

    def __init__(
        self,
        cluster: Cluster[LiveRequest],
        outliers: OutlierDetection,
        migrator: Migrator,
        metrics: ProxyMetrics,
        seen: SeesTokens | None,
    ) -> None:
        self._seen = seen
        self._cluster = cluster
        self._outliers = outliers
        self._migrator = migrator
        self._metrics, self._options = metrics, cluster.deployment.proxy

    async def relay(self, stream: EngineStream, answer: "ClientAnswer") -> bool:
        """Hand a stream on; return whether the request has ended, or else goes on elsewhere.

        Comments and empty events are no progress. Comments are handed on all the same.

        Raises:
            UpstreamError: the engine failed.
            EngineRefusedError: the engine refuses the request as invalid.
        """
        loop, reader = asyncio.get_running_loop(), EventReader(longest_prompt([stream.instance]))
        async for data in stream.response.content.iter_any():
            passed: list[bytes] = []
            progress, finished = stream.progress, stream.finished
            try:
                for payload in reader.feed(data):
                    if payload == DONE:
                        continue
                    chunk = read_chunk(payload)
                    self._check(stream, chunk)
                    if (
                        chunk.finish_reason == "length"
                        and stream.request.may_be_frozen
                        and await self._frozen(stream, payload, chunk, passed)
                    ):
                        return self._stopped(stream, passed)
                    if self._pass_on(stream, payload, chunk, passed):
                        return True
            finally:
                # Also before an error: what is counted as generated must have been sent.
                if passed:
                    stream.request.client_blocks = stream.wait.paused = True  # while this waits
                    began = loop.time()
                    await answer.chunks(passed)
                    stream.request.client_blocks = stream.wait.paused = False
                    took = loop.time() - began
                    stream.wait.evidence.held(took)
                    stream.held_back = stream.held_back or took > _WAITED_SECONDS
                    if took > _SLOW_SECONDS:
                        stream.request.slow_client = True
            if reader.comments:
                with stream.wait.writing():
                    await answer.comment(b"".join(reader.comments))
            if stream.progress > progress or stream.finished > finished:
                stream.wait.progressed(loop.time(), self._options.token_seconds)
        if not stream.finished:
            raise UpstreamError(stream.instance.instance, "its stream ended before the request")
        return True

    def _pass_on(
        self, stream: EngineStream, payload: bytes, chunk: Chunk, passed: list[bytes]
    ) -> bool:
        """Take a chunk; return whether it ended the request though the engine goes on."""
        request, splicer = stream.request, stream.request.splicer
        if not stream.progress and not splicer.prompt_token_ids and (ids := chunk.prompt):
            request.prompt_tokens, request.prompt_is_known = len(ids), True
        tokens = splicer.new_tokens(chunk)
        if tokens:
            self._token(stream, tokens)
            self._check_length(stream, tokens)
        elif chunk.has_text and not chunk.token_ids:
            stream.progress += 1  # an engine that does not tell the tokens
        out = splicer.pass_on(payload, chunk)
        if out is not None:
            passed.append(out)
        stream.finished = stream.finished or chunk.finish_reason is not None
        return self._stopped(stream, passed)

    def _stopped(self, stream: EngineStream, passed: list[bytes]) -> bool:
        """Return whether a stop string ended the request, which its engine does not know of."""
        splicer = stream.request.splicer
        if not splicer.stopped:
            return False
        usage = splicer.usage()
        if usage is not None:
            passed.append(usage)
        return True

    def _check(self, stream: EngineStream, chunk: Chunk) -> None:
        """Raise if a chunk reports that the engine failed, or that the request is invalid."""
        instance = stream.instance.instance
        failed = chunk.error is not None or chunk.finish_reason in ("abort", "error")
        if failed and not stream.heard:
            stream.request.declined()
        stream.heard = True
        if chunk.error is not None:
            raise reported_error(instance, chunk.error)
        if failed:
            reason = f"it ended the request: {chunk.finish_reason}"
            raise UpstreamError(instance, reason, answered=True)

    def _check_length(self, stream: EngineStream, tokens: int) -> None:
        """Raise if tokens are more than the request may have: its engine does not stop."""
        request = stream.request
        known = request.splicer.prompt_token_ids
        limit = self._limit(request) if known else request.client.max_tokens
        if limit is not None and request.generated_tokens + tokens > max(1, limit):
            reason = f"it generates more than {limit} tokens"
            raise UpstreamError(stream.instance.instance, reason, answered=True)

    def _token(self, stream: EngineStream, tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        stream.progress += tokens
        arrival = stream.request.token(now)
        self._metrics.tokens.inc(tokens)
        if self._seen is not None:
            self._seen(stream.request, arrival, tokens, now)
        if arrival.first:
            self._outliers.succeeded(stream.request, stream.instance)
            stream.span.event("first token")
            self._cluster.dispatcher.began(stream.request, stream.instance)
        if arrival.waited is None:
            self._metrics.first(stream.request, now)
        elif arrival.landed:
            self._metrics.migration_gap.observe(arrival.waited)
        elif not arrival.first:
            gap = arrival.waited / max(1, tokens)
            self._metrics.token_gap.observe(gap)
            if not stream.held_back:
                self._cluster.step.took(gap)

    async def _frozen(
        self, stream: EngineStream, payload: bytes, chunk: Chunk, passed: list[bytes]
    ) -> bool:
        """Return whether a stream has ended by a freeze, so that its request goes on elsewhere."""
        request, splicer = stream.request, stream.request.splicer
        await request.freeze_answered()
        state = request.state
        if isinstance(state, Unanswered):
            limit = self._limit(request)
            if limit is None or request.generated_tokens + len(chunk.token_ids) >= limit:
                request.never_froze()
                return False
        elif not isinstance(state, Frozen):
            return False
        self._token(stream, len(chunk.token_ids))
        out = splicer.pass_on_frozen(payload, chunk)
        if out is not None:
            passed.append(out)
        if splicer.stopped:
            return True  # with its last token: it goes on nowhere, and is freed as it ends
        if isinstance(state, Frozen) and state.output_token_ids == tuple(splicer.output_token_ids):
            request.land()
            return True
        if isinstance(state, Frozen):
            logger.error(
                "request %s: %s reports %d tokens, the proxy has %d; computed again",
                request.id,
                state.move.source.name,
                len(state.output_token_ids),
                len(splicer.output_token_ids),
            )
        request.give_back()
        self._migrator.release(Kept(state.move.source, state.move.hop), request.id)
        return True

    def _limit(self, request: LiveRequest) -> int | None:
        """Return how many tokens a request may generate, as far as that is known."""
        limits = []
        if request.client.max_tokens is not None:
            limits.append(request.client.max_tokens)
        engine = request.instance.engine if request.instance else None
        if engine is not None:
            prompt = len(request.splicer.prompt_token_ids) or request.prompt_tokens
            limits.append(engine.max_model_len - prompt)
        return min(limits, default=None)


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

    Attributes:
        headers: of any answer, until it has begun.
        has_content: the client has got more of it than comments.
    """

    def __init__(
        self,
        http: web.Request,
        request: LiveRequest,
        headers: Mapping[str, str],
        options: ProxyOptions,
        expected: Callable[[], Mapping[str, str]],
    ) -> None:
        client = request.client
        self._request = request
        self._expected = expected
        self._joiner: ChunkJoiner | None = None
        if client.stream and client.movable and client.stream_interval > 1:
            self._joiner = ChunkJoiner(client.stream_interval)
        self.has_content = False
        self._streams, self._path = client.stream, client.path
        self._clock = asyncio.get_running_loop().time
        self._written = self._clock()
        self._http, self.headers = http, dict(headers)
        self._stream: web.StreamResponse | None = None
        self._events = self._ended = False
        self._writing, self._ending = asyncio.Lock(), False
        self._collector = None if client.stream else ResponseCollector(client)
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
            chunks = self._joiner.take(chunks, self._request.generated_tokens)
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
