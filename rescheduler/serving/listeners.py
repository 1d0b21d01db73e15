"""The sockets that the proxy listens on: for clients, and for whoever operates it."""

import asyncio
import logging
import resource

from aiohttp import web

from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.page.snapshot_feed import SnapshotFeed
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.admin_app import AdminListener
from rescheduler.serving.connection import CLEANUP_SECONDS, cannot_listen, connections, url_of
from rescheduler.serving.http_app import CLIENTS_SHARE, http_app

__all__ = ["Listeners"]

logger = logging.getLogger("headway.serve")

_BACKLOG = 1024
_OTHER_FILES = 128
_FILES_PER_CLIENT = 2  # its connection, and one to an engine


class Listeners:
    """Answers clients, and the operator on this machine.

    Args:
        admin_token: that the operator has to know; empty: one is created.

    Attributes:
        url: for clients.
        feed: what the page shows.
        admin: for the operator; None where the coordinator is operated instead.
    """

    def __init__(self, proxy: Proxy, admin_token: str = "") -> None:
        self.url = ""
        self.feed = SnapshotFeed(LiveSnapshots(proxy.cluster))
        self._proxy, self._options = proxy, proxy.deployment.proxy
        self._clients = web.AppRunner(
            http_app(proxy), handler_cancellation=True, shutdown_timeout=CLEANUP_SECONDS
        )
        self._server: asyncio.Server | None = None
        self.admin: AdminListener[LiveRequest] | None = None
        if proxy.drainer is not None:
            port = self._options.admin_port
            self.admin = AdminListener(proxy.drainer, port, admin_token, self.feed)

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
        accept = connections(served, most, self._options.idle_seconds, CLIENTS_SHARE)
        host, port = self._options.host, self._options.port
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(accept, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise cannot_listen("proxy.port", host, port, error) from error
        self.url = url_of(host, self._server.sockets[0].getsockname()[1])
        if self.admin is not None:
            await self.admin.start()

    async def stop(self) -> None:
        """Take no more connections from clients, and refuse requests on those that are open."""
        self._proxy.ending = True
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close every connection."""
        await self.stop()
        await self._clients.cleanup()
        if self.admin is not None:
            await self.admin.close()


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
