"""The tokens of one engine's stream, on their way to the client."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.openai_stream import DONE, Chunk, EventReader, read_chunk
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.migrator import Migrator
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.proxy.upstream import EngineRefusedError, UpstreamError
from rescheduler.transfer.control_messages import ControlError

__all__ = ["EngineStream", "Resume", "Send", "TokenRelay"]

logger = logging.getLogger("headway.serve")

Send = Callable[[list[bytes]], Awaitable[None]]
"""Hands chunks, as JSON, to the client."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a frozen request goes on.

    Attributes:
        instance: to resume at.
        params: to pull the KV cache with; None: compute it again.
        source: where it was.
    """

    instance: InstanceState
    params: dict[str, Any] | None
    source: InstanceState


@dataclass(slots=True, eq=False)
class EngineStream:
    """An engine's answer while it is read.

    Attributes:
        request: whose it is.
        instance: that gives it.
        deadline: of the next token.
        response: with the events.
        finished: the request's last token has come.
    """

    request: LiveRequest
    instance: InstanceState
    deadline: asyncio.Timeout
    response: aiohttp.ClientResponse
    finished: bool = False


class TokenRelay:
    """Reads engines' streams and hands them on.

    Args:
        dispatcher: learns how long a decode step takes.
        migrator: releases what a source keeps in vain.
        metrics: counts tokens and times.
        options: deadlines.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        migrator: Migrator,
        metrics: ProxyMetrics,
        options: ProxyOptions,
    ) -> None:
        self._dispatcher, self._migrator = dispatcher, migrator
        self._metrics, self._options = metrics, options

    async def relay(self, stream: EngineStream, send: Send) -> Resume | None:
        """Hand a stream on; return where the request goes on, or None when it has ended.

        Raises:
            UpstreamError: the engine failed.
            EngineRefusedError: it says that the request is wrong.
        """
        loop, reader = asyncio.get_running_loop(), EventReader()
        async for data in stream.response.content.iter_any():
            stream.deadline.reschedule(None)  # a slow client is no engine's fault
            passed: list[bytes] = []
            try:
                for payload in reader.feed(data):
                    if payload == DONE:
                        continue
                    chunk = read_chunk(payload)
                    self._check(stream, chunk)
                    if chunk.finish_reason == "length" and stream.request.move is not None:
                        resume = await self._frozen(stream, payload, chunk, passed)
                        if resume is not None:
                            return resume
                    if self._pass_on(stream, payload, chunk, passed):
                        return None
            finally:
                # Also before an error: what is counted as generated must have been sent.
                if passed:
                    await send(passed)
            stream.deadline.reschedule(loop.time() + self._options.token_seconds)
        if not stream.finished:
            raise UpstreamError(stream.instance.instance, "its stream ended before the request")
        return None

    def _pass_on(
        self, stream: EngineStream, payload: bytes, chunk: Chunk, passed: list[bytes]
    ) -> bool:
        """Take a chunk; return whether it ended the request though the engine goes on."""
        splicer = stream.request.splicer
        if chunk.token_ids:
            self._token(stream, len(chunk.token_ids))
        out = splicer.pass_on(payload, chunk)
        if out is not None:
            passed.append(out)
        stream.finished = stream.finished or chunk.finish_reason is not None
        if not splicer.stopped:
            return False
        usage = splicer.usage()
        if usage is not None:
            passed.append(usage)
        return True

    def _check(self, stream: EngineStream, chunk: Chunk) -> None:
        """Refuse a chunk that says that the engine failed, or that the request is wrong."""
        instance = stream.instance.instance
        if chunk.error is not None:
            code = chunk.error.get("code")
            if isinstance(code, int) and 400 <= code < 500:
                raise EngineRefusedError(code, msgspec.json.encode({"error": chunk.error}))
            raise UpstreamError(instance, str(chunk.error.get("message")))
        if chunk.finish_reason in ("abort", "error"):
            raise UpstreamError(instance, f"it ended the request: {chunk.finish_reason}")

    def _token(self, stream: EngineStream, tokens: int) -> None:
        """Note that tokens came."""
        request, now = stream.request, asyncio.get_running_loop().time()
        self._metrics.tokens.inc(tokens)
        if not request.generating:
            request.generating, request.avoid = True, frozenset()
            stream.instance.breaker.succeeded()
            if request.prompt_tokens != len(request.splicer.prompt_token_ids) != 0:
                request.prompt_tokens = len(request.splicer.prompt_token_ids)
            if request.landing is not None:
                request.land(True)
                request.generated_at_move = request.generated_tokens
                self._metrics.migration_gap.observe(now - request.last_token)
        elif request.last_token:
            gap = (now - request.last_token) / tokens
            self._metrics.token_gap.observe(gap)
            self._dispatcher.step_took(gap)
        if not request.last_token:
            self._metrics.first_token.observe(now - request.arrived)
        request.last_token = now

    async def _frozen(
        self, stream: EngineStream, payload: bytes, chunk: Chunk, passed: list[bytes]
    ) -> Resume | None:
        """Return where a stream goes on whose end may be a freeze's, or None if it is its own."""
        request, splicer, move = stream.request, stream.request.splicer, stream.request.move
        assert move is not None
        params = None
        target = move.source
        try:
            frozen = await move.verdict
        except ControlError:
            limit = self._limit(request)
            if limit is None or request.generated_tokens + len(chunk.token_ids) >= limit:
                request.move = None
                return None
            frozen = None
        else:
            if frozen is None:
                request.move = None
                return None
        request.move = None
        self._token(stream, len(chunk.token_ids))
        out = splicer.pass_on_frozen(payload, chunk)
        if frozen is not None:
            if frozen.output_token_ids == splicer.output_token_ids:
                params, target = frozen.params, move.target
                request.kept_at, request.landing = move.source, move
            else:
                logger.error(
                    "request %s: %s says %d tokens, the proxy has %d; computed again",
                    request.id,
                    move.source.name,
                    len(frozen.output_token_ids),
                    len(splicer.output_token_ids),
                )
                self._migrator.release(move.source, request.id)
        if params is None:
            move.landed.set_result(False)
        if out is not None:
            passed.append(out)
        return Resume(target, params, move.source)

    def _limit(self, request: LiveRequest) -> int | None:
        """Return how many tokens a request may generate, as far as that is known."""
        limits = []
        if request.client.max_tokens is not None:
            limits.append(request.client.max_tokens)
        engine = request.instance.engine if request.instance else None
        if engine is not None:
            limits.append(engine.max_model_len - request.prompt_tokens)
        return min(limits, default=None)
