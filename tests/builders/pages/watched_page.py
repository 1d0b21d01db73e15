"""The page of a cluster, served as the proxy serves it, and its stream as a client reads it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from rescheduler.page.page_files import PageFiles, PageStream
from rescheduler.page.snapshot import Snapshot, SnapshotFeed, Source
from rescheduler.serving.connection import answer_errors, token_check

TOKEN = "a-token"


def page_app(feed: SnapshotFeed) -> web.Application:
    """Return an application with the page and its stream, and nothing else."""
    files, stream = PageFiles(), PageStream(feed)
    app = web.Application(middlewares=[answer_errors, token_check(TOKEN, files.answer)])
    app.on_shutdown.append(stream.close)
    app.add_routes([*files.routes, *stream.routes])
    return app


@asynccontextmanager
async def page_served(source: Source) -> AsyncIterator[str]:
    """Yield the address of the page of a source."""
    async with TestServer(page_app(SnapshotFeed(source))) as server:
        yield f"{server.make_url('/ui')}#token={TOKEN}"


_SECONDS = 60


class Stream:
    """A stream of snapshots, as the page reads it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def event(self) -> tuple[str, bytes]:
        """Its next event."""
        kind, data = "message", b""
        async with asyncio.timeout(_SECONDS):
            while line := (await self._response.content.readline()).rstrip(b"\n"):
                name, _, value = line.partition(b": ")
                if name == b"event":
                    kind = value.decode()
                else:
                    data = value
        return kind, data

    async def snapshot(self) -> Snapshot:
        """Its next snapshot."""
        kind, data = await self.event()
        assert kind == "message"
        return msgspec.json.decode(data, type=Snapshot)


@asynccontextmanager
async def stream(url: str, token: str) -> AsyncIterator[Stream]:
    """Watch a proxy, or a coordinator."""
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 24) as session,
        session.get(f"{url}/admin/snapshots", headers=headers) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield Stream(response)
