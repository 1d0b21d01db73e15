"""The socket for whoever operates a proxy or a coordinator, on its own machine."""

import socket
import sys
from contextlib import AsyncExitStack
from typing import Generic
from urllib.parse import quote

from rescheduler.engines.deployment import DeploymentError
from rescheduler.page.snapshot_feed import SnapshotFeed
from rescheduler.placement.placeable import R
from rescheduler.serving.addresses import cannot_listen, url_of
from rescheduler.serving.admin_app import Operated, admin_app
from rescheduler.serving.admin_token import admin_token_place, create_admin_token
from rescheduler.serving.connection import operators_server

__all__ = ["AdminListener"]

_HOST = "127.0.0.1"


class AdminListener(Generic[R]):
    """Answers the operator on this machine.

    Args:
        operated: what is operated.
        port: 0 takes a free one.
        token: that the operator has to know; empty: one is created.
        feed: what the page shows; None: there is no page.

    Attributes:
        url: for the operator.
        token: that the operator has to know.
    """

    def __init__(
        self,
        operated: Operated[R],
        port: int,
        token: str = "",
        feed: SnapshotFeed | None = None,
    ) -> None:
        self.url, self.token = "", token
        self._operated, self._port, self._feed = operated, port, feed
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
        app = admin_app(self._operated, self.token, self._feed)
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
