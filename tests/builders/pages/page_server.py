"""The page of a cluster, served as the proxy serves it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

from rescheduler.page.page_files import PageFiles, PageStream
from rescheduler.page.snapshot import SnapshotFeed, Source
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
