"""Connections of all our HTTP servers: where, how many, for how long, and with which errors."""

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rescheduler.engines.deployment import DeploymentError
from rescheduler.openai.body_memory import FairShares, client_of
from rescheduler.openai.openai_request import RequestRefusedError, error_body

_OPERATORS = 256
"""Connections to a server that is for operators; many of them may be pages that watch."""
_IDLE_SECONDS = 30.0
"""For which such a connection may be idle."""

METRICS_SECONDS = 1.0
"""For which the text of ``/metrics`` is kept."""

CLEANUP_SECONDS = 2.0
"""For which a connection may linger when its server ends."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)

logger = logging.getLogger("headway.serve")


def url_of(host: str, port: int) -> str:
    """Return the URL of an HTTP server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def listening_at(host: str, port: int) -> dict[str, Any]:
    """Return where a server listens, as `asyncio.loop.create_server` takes it.

    ``::`` is every address of the machine: asyncio alone would leave out those of IPv4.

    Raises:
        OSError: the port is in use.
    """
    if host != "::":
        return {"host": host, "port": port}
    if not socket.has_dualstack_ipv6():
        return {"host": "0.0.0.0", "port": port}
    listening = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return {"sock": listening}


def cannot_listen(option: str, host: str, port: int, error: OSError) -> DeploymentError:
    """Return the error of an address that cannot be listened on."""
    address = url_of(host, port).removeprefix("http://")
    return DeploymentError(f"{option}: cannot listen on {address}: {error.strerror or error}")


_Open = Callable[[web.Request], Awaitable[web.StreamResponse]]


