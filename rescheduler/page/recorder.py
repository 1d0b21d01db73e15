"""Recording what the page would show."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rescheduler.page.log_writer import LogWriter
from rescheduler.page.snapshot_feed import SnapshotFeed

__all__ = ["recording"]

logger = logging.getLogger("headway.serve")


@asynccontextmanager
async def recording(feed: SnapshotFeed, path: Path | None) -> AsyncIterator[None]:
    """Record a feed while the body runs; without a path, nothing.

    A file that cannot be written any more ends the recording, and nothing else.

    Raises:
        OSError: the file exists, or cannot be created.
    """
    if path is None:
        yield
        return
    with LogWriter(path, feed.about) as log:
        task = asyncio.get_running_loop().create_task(_record(feed, log, path))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _record(feed: SnapshotFeed, log: LogWriter, path: Path) -> None:
    with feed.watching() as watcher:
        while (line := await watcher.next()) is not None:
            writing = asyncio.ensure_future(asyncio.to_thread(log.write, line))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # the file is closed next
                raise
            except OSError as error:
                logger.error("%s is recorded no further: %s", path, error.strerror or error)
                return
