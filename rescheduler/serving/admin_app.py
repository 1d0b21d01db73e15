"""The endpoints for operators: instances, draining, and the page."""

import asyncio
import socket
import sys
from contextlib import AsyncExitStack
from typing import Any, Generic
from urllib.parse import quote

import msgspec
from aiohttp import web

from rescheduler.commands.event_loop import inherited
from rescheduler.engines.deployment import DeploymentError
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.page.page_files import PageFiles, PageStream
from rescheduler.page.snapshot import SnapshotFeed
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import R
from rescheduler.placement.planner import Drainer
from rescheduler.serving.admin_client import (
    admin_token_place,
    create_admin_token,
    forget_admin_token,
)
from rescheduler.serving.connection import (
    answer_errors,
    cannot_listen,
    operators_server,
    token_check,
    url_of,
)


def admin_app(drainer: Drainer[R], token: str, feed: SnapshotFeed | None = None) -> web.Application:
    """Return the application, in which all but the page's files needs the token.

    The feed is what the page shows, and is closed with the application; None: there is no page.
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
        del http
        listed = [self._described(instance) for instance in self._cluster.all]
        return _json({"instances": listed})

    async def drain(self, http: web.Request) -> web.Response:
        instance = self._named(http)
        self._drainer.drain(instance)
        return _json(self._described(instance))

    async def undrain(self, http: web.Request) -> web.Response:
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
        seconds = self._drainer.seconds(instance)
        return {
            "name": instance.name,
            "role": instance.instance.role,
            "url": instance.instance.url,
            "state": instance.breaker.state.value,
            "draining": instance.draining,
            "requests": len(requests),
            "movable": sum(request.can_move for request in requests),
            "context_tokens": sum(r.context_tokens for r in requests),
            "other_requests": len(instance.others),
            "without": instance.without,
            "drain_seconds": None if seconds is None else round(seconds, 3),
        }


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


_HOST = "127.0.0.1"


class AdminListener(Generic[R]):
    """Answers the operator on this machine, who has to know the token; empty: one is created."""

    def __init__(
        self, drainer: Drainer[R], port: int, token: str = "", feed: SnapshotFeed | None = None
    ) -> None:
        self.url, self.token = "", token
        self._drainer = drainer
        self._port = port
        self._feed = feed
        self._stack, self._shared = AsyncExitStack(), False
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            DeploymentError: the port is in use, or there is no place for the operator's token.
        """
        shared = inherited("operator")
        self._shared = bool(shared)
        try:
            listening = shared[0] if shared else socket.create_server((_HOST, self._port))
        except OSError as error:
            raise cannot_listen("proxy.admin_port", _HOST, self._port, error) from error
        port = listening.getsockname()[1]
        try:
            self.token = self.token or create_admin_token(port)
        except OSError as error:
            listening.close()
            raise DeploymentError(f"the admin token cannot be kept: {error}") from error
        self._stack.callback(forget_admin_token, port, self.token)
        app = admin_app(self._drainer, self.token, self._feed)
        server = operators_server(app, sock=listening)
        self._server = await self._stack.enter_async_context(server)
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

    def give_up(self) -> None:
        """Leave new connections to the proxy after this one, if there may be one."""
        if self._shared and self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._stack.aclose()
