"""Snapshots of a run in a file, as they are written and read."""

import asyncio
import gzip
import logging
import os
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from data_collection.files import refuse_unwritable
from rescheduler.page.snapshot import About, Snapshot
from rescheduler.page.snapshot_feed import SnapshotFeed

__all__ = ["Log", "LogError", "LogWriter", "read_log", "recording", "refuse_log"]


def refuse_log(path: Path) -> None:
    """Make a log's folder, and raise now the `OSError` that `LogWriter` would raise."""
    if path.exists():
        raise _exists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(path)


class LogWriter:
    """Writes a gzip file of JSON lines: what is logged, and then a line a snapshot.

    Each line is a gzip member of its own, written at once: a process that is killed leaves a file
    that can be read to its last whole line, and a reader finds any line without those before.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, about: About) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise _exists(path) from error
        self.write(msgspec.json.encode(about))

    def write(self, line: bytes) -> None:
        """Append a line; raises `OSError` where there is no room."""
        left = memoryview(gzip.compress(line + b"\n", mtime=0))
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> "LogWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists: delete it, or name another file")


_BLOCK = 1 << 16
_GZIP = 16 + zlib.MAX_WBITS
_LONGEST_LINE = 64 << 20


class LogError(ValueError):
    """A file that is no log, or a damaged one."""


class Log:
    """A log whose lines have all been read once.

    The ``times`` [n] are seconds from the first snapshot to each, ascending. Where each snapshot's
    line begins in the file, and the last one ends, are ``ends`` [n + 1]. The file of a killed
    process ``is_cut`` within a line.
    """

    def __init__(
        self, path: Path, about: About, times: list[float], ends: list[int], is_cut: bool
    ) -> None:
        self.path, self.about, self.times, self.is_cut = path, about, times, is_cut
        self._ends = ends

    def packed(self, number: int) -> bytes:
        """Return a snapshot as JSON, packed by gzip, as it is in the file.

        Raises:
            IndexError: there is no such snapshot.
            OSError: the file cannot be read any more.
        """
        if not 0 <= number < len(self.times):
            raise IndexError(f"{self.path} has no snapshot {number}")
        begin, end = self._ends[number : number + 2]
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), end - begin, begin)

    def snapshot(self, number: int) -> Snapshot:
        """Return a snapshot; raises as `packed` does."""
        return msgspec.json.decode(zlib.decompress(self.packed(number), _GZIP), type=Snapshot)


def read_log(path: Path) -> Log:
    """Read a log, to its last whole line.

    Raises:
        LogError: it does not exist, is empty, something else, or damaged.
        OSError: it cannot be read.
    """
    if not path.exists():
        raise LogError(f"{path} does not exist")
    times: list[float] = []
    about, last, end = None, 0.0, 0
    ends: list[int] = []
    decoder = msgspec.json.Decoder(Snapshot)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise LogError(f"{path} is empty: was it recorded with --record?")
        try:
            for end, line in _lines(file):
                ends.append(end)
                if about is None:
                    about = msgspec.json.decode(line, type=About)
                    continue
                time = decoder.decode(line).time
                # A clock that was set back must not stop the log until it has caught up.
                times.append(times[-1] + max(0.0, time - last) if times else 0.0)
                last = time
        except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            if about is None:
                raise LogError(
                    f"{path} is not a log of `headway serve` or `headway simulate --record`"
                ) from error
            raise LogError(f"{path} is damaged after {len(times)} snapshots: {error}") from error
    if about is None or not times:
        raise LogError(f"{path} holds no snapshot: it was cut off before the first")
    return Log(path, about, times, ends, is_cut=end != size)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line, with where it ends in the file; what is cut off at the end is left out."""
    rest, end = b"", 0
    while True:
        unpacking, line, read = zlib.decompressobj(_GZIP), b"", 0
        parts = []
        while not unpacking.eof:
            rest = rest or file.read(_BLOCK)
            if not rest:
                return
            read += len(rest)
            parts.append(unpacking.decompress(rest, _LONGEST_LINE))
            read -= len(unpacking.unconsumed_tail) + len(unpacking.unused_data)
            rest = unpacking.unconsumed_tail or unpacking.unused_data
            if sum(map(len, parts)) > _LONGEST_LINE:
                raise zlib.error("a line is too long")
        line = b"".join(parts)
        end += read
        yield end, line


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
    with feed.watching() as following:
        while (line := await following()) is not None:
            writing = asyncio.ensure_future(asyncio.to_thread(log.write, line))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # the file is closed next
                raise
            except OSError as error:
                logger.error("%s is recorded no further: %s", path, error.strerror or error)
                return
