"""The files of the page, and the headers that keep anything else out of it."""

import asyncio
from importlib.resources import files

import msgspec
from aiohttp import web

from rescheduler.page.snapshot import SnapshotFeed

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class PageFiles:
    """Answers with the files of the page, which hold no secret and need no token.

    The page fetches nothing but from where it came from, runs no script but its files, and is
    shown in no frame.
    """

    def __init__(self) -> None:
        folder = files("rescheduler.page").joinpath("static")
        self._files = {
            file.name: (file.read_bytes(), _TYPES["." + file.name.rpartition(".")[2]])
            for file in folder.iterdir()
            if "." + file.name.rpartition(".")[2] in _TYPES
        }

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes of the page."""
        return [web.get("/ui", self.answer), web.get("/ui/{file}", self.answer)]

    async def answer(self, http: web.Request) -> web.Response:
        """Return a file; raises `HTTPNotFound` where there is none of this name."""
        name = http.match_info.get("file", "index.html")
        if name not in self._files:
            raise web.HTTPNotFound
        body, kind = self._files[name]
        return web.Response(body=body, headers=_HEADERS, content_type=kind, charset="utf-8")


_WRITE_SECONDS = 30.0
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


class PageStream:
    """The endpoints that the page reads a live cluster from."""

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
        """Return what the page shows."""
        del http
        return web.json_response({"shows": "live"})

    async def snapshots(self, http: web.Request) -> web.StreamResponse:
        """Answer with an ``about`` event, and then a message a snapshot.

        It ends with its client, when a client reads nothing for half a minute, and with the feed.
        """
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        about = msgspec.json.encode(self._feed.about)
        try:
            await response.prepare(http)
            await response.write(b"event: about\ndata: " + about + b"\n\n")
            with self._feed.watching() as following:
                while (line := await following()) is not None:
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
