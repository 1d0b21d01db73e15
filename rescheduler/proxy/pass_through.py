"""Requests that stay where they are placed: handed through as they are."""

import asyncio
from collections.abc import Mapping

import aiohttp
from aiohttp import web

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.engine_body import EngineBodies
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placer import Placer
from rescheduler.proxy.client_answer import ClientAnswer
from rescheduler.proxy.outlier_detection import OutlierDetection
from rescheduler.proxy.request_flow import RequestFlow
from rescheduler.proxy.upstream import EngineFullError, Upstream, UpstreamError
from rescheduler.tracing.span import Span

__all__ = ["PassThrough"]


class PassThrough:
    """Takes a request to one decode instance, and its answer back byte for byte.

    If the instance fails before the client has got anything, the request starts again elsewhere;
    afterwards its client gets the error, since nobody knows where it stood.

    Args:
        flow: of the requests that move, for what is the same.
        upstream: connections to the engines.
        bodies: writes what they are asked.
        dispatcher: chooses the instance.
        outliers: learns which instances serve, and which do not.
        options: deadlines and attempts.
    """

    def __init__(
        self,
        flow: RequestFlow,
        upstream: Upstream,
        bodies: EngineBodies,
        dispatcher: Placer,
        outliers: OutlierDetection,
        options: ProxyOptions,
    ) -> None:
        self._flow, self._upstream, self._bodies = flow, upstream, bodies
        self._dispatcher, self._outliers, self._options = dispatcher, outliers, options

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
                    self._outliers.failed(request, instance, error)
                    failures += 1
                    if answer.begun or self._flow.gives_up(request, failures):
                        raise
                    self._flow.free(request, request.fail(error.unsent))
                    self._dispatcher.wake()
                    await self._flow.back_off(failures)
        finally:
            self._flow.leave(request)

    async def _hand_through(
        self, request: LiveRequest, instance: InstanceState, answer: ClientAnswer, span: Span
    ) -> web.StreamResponse:
        body = self._bodies.decode(request.client, request.id, request.hop, request.transfer_params)
        headers = span.headers(request.headers)
        response: web.StreamResponse
        try:
            if request.client.stream:
                await self._relay(request, instance, body, headers, answer)
                response = await answer.finish_raw()
            else:
                whole = await self._whole(request, instance, body, headers)
                response = await answer.document(200, whole)
        except TimeoutError as error:
            raise UpstreamError(instance.instance, "no token in time") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UpstreamError(instance.instance, reason) from error
        self._outliers.succeeded(request, instance)
        return response

    async def _relay(
        self,
        request: LiveRequest,
        instance: InstanceState,
        body: bytes,
        headers: Mapping[str, str],
        answer: ClientAnswer,
    ) -> None:
        """Write a stream to the client as it comes."""
        options, loop = self._options, asyncio.get_running_loop()
        async with asyncio.timeout(options.first_token_seconds) as time:
            response = await self._open(request, instance, body, headers)
            try:
                async for data in response.content.iter_any():
                    time.reschedule(None)  # a slow client is not the engine's fault
                    request.untracked_tokens(data.count(b"data: "), loop.time())
                    await answer.write(data)
                    time.reschedule(loop.time() + options.token_seconds)
            finally:
                response.close()

    async def _whole(
        self,
        request: LiveRequest,
        instance: InstanceState,
        body: bytes,
        headers: Mapping[str, str],
    ) -> bytes:
        """Return an answer that comes as a whole.

        That may take as long as it likes, while its instance is in service.
        """

        async def read() -> bytes:
            async with await self._open(request, instance, body, headers) as response:
                return await response.read()

        reading = asyncio.create_task(read())
        try:
            while not (await asyncio.wait([reading], timeout=self._options.probe_seconds))[0]:
                if not instance.breaker.closed:
                    raise UpstreamError(instance.instance, "out of service before its answer")
            return reading.result()
        finally:
            reading.cancel()

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
        return response
