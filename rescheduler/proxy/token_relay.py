"""The tokens of one engine's stream, on their way to the client."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from rescheduler.openai.openai_stream import DONE, Chunk, EventReader, read_chunk
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.cluster_state import longest_prompt
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest, TokenArrival
from rescheduler.placement.prober import OutlierDetection
from rescheduler.placement.request_state import Frozen, Kept, Unanswered
from rescheduler.placement.stream_watch import Wait
from rescheduler.placement.upstream import UpstreamError, reported_error
from rescheduler.proxy.migrator import Migrator
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.tracing.span import Span

__all__ = ["Comment", "EngineStream", "SeesTokens", "Send", "TokenRelay"]

logger = logging.getLogger("headway.serve")

_SLOW_SECONDS = 0.25
"""For which tokens wait for a client that reads slowly."""

Send = Callable[[list[bytes]], Awaitable[None]]
"""Hands chunks, as JSON, to the client."""
Comment = Callable[[bytes], Awaitable[None]]
"""Hands comments of a stream to the client."""
SeesTokens = Callable[[LiveRequest, TokenArrival, int, float], None]
"""Is told of tokens of a request as they come, how many, and when."""


@dataclass(slots=True, eq=False)
class EngineStream:
    """An engine's answer while it is read.

    Attributes:
        wait: for its next token.
        heard: an event has come that is no error.
        finished: the request's last token has come.
        progress: tokens that have come, or texts without them.
    """

    request: LiveRequest
    instance: InstanceState
    wait: Wait
    response: aiohttp.ClientResponse
    span: Span
    heard: bool = False
    finished: bool = False
    progress: int = 0


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
        seen: SeesTokens | None = None,
    ) -> None:
        self._seen = seen
        self._cluster, self._outliers, self._migrator = cluster, outliers, migrator
        self._metrics, self._options = metrics, cluster.deployment.proxy

    async def relay(self, stream: EngineStream, send: Send, comment: Comment | None = None) -> bool:
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
                    await send(passed)
                    stream.request.client_blocks = stream.wait.paused = False
                    took = loop.time() - began
                    stream.wait.evidence.held(took)
                    if took > _SLOW_SECONDS:
                        stream.request.slow_client = True
            if reader.comments and comment is not None:
                with stream.wait.writing():
                    await comment(b"".join(reader.comments))
            if stream.progress > progress or stream.finished > finished:
                stream.wait.progressed(loop.time(), self._options.token_seconds)
        if not stream.finished:
            raise UpstreamError(stream.instance.instance, "its stream ended before the request")
        return True

    def _pass_on(
        self, stream: EngineStream, payload: bytes, chunk: Chunk, passed: list[bytes]
    ) -> bool:
        """Take a chunk; return whether it ended the request though the engine goes on."""
        splicer = stream.request.splicer
        self._note_prompt(stream.request, chunk)
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

    def _note_prompt(self, request: LiveRequest, chunk: Chunk) -> None:
        """Take over how many tokens a prompt has, which the first chunk tells."""
        if not request.splicer.prompt_token_ids and (ids := chunk.prompt):
            request.prompt_tokens, request.prompt_is_known = len(ids), True

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