def token_check(token: str, open_to_all: _Open | None = None) -> Middleware:
    """Return what refuses requests without ``Authorization: Bearer TOKEN``.

    One endpoint may be open to all.
    """
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        is_open = open_to_all is not None and request.match_info.handler == open_to_all
        if not is_open and not hmac.compare_digest(given, expected):
            raise RequestRefusedError(401, "the proxy's admin token is required")
        return await handler(request)

    return check_token


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a refusal, a wrong path and a failure of our own."""
    try:
        return await handler(request)
    except RequestRefusedError as error:
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return _document(error.status, error.body, headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}"
        allowed = {key: error.headers[key] for key in ("Allow",) if key in error.headers}
        return _document(error.status, error_body(error.status, message), allowed)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _document(500, error_body(500, "the proxy failed; see its log"), {})


def _document(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


@asynccontextmanager
async def operators_server(app: web.Application, **where: Any) -> AsyncIterator[asyncio.Server]:
    """Serve an application that is for operators, not for clients, while the body runs.

    Where and what it raises is as of `asyncio.loop.create_server`.
    """
    runner = web.AppRunner(app, shutdown_timeout=CLEANUP_SECONDS)
    await runner.setup()
    try:
        assert runner.server is not None
        accept = connections(runner.server, _OPERATORS, _IDLE_SECONDS)
        server = await asyncio.get_running_loop().create_server(accept, **where)
        try:
            yield server
        finally:
            server.close()
    finally:
        await runner.cleanup()


def monitoring_routes(
    ready: Callable[[], bool], metrics: Callable[[], bytes]
) -> list[web.RouteDef]:
    """Return the routes of probes, and of Prometheus.

    Anyone may ask for the metrics, without a key, and all streams wait while they are rendered. So
    everybody gets the same text for a second.
    """

    async def alive(http: web.Request) -> web.Response:
        del http
        return web.Response()

    async def is_ready(http: web.Request) -> web.Response:
        del http
        return web.Response(status=200 if ready() else 503)

    kept, rendered = b"", -inf

    async def measured(http: web.Request) -> web.Response:
        nonlocal kept, rendered
        del http
        now = asyncio.get_running_loop().time()
        if now - rendered >= METRICS_SECONDS:
            kept, rendered = metrics(), now
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=kept, headers=kind)

    return [web.get("/health", alive), web.get("/ready", is_ready), web.get("/metrics", measured)]


def connections(
    server: web.Server, most: int, idle_seconds: float, share: float = 1.0
) -> Callable[[], "Connection"]:
    """Return what makes the connections of a server, at most so many; more are refused with 503.

    One client's address may have a share of them. One may be without a request, a request's
    headers incomplete, or an answer unread, for ``idle_seconds``.
    """
    refuse_expectations(server)
    loop, open_now = asyncio.get_running_loop(), FairShares(most, max(1, int(share * most)))
    return lambda: Connection(server, open_now, loop=loop, keepalive_timeout=idle_seconds)


class Connection(web.RequestHandler):
    """Answers bytes that are no HTTP in OpenAI's shape, and logs no traceback of them.

    Bodies are left compressed: `read_body` knows how much of one may be unpacked.
    """

    __slots__ = ("_client", "_open_now")

    def __init__(self, server: web.Server, open_now: FairShares, **options: Any) -> None:
        own: dict[str, Any] = {"access_log": None, "auto_decompress": False}
        super().__init__(server, lingering_time=CLEANUP_SECONDS, **own, **options)
        self._client: str | None = None
        self._open_now = open_now

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or refuse the client where there is no room for it."""
        transport = cast(asyncio.Transport, transport)  # uvloop's is one but for its class
        client = client_of(transport.get_extra_info("peername"))
        if self._open_now.take(client):
            self._client = client
            milliseconds = int(1000 * self.keepalive_timeout)
            own = transport.get_extra_info("socket")
            if own is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            super().connection_made(transport)
        else:
            logger.warning("refused %s: %d connections are open", client, self._open_now.held)
            transport.set_protocol(asyncio.Protocol())
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End."""
        if self._client is not None:
            self._open_now.take(self._client, -1)
            self._client = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what no endpoint has answered; end one that has begun."""
        text = "the proxy failed; see its log"
        if status >= 500:
            super().handle_error(request, status, exc, message)
        else:
            text = f"not a valid HTTP request: {(message or '').partition(':')[0]}"
            logger.debug("refused a client: %s", text)
            if request.writer.output_size > 0:
                raise ConnectionError("an answer has begun")
        response = _document(status, error_body(status, text), {})
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log a failure, unless it is that of a client to send a body."""
        if isinstance(options.get("exc_info"), web.RequestPayloadError):
            self.log_debug(*args, **options)
        else:
            super().log_exception(*args, **options)


def refuse_expectations(server: web.Server) -> None:
    """Have a server answer 417 to an ``Expect`` that it does not know.

    aiohttp would do so before any middleware, and fail where the header is no UTF-8.
    """
    handler = server.request_handler

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            message = "of all expectations only 100-continue is met"
            return _document(417, error_body(417, message), {})
        return await handler(request)

    server.request_handler = handle


_METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"
_EXPOSED = (
    "X-Request-Id, Retry-After, X-Headway-Expected-Start, X-Headway-Expected-Finish, "
    "X-Headway-Finish-Probability"
)
_PREFLIGHT_SECONDS = "600"


class AllowedOrigins:
    """Tells browsers which pages may read answers, as vLLM's ``--allowed-origins`` does.

    Credentials that a browser keeps, such as cookies, are never allowed.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    @web.middleware
    async def answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a browser's question whether a page may send a request."""
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or "Origin" not in request.headers:
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
        }
        wanted = request.headers.get("Access-Control-Request-Headers")
        if wanted is not None and wanted.isascii():
            headers["Access-Control-Allow-Headers"] = wanted
        if self._allowed(request) is None:
            return web.Response(status=400, text="Disallowed CORS origin", headers=headers)
        return web.Response(text="OK", headers=headers)

    async def allow(self, http: web.Request, response: web.StreamResponse) -> None:
        """Let the page that asks read an answer, if it may."""
        if not self._origins:
            return
        response.headers.add("Vary", "Origin")
        origin = self._allowed(http)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allowed(self, http: web.Request) -> str | None:
        """Return the origin that a browser has to read; None: it is not allowed."""
        origin = http.headers.get("Origin")
        if origin is None:
            return None
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None
