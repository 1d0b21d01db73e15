"""The proxy's HTTP endpoints."""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.body_memory import BodyMemory, KeptBody, client_of
from rescheduler.openai.openai_request import (
    ALWAYS_STREAM,
    CHAT,
    COMPLETIONS,
    FORWARDED,
    NOT_SERVED,
    UNREADABLE,
    ClientRequest,
    RequestRefusedError,
    given_name,
)
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.account import Account
from rescheduler.placement.instance_state import MODELS, differing_models, merged_models
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.upstream import EngineRefusedError, UpstreamError
from rescheduler.proxy.finish_reports import FinishReports, refuse_promises
from rescheduler.proxy.proxy import Proxy
from rescheduler.proxy.token_relay import ClientAnswer, ClientGoneError
from rescheduler.serving.connection import AllowedOrigins, answer_errors, monitoring_routes
from rescheduler.serving.turnstile import Turnstile

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(http: web.Request, kept: KeptBody, options: ProxyOptions) -> list[bytes]:
    """Return the parts of a body, as they were sent.

    Raises:
        RequestRefusedError: 400, it is broken; 408, it came too slowly; 413, it is too large;
            415, it is compressed in another way than gzip's or zlib's; 503, there is no memory.
    """
    seconds = options.body_seconds
    if _encoding(http) not in ("", *_WINDOW_BITS):
        raise RequestRefusedError(415, "a body may be compressed as gzip or deflate only")
    parts = []
    try:
        async with asyncio.timeout(seconds):
            async for part in http.content.iter_any():
                kept.grow(len(part))
                parts.append(part)
    except TimeoutError:
        raise RequestRefusedError(408, f"the body took more than {seconds:g} s") from None
    except web.RequestPayloadError as error:
        raise RequestRefusedError(400, "the body is incomplete or damaged") from error
    return parts


def unpacked(http: web.Request, parts: list[bytes], kept: KeptBody, options: ProxyOptions) -> bytes:
    """Return a body.

    Raises:
        RequestRefusedError: 400, it is broken; 413, it is too large; 503, there is no memory.
    """
    raw, encoding = b"".join(parts), _encoding(http)
    if encoding:
        raw = _unpacked(raw, encoding, options.largest_body_mb << 20)
        kept.be(len(raw))
    return raw


def _unpacked(packed: bytes, encoding: str, most: int) -> bytes:
    """Return what a compressed body holds, or a little more than the largest body.

    A kilobyte can hold a megabyte: what is too large is not unpacked to its end.
    """
    unpacking = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        raw = unpacking.decompress(packed, most + 1)
    except zlib.error as error:
        raise RequestRefusedError(400, "the body is incomplete or damaged") from error
    if len(raw) <= most and not unpacking.eof:
        raise RequestRefusedError(400, "the body is incomplete or damaged")
    return raw


