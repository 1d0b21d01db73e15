"""Writing snapshots to a log that the page can replay."""

import gzip
import os
from pathlib import Path
from types import TracebackType

import msgspec

from data_collection.atomic_file import refuse_unwritable
from rescheduler.page.snapshot import About

__all__ = ["LogWriter", "refuse_log"]


def refuse_log(path: Path) -> None:
    """Make a log's folder, and raise now what `LogWriter` would raise.

    Raises:
        OSError: the file exists, or cannot be created.
    """
    if path.exists():
        raise _exists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(path)


class LogWriter:
    """Writes a gzip file of JSON lines: what is logged, and then a line a snapshot.

    Each line is a gzip member of its own, written at once: a process that is killed leaves a file
    that can be read to its last whole line, and a reader finds any line without those before.

    Args:
        path: of the log; the process's own, or absent.
        about: what is logged.

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
        """Append a line.

        Raises:
            OSError: there is no room, or the file cannot be written.
        """
        left = memoryview(gzip.compress(line + b"\n", mtime=0))
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> "LogWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists: delete it, or name another file")
