"""Snapshots as server-sent events."""

import asyncio

import msgspec
from aiohttp import web

from rescheduler.page.snapshot_feed import SnapshotFeed

__all__ = ["PageStream"]

_WRITE_SECONDS = 30.0
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


class PageStream:
    """The endpoints that the page reads a live cluster from.

    Args:
        feed: of the cluster.
    """

    def __init__(self, feed: SnapshotFeed) -> None:
        self._feed = feed

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes of both endpoints."""
        return [
            web.get("/admin/page", self.page),
            web.get("/admin/snapshots", self.snapshots, allow_head=False),
        ]

    async def page(self, http: web.Request) -> web.Response:
        """Send the page what it shows."""
        del http
        return web.json_response({"shows": "live"})

    async def snapshots(self, http: web.Request) -> web.StreamResponse:
        """Answer with an ``about`` event, and then a message a snapshot.

        It ends with its client, when a client reads nothing for half a minute, and with the feed.
        """
        response = web.StreamResponse(headers=_HEADERS)
        about = msgspec.json.encode(self._feed.about)
        try:
            await response.prepare(http)
            await response.write(b"event: about\ndata: " + about + b"\n\n")
            with self._feed.watching() as watcher:
                while (line := await watcher.next()) is not None:
                    async with asyncio.timeout(_WRITE_SECONDS):
                        await response.write(b"data: " + line + b"\n\n")
        except ConnectionError:
            pass  # the client has gone
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
        return response

    async def close(self, app: web.Application) -> None:
        """End all streams, which would not end by themselves."""
        del app
        self._feed.close()
