"""The sockets that the proxy listens on: for clients, and for whoever operates it."""

import asyncio
import logging
import resource
import socket

from aiohttp import web

from rescheduler.engines.deployment import DeploymentError
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.admin_app import admin_app
from rescheduler.serving.admin_token import create_admin_token
from rescheduler.serving.connection import Connection, refuse_expectations
from rescheduler.serving.http_app import http_app

__all__ = ["Listeners"]

logger = logging.getLogger("headway.serve")

_ADMIN_HOST = "127.0.0.1"
_CLEANUP_SECONDS = 2.0
_BACKLOG = 1024
_OTHER_FILES = 128
_FILES_PER_CLIENT = 2  # its connection, and one to an engine


class Listeners:
    """Answers clients, and the operator on this machine.

    Args:
        proxy: that serves.

    Attributes:
        url: for clients.
        admin_url: for the operator.
        admin_token: that the operator has to know.
    """

    def __init__(self, proxy: Proxy) -> None:
        self.url = self.admin_url = self.admin_token = ""
        self._proxy, self._options = proxy, proxy.deployment.proxy
        self._clients = web.AppRunner(
            http_app(proxy), handler_cancellation=True, shutdown_timeout=_CLEANUP_SECONDS
        )
        self._admin: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._admin_server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._clients.server.connections) if self._clients.server else 0

    async def start(self) -> None:
        """Listen.

        Raises:
            DeploymentError: an address is in use or does not exist, or there is no place for the
                operator's token.
        """
        most = self._options.connections or (_open_files() - _OTHER_FILES) // _FILES_PER_CLIENT
        await self._clients.setup()
        served = self._clients.server
        assert served is not None
        refuse_expectations(served)

        def accept() -> asyncio.Protocol:
            full = self.connections >= most
            if full:
                logger.warning("refused a client: %d connections are open", most)
            if full:
                return _Full()
            return Connection(
                served,
                loop=loop,
                keepalive_timeout=self._options.idle_seconds,
                lingering_time=_CLEANUP_SECONDS,
            )

        host, port = self._options.host, self._options.port
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(accept, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise _cannot_listen("port", host, port, error) from error
        self.url = _url(host, self._server.sockets[0].getsockname()[1])
        await self._start_admin()

    async def stop(self) -> None:
        """Take no more connections from clients, and refuse requests on those that are open."""
        self._proxy.ending = True
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close every connection."""
        await self.stop()
        await self._clients.cleanup()
        if self._admin_server is not None:
            self._admin_server.close()
        if self._admin is not None:
            await self._admin.cleanup()

    async def _start_admin(self) -> None:
        port = self._options.admin_port
        try:
            listening = socket.create_server((_ADMIN_HOST, port))
        except OSError as error:
            raise _cannot_listen("admin_port", _ADMIN_HOST, port, error) from error
        port = listening.getsockname()[1]
        try:
            self.admin_token = create_admin_token(port)
        except OSError as error:
            listening.close()
            raise DeploymentError(f"the admin token cannot be kept: {error}") from error
        self._admin = web.AppRunner(admin_app(self._proxy, self.admin_token))
        await self._admin.setup()
        served, loop = self._admin.server, asyncio.get_running_loop()
        assert served is not None
        refuse_expectations(served)
        self._admin_server = await loop.create_server(
            lambda: Connection(served, loop=loop), sock=listening
        )
        self.admin_url = _url(_ADMIN_HOST, port)


class _Full(asyncio.Protocol):
    """A connection for which there is no room."""

    _ANSWER = (
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
        b"Content-Length: 0\r\n\r\n"
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say so, and close."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._ANSWER)
        transport.close()


def _open_files() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # some systems forbid what they name
            logger.warning("the limit of open files stays at %d: %s", soft, error)
        else:
            return hard
    return soft


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _cannot_listen(option: str, host: str, port: int, error: OSError) -> DeploymentError:
    return DeploymentError(
        f"proxy.{option}: cannot listen on {host}:{port}: {error.strerror or error}"
    )
