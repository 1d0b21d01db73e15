"""Requests that stay where they are placed: handed through as they are."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import aiohttp
import msgspec
from aiohttp import web

from rescheduler.openai.openai_request import ALWAYS_STREAM, EngineBodies
from rescheduler.openai.openai_response import read_usage
from rescheduler.openai.openai_stream import EventReader, event, read_signs
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.prober import OutlierDetection
from rescheduler.placement.stream_watch import StreamWatch, Wait
from rescheduler.placement.upstream import (
    EngineFullError,
    UpstreamError,
    reported_error,
)
from rescheduler.proxy.request_flow import RequestFlow
from rescheduler.proxy.token_relay import ClientAnswer, SeesTokens
from rescheduler.tracing.span import Span

_KEYED = "/v1/"
"""Paths for which engines ask for a key; others they answer to anybody."""

_EVENTS = "text/event-stream"
_LONG_ANSWER = 4_096  # tokens, where the client gives no limit
_HELD_BYTES = 8 << 20
"""Of an answer, until its client gets it: what fails before can start again elsewhere."""

Opening = Callable[[], Awaitable[aiohttp.ClientResponse]]


class PassThrough:
    """Takes a request to one decode instance, and its answer back byte for byte.

    If the instance fails before the client has got anything, the request starts again elsewhere;
    afterwards its client gets the error, since nobody knows where it stood. The client gets
    comments at most before the first event, which tells whether a request is served: the status of
    a stream does not.
    """

    def __init__(
        self,
        cluster: Cluster[LiveRequest],
        bodies: EngineBodies,
        outliers: OutlierDetection,
        watch: StreamWatch,
        flow: RequestFlow,
        seen: SeesTokens | None = None,
    ) -> None:
        self._seen = seen
        self._upstream, self._dispatcher = cluster.upstream, cluster.dispatcher
        self._accounts, self._step = cluster.accounts, cluster.step
        self._bodies = bodies
        self._outliers = outliers
        self._watch = watch
        self._flow = flow
        self._options = cluster.deployment.proxy

    async def run(self, request: LiveRequest, answer: ClientAnswer) -> web.StreamResponse:
        """Generate a request to its end; cancel it when the client leaves.

        Raises:
            ClientGoneError: the client has left.
            EngineRefusedError: an engine refuses the request as invalid.
            RequestRefusedError: no instance had room in time, or all turned it away.
            UpstreamError: too many attempts failed, or one after the client has got something.
        """
        try:
            await self._flow.prefill(request)
            failures = 0
            while True:
                instance = await self._flow.place(request)
                try:
                    with request.trace.call("decode", instance=instance.name) as span:
                        return await self._hand_through(request, instance, answer, span)
                except EngineFullError as error:
                    self._flow.turned_away(request, instance, error)
                except UpstreamError as error:
                    await self._flow.note_failure(request, instance, error)
                    failures += 1
                    if answer.has_content or self._flow.gives_up(request, failures):
                        raise
                    self._flow.free(request, request.fail(error.unsent, error.answered))
                    self._dispatcher.wake()
                    await self._flow.back_off(failures)
        finally:
            self._flow.leave(request)

    async def _hand_through(
        self, request: LiveRequest, instance: InstanceState, answer: ClientAnswer, span: Span
    ) -> web.StreamResponse:
        body = self._bodies.decode(request.client, request.id, request.hop, request.transfer_params)
        headers = span.headers(request.headers)
        opening = partial(self._open, request, instance, body, headers)
        try:
            given = self._stream if request.client.stream else self._whole
            response = await given(request, instance, opening, answer)
        except TimeoutError as error:
            raise UpstreamError(instance.instance, "no end to its answer in time") from error
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UpstreamError(instance.instance, reason) from error
        self._outliers.succeeded(request, instance)
        return response

    async def _open(
        self,
        request: LiveRequest,
        instance: InstanceState,
        body: bytes,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        path = request.client.path
        response = await self._upstream.open(instance.instance, path, body, headers)
        request.accepted()
        if path.startswith(_KEYED):
            self._accounts.keys.served(request.headers)
        return response

    async def _stream(
        self, request: LiveRequest, instance: InstanceState, opening: Opening, answer: ClientAnswer
    ) -> web.StreamResponse:
        patience = self._options.first_token_seconds
        async with (
            self._watch.over(request, instance, patience) as wait,
            await opening() as response,
        ):
            if response.content_type != _EVENTS:
                return await self._document(request, wait, response, answer)
            try:
                failed = await self._relay(request, instance, response, wait, answer)
            finally:
                self._count_chunks(request)
        ended = await answer.end()
        if failed:
            raise UpstreamError(instance.instance, "its stream ends with an error", answered=True)
        return ended

    async def _relay(
        self,
        request: LiveRequest,
        instance: InstanceState,
        response: aiohttp.ClientResponse,
        wait: Wait,
        answer: ClientAnswer,
    ) -> bool:
        """Write a stream to the client as it comes, and nothing but comments before an event.

        Returns:
            Whether it reports an error later.

        Raises:
            EngineRefusedError: its first event refuses the request as invalid.
            UpstreamError: its first event reports another error, none comes, or the stream ends
                without its end.
        """
        loop, reader = asyncio.get_running_loop(), EventReader()
        held, heard, failed, ended = bytearray(), False, False, False
        async for data in response.content.iter_any():
            signs = [read_signs(event) for event in reader.feed(data)]
            if not heard:
                held += data
                if len(held) > _HELD_BYTES:
                    raise UpstreamError(instance.instance, "no event within its first bytes")
                if signs and signs[0].error is not None:
                    request.declined()
                    raise reported_error(instance.instance, signs[0].error)
                if not signs and reader.comments:
                    with wait.writing():
                        await answer.comment(b"".join(reader.comments))
                    held = bytearray(reader.rest)
                heard, data = bool(signs), bytes(held)
            tokens = sum(sign.output for sign in signs)
            if tokens:
                now = loop.time()
                arrival = request.untracked_tokens(tokens, now)
                if self._seen is not None:
                    self._seen(request, arrival, tokens, now)
                wait.progressed(now, self._options.token_seconds)
            failed = failed or any(sign.error is not None for sign in signs)
            ended = ended or any(sign.ends and not request.several for sign in signs)
            ended = ended or any(sign.last for sign in signs)
            if heard:
                with wait.writing():
                    await answer.write(data)
        if not heard:
            raise UpstreamError(instance.instance, "its stream ended before its first event")
        if not ended and not failed and request.client.path in ALWAYS_STREAM:
            raise UpstreamError(instance.instance, "its stream ended before the request")
        return failed

    def _count_chunks(self, request: LiveRequest) -> None:
        """Count a stream of several tokens a chunk as what its chunks may have held."""
        interval = request.client.stream_interval
        if interval > 1:
            self._count(request, float(request.generated_tokens) * interval)

    def _count(self, request: LiveRequest, generated: float) -> None:
        """Charge a request for as many tokens, but no more than its client allows."""
        counted, client = request.generated_tokens, request.client
        most = (client.max_tokens or _LONG_ANSWER) * client.answers
        more = max(min(generated, most) - counted, 0.0)
        request.counted = self._accounts.service(request, more)

    async def _whole(
        self, request: LiveRequest, instance: InstanceState, opening: Opening, answer: ClientAnswer
    ) -> web.StreamResponse:
        """Hand on an answer that comes as a whole, as late as it likes while its engine has it."""
        patience, clock = self._options.first_token_seconds, asyncio.get_running_loop().time
        began = clock()
        try:
            async with (
                self._watch.over(request, instance, patience, streams=False) as wait,
                await opening() as response,
            ):
                return await self._document(request, wait, response, answer)
        finally:
            if request.counted is None:  # such as of a client that has left
                steps = (clock() - began) / self._step.seconds
                self._count(request, steps * request.answers)

    async def _document(
        self,
        request: LiveRequest,
        wait: Wait,
        response: aiohttp.ClientResponse,
        answer: ClientAnswer,
    ) -> web.StreamResponse:
        """Hand on a document: as a whole if it is not too large to be kept until then.

        Once begun, it must end in time, however many bytes still arrive.
        """
        kind = response.headers.get("Content-Type", "application/json")
        held, reading = bytearray(), response.content.iter_any()
        loop, left = asyncio.get_running_loop(), self._options.first_token_seconds
        while True:
            began = loop.time()
            async with asyncio.timeout(left):
                part = await anext(reading, None)
            left -= loop.time() - began  # a slow client is not the engine's fault
            wait.progressed(loop.time(), self._options.token_seconds)
            if part is None:
                break
            held += part
            if len(held) > _HELD_BYTES or answer.has_content:
                with wait.writing():
                    await answer.write_part(bytes(held), kind)
                held.clear()
        with wait.writing():
            if answer.has_content:
                return await answer.end()
            usage = read_usage(held)
            if usage is not None:
                request.was_counted(*usage)
            if answer.begun:  # comments have begun a stream, which the engine did not give
                await answer.write(event(bytes(held)))
                return await answer.end()
            return await answer.document(200, bytes(held), kind)
