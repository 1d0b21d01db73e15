"""The endpoints for operators: instances, draining, and the page."""

import hmac
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Generic
from urllib.parse import quote

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rescheduler.engines.deployment import DeploymentError
from rescheduler.openai.openai_request import RequestRefusedError, error_body
from rescheduler.page.page_files import PageFiles, PageStream
from rescheduler.page.snapshot_feed import SnapshotFeed
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import R
from rescheduler.placement.planner import Drainer
from rescheduler.serving.admin_client import admin_token_place, create_admin_token
from rescheduler.serving.connection import cannot_listen, operators_server, url_of

__all__ = ["AdminListener", "admin_app", "answer_errors", "token_check"]


_Open = Callable[[web.Request], Awaitable[web.StreamResponse]]


def token_check(token: str, open_to_all: _Open | None = None) -> Middleware:
    """Return what refuses requests that lack the token.

    Args:
        token: given as ``Authorization: Bearer``, and never in an address.
        open_to_all: the endpoint that needs none, if there is one.
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


logger = logging.getLogger("headway.serve")


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


def admin_app(drainer: Drainer[R], token: str, feed: SnapshotFeed | None = None) -> web.Application:
    """Return the application.

    Args:
        drainer: of the instances of a proxy, or of a coordinator of many.
        token: that every request but those for the page's files has to have, as
            ``Authorization: Bearer``.
        feed: what the page shows; closed with the application. None: there is no page.
    """
    endpoints, page = _Endpoints(drainer), PageFiles()
    without_token = page.answer if feed is not None else None
    app = web.Application(middlewares=[answer_errors, token_check(token, without_token)])
    if feed is not None:
        stream = PageStream(feed)
        app.on_shutdown.append(stream.close)
        app.add_routes([*page.routes, *stream.routes])
    app.add_routes(
        [
            web.get("/admin/instances", endpoints.instances),
            web.post("/admin/drain/{instance}", endpoints.drain),
            web.post("/admin/undrain/{instance}", endpoints.undrain),
        ]
    )
    return app


class _Endpoints(Generic[R]):
    def __init__(self, drainer: Drainer[R]) -> None:
        self._drainer, self._cluster = drainer, drainer.cluster

    async def instances(self, http: web.Request) -> web.Response:
        """List the instances."""
        del http
        listed = [self._described(instance) for instance in self._cluster.instances.values()]
        return _json({"instances": listed})

    async def drain(self, http: web.Request) -> web.Response:
        """Begin to drain an instance."""
        instance = self._named(http)
        self._drainer.drain(instance)
        return _json(self._described(instance))

    async def undrain(self, http: web.Request) -> web.Response:
        """Let requests come to an instance again."""
        instance = self._named(http)
        self._drainer.undrain(instance)
        return _json(self._described(instance))

    def _named(self, http: web.Request) -> InstanceState:
        name = http.match_info["instance"]
        instance = self._cluster.instances.get(name)
        if instance is None:
            known = ", ".join(self._cluster.instances)
            raise RequestRefusedError(404, f"no instance {name!r}; there are: {known}")
        return instance

    def _described(self, instance: InstanceState) -> dict[str, Any]:
        requests = self._cluster.placements.on(instance)
        return {
            "name": instance.name,
            "role": instance.instance.role,
            "url": instance.instance.url,
            "state": instance.breaker.state.value,
            "draining": instance.draining,
            "requests": len(requests),
            "movable": sum(request.can_move for request in requests),
            "context_tokens": sum(r.context_tokens for r in requests),
        }


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


_HOST = "127.0.0.1"


class AdminListener(Generic[R]):
    """Answers the operator on this machine.

    Args:
        port: 0 takes a free one.
        token: that the operator has to know; empty: one is created.
        feed: what the page shows; None: there is no page.

    Attributes:
        url: for the operator.
    """

    def __init__(
        self,
        drainer: Drainer[R],
        port: int,
        token: str = "",
        feed: SnapshotFeed | None = None,
    ) -> None:
        self.url, self.token = "", token
        self._drainer, self._port, self._feed = drainer, port, feed
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Listen.

        Raises:
            DeploymentError: the port is in use, or there is no place for the operator's token.
        """
        try:
            listening = socket.create_server((_HOST, self._port))
        except OSError as error:
            raise cannot_listen("proxy.admin_port", _HOST, self._port, error) from error
        port = listening.getsockname()[1]
        try:
            self.token = self.token or create_admin_token(port)
        except OSError as error:
            listening.close()
            raise DeploymentError(f"the admin token cannot be kept: {error}") from error
        app = admin_app(self._drainer, self.token, self._feed)
        await self._stack.enter_async_context(operators_server(app, sock=listening))
        self.url = url_of(_HOST, port)

    @property
    def page_url(self) -> str:
        """Address of the page; what follows the # stays in the browser."""
        return f"{self.url}/ui#token={quote(self.token, safe='')}"

    @property
    def where_to_see(self) -> str:
        """Where the page is; with the token on a terminal only, since others keep logs."""
        if sys.stdout is not None and sys.stdout.isatty():
            return f"see it live: {self.page_url}"
        place = admin_token_place(int(self.url.rpartition(":")[2]))
        return f"see it live: {self.url}/ui (its token: {place})"

    async def close(self) -> None:
        """Close every connection."""
        await self._stack.aclose()