def _encoding(http: web.Request) -> str:
    encoding = http.headers.get("Content-Encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


logger = logging.getLogger("headway.serve")

CLIENTS_SHARE = 0.5
"""Of the memory of bodies, and of the connections, for one client's address."""
_PASSED_ON = ("Authorization", "traceparent", "tracestate")


def http_app(proxy: Proxy) -> web.Application:
    """Return the application: OpenAI's endpoints, health and metrics."""
    endpoints, options = _Endpoints(proxy), proxy.deployment.proxy
    origins = AllowedOrigins(options.allowed_origins)
    app = web.Application(
        client_max_size=options.largest_body_mb << 20,
        middlewares=[origins.answer_preflight, answer_errors, _without_slash],
    )
    app.on_response_prepare.extend([endpoints.close_when_ending, origins.allow])
    app.add_routes(
        [
            web.post(COMPLETIONS, endpoints.generate),
            web.post(CHAT, endpoints.generate),
            *(web.post(path, endpoints.generate) for path in FORWARDED),
            *(web.route("*", path, endpoints.not_served) for path in NOT_SERVED),
            web.get(MODELS, endpoints.models),
            web.get("/version", endpoints.passed_on),
            web.get("/ping", endpoints.ping),
            web.post("/ping", endpoints.ping),
            *monitoring_routes(lambda: proxy.ready, proxy.metrics.text),
        ]
    )
    return app


@web.middleware
async def _without_slash(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Redirect a path with slashes at its end to an endpoint without, as vLLM does."""
    if request.path.endswith("/") and _is_unknown(request.match_info):
        url = request.rel_url.with_path(request.path.rstrip("/"), keep_query=True)
        if not _is_unknown(await request.app.router.resolve(request.clone(rel_url=url))):
            return web.Response(status=307, headers={"Location": str(url)})
    return await handler(request)


def _refused(error: RequestRefusedError) -> str:
    """Return the outcome of a request that the proxy refuses."""
    return "refused" if error.status == 400 else f"rejected_{error.status}"


def _is_unknown(found: web.UrlMappingMatchInfo) -> bool:
    return isinstance(found.http_exception, web.HTTPNotFound)


class _Endpoints:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy, self._options = proxy, proxy.deployment.proxy
        options = self._options
        self._ranks = proxy.deployment.schedules_by_priority
        self._turnstile = Turnstile()
        self._memory = BodyMemory(options.largest_body_mb, options.bodies_mb, CLIENTS_SHARE)

    async def close_when_ending(self, http: web.Request, response: web.StreamResponse) -> None:
        del http
        if self._proxy.ending:
            response.headers["Connection"] = "close"
            response.force_close()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        path = http.path
        try:
            if self._proxy.cutting:
                raise RequestRefusedError(503, "the service is shutting down", retry_after=1)
            peer = http.transport.get_extra_info("peername") if http.transport else None
            address = client_of(peer)
            account = self._proxy.cluster.accounts.of(address, http.headers)
            self._proxy.cluster.dispatcher.admit(account)
            with self._memory.kept(address, http.content_length) as kept:
                sent = await read_body(http, kept, self._options)
                await self._turnstile.enter(account.name)
                raw = unpacked(http, sent, kept, self._options)
                if http.content_type.lower() != "application/json":
                    message = "the Content-Type of a body must be application/json"
                    raise RequestRefusedError(400, message, kind=UNREADABLE)
                read = read_forwarded if path in FORWARDED else read_request
                client = read(path, raw, self._options.forward_priority, self._ranks)
                account = self._proxy.cluster.accounts.of(address, http.headers)
                self._proxy.cluster.dispatcher.admit(account)  # others may have come meanwhile
                if client.background:
                    self._proxy.cluster.dispatcher.admit_background(account)
                return await self._answered(http, client, account)
        except RequestRefusedError as error:
            self._proxy.metrics.requests.labels(path, _refused(error)).inc()
            raise

    async def _answered(
        self, http: web.Request, client: ClientRequest, account: Account
    ) -> web.StreamResponse:
        name = given_name(http.headers.get("X-Request-Id"), client)
        headers = {key: http.headers[key] for key in _PASSED_ON if key in http.headers}
        request = self._proxy.new_request(client, name, headers, account)
        reports = self._proxy.reports
        client = request.client
        told = dict if reports is None else partial(reports.headers, request)
        headers = {"X-Request-Id": request.name}
        answer = ClientAnswer(http, request, headers, self._options, told)
        outcome, alive, seconds = "client_gone", None, self._options.keep_alive_seconds
        if seconds and client.stream and client.path in ALWAYS_STREAM:
            alive = asyncio.create_task(answer.keep_alive(seconds))
        try:
            response, outcome = await self._generated(request, answer)
            return response
        finally:
            if alive is not None:
                alive.cancel()
            self._proxy.request_ended(request, outcome)

    @asynccontextmanager
    async def _followed(self, request: LiveRequest, answer: ClientAnswer) -> AsyncIterator[None]:
        """Follow a request while the body runs; a stream that asks gets comments meanwhile.

        Raises:
            RequestRefusedError: it must finish sooner than can be promised.
        """
        reports, client = self._proxy.reports, request.client
        if reports is None:
            refuse_promises(request)
            await self._proxy.forecast(request)
            yield
            return
        reports.refuse_hopeless(request)
        await self._proxy.forecast(request)
        answer.headers |= reports.arrived(request)
        if not (client.progress and client.stream and client.movable):
            yield
            return
        progress = asyncio.create_task(self._progress(request, answer, reports))
        try:
            yield
        finally:
            progress.cancel()

    async def _progress(
        self, request: LiveRequest, answer: ClientAnswer, reports: FinishReports
    ) -> None:
        """Send comments that say when a request is expected to finish, until cancelled."""
        with suppress(ClientGoneError):  # what writes the answer sees to that
            while True:
                comment = reports.comment(request)
                if comment is not None:
                    await answer.comment(comment)
                await asyncio.sleep(self._options.progress_seconds)

    async def _generated(
        self, request: LiveRequest, answer: ClientAnswer
    ) -> tuple[web.StreamResponse, str]:
        """Return the answer to a request, and how it ended.

        Raises:
            asyncio.CancelledError: the client is gone, be it when it was to be told of a failure.
        """
        try:
            return await self._served(request, answer)
        except ClientGoneError:
            raise asyncio.CancelledError from None

    async def _served(
        self, request: LiveRequest, answer: ClientAnswer
    ) -> tuple[web.StreamResponse, str]:
        try:
            async with self._followed(request, answer):
                if request.client.movable:
                    await self._proxy.flow.run(request, answer)
                    return await answer.finish(), "ok"
                return await self._proxy.pass_through.run(request, answer), "ok"
        except EngineRefusedError as error:
            request.refused = request.generated_tokens == 0
            if error.status in (401, 403):
                self._proxy.cluster.accounts.refused_key()
            return await answer.fail(error.status, error.body), "refused"
        except RequestRefusedError as error:
            failed = await answer.fail(error.status, error.body, error.retry_after)
            return failed, _refused(error)
        except UpstreamError as error:
            logger.error("request %s failed: %s", request.id, error)
            return await answer.fail_with(502, "the engines failed to serve it"), "failed"
        except asyncio.CancelledError:
            if not self._proxy.cutting:
                raise
            return await answer.fail_with(503, "the service is shutting down"), "cut"

    async def not_served(self, http: web.Request) -> web.Response:
        resource = http.match_info.route.resource
        assert resource is not None
        raise RequestRefusedError(501, f"{http.path}: {NOT_SERVED[resource.canonical]}")

    async def models(self, http: web.Request) -> web.Response:
        """Answer the models of all decode instances: an adapter may be on one of them only."""
        first = await self.passed_on(http)
        if first.status != 200:
            return first
        decodes = [one for one in self._proxy.cluster.decodes if one.breaker.closed]
        headers = {key: http.headers[key] for key in _PASSED_ON if key in http.headers}
        asked = [
            self._proxy.cluster.upstream.get(one.instance, http.path, headers)
            for one in differing_models(decodes)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        lists = [answer for answer in answers if isinstance(answer, bytes)]
        assert isinstance(first.body, bytes)
        body = merged_models([first.body, *lists])
        return web.Response(body=body, content_type="application/json")

    async def passed_on(self, http: web.Request) -> web.Response:
        """Answer what a decode instance answers."""
        headers = {key: http.headers[key] for key in _PASSED_ON if key in http.headers}
        failure = "no decode instance is in service"
        for instance in self._proxy.cluster.decodes:
            if not instance.breaker.closed:
                continue
            try:
                body = await self._proxy.cluster.upstream.get(instance.instance, http.path, headers)
            except EngineRefusedError as error:
                return web.Response(
                    status=error.status, body=error.body, content_type="application/json"
                )
            except UpstreamError as error:
                logger.warning("%s: %s", http.path, error)
                failure = "no decode instance answers"
                continue
            return web.Response(body=body, content_type="application/json")
        raise RequestRefusedError(503, failure, retry_after=1)

    async def ping(self, http: web.Request) -> web.Response:
        del http
        return web.Response()
