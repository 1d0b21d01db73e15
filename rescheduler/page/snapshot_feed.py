"""Snapshots for whoever watches, made only while somebody does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from rescheduler.page.snapshot import About, Snapshot

__all__ = ["Following", "SnapshotFeed", "Source"]

logger = logging.getLogger("headway.serve")

Following = Callable[[], Awaitable[bytes | None]]


class _Look(Protocol):
    def snapshot(self) -> Snapshot: ...


class Source(Protocol):
    """What can be looked at again and again, as `LiveSnapshots` can."""

    about: About

    def look(self) -> _Look:
        """Look, in the event loop; what was seen becomes a snapshot in another thread."""
        ...


class SnapshotFeed:
    """Looks at a source while anybody watches, once for all ``watchers``."""

    def __init__(self, source: Source) -> None:
        self._source, self.about = source, source.about
        self.watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._newest: asyncio.Future[bytes | None] | None = None
        self._closed = False

    @contextmanager
    def watching(self) -> Iterator[Following]:
        """Watch while the body runs; yield what waits for the next snapshot.

        As JSON in one line; None: no more will come. Who is slow misses some.
        """
        self.watchers += 1
        if self._looking is None and not self._closed:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        try:
            yield self._next
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._stop()

    def close(self) -> None:
        """Let every watcher know that nothing comes any more."""
        self._closed = True
        self._stop()
        self._publish(None)

    async def _next(self) -> bytes | None:
        if self._newest is None:
            self._newest = asyncio.get_running_loop().create_future()
            if self._closed:
                self._newest.set_result(None)
        return await asyncio.shield(self._newest)

    def _publish(self, line: bytes | None) -> None:
        future, self._newest = self._newest, None
        if future is not None and not future.done():
            future.set_result(line)

    def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                self._publish(await asyncio.to_thread(_line, self._source.look().snapshot))
            except Exception:  # the next one may succeed
                logger.exception("a snapshot failed")
            due = max(due + self._source.about.seconds, loop.time())
            await asyncio.sleep(due - loop.time())


def _line(snapshot: Callable[[], Snapshot]) -> bytes:
    return msgspec.json.encode(snapshot())
