"""The log of finished requests: JSON Lines, one per request, with the outcome of its forecasts."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from data_collection.files import text_lines
from rescheduler.monitoring.forecast_quality import ScoredRequest

_BEGINNING = b'{"request_id":'
_BLOCK = 1 << 16

Level = Annotated[float, msgspec.Meta(ge=0, le=1)]


class LoggedRequest(msgspec.Struct, frozen=True):
    """One line of the log.

    Attributes:
        checkpoint: fingerprint of the predictor that forecast it.
        generated: [n_forecasts] tokens n when each forecast was made.
        levels: [n_forecasts] u = P(R ≤ tokens that came), without the cap.
        medians: [n_forecasts] tokens expected, under the cap.
    """

    request_id: str
    instance: str
    model: str
    checkpoint: str
    finish_reason: str
    total_tokens: int
    generated: list[int]
    levels: list[Level]
    cut: bool
    medians: list[float]

    def __post_init__(self) -> None:
        if not len(self.generated) == len(self.levels) == len(self.medians) > 0:
            raise ValueError("as many of generated, levels and medians, at least one")


class FinishedLog:
    """Appends scored requests to a file, each as one whole line.

    Half a line, which a killed writer or a full disk leaves at the end, is cut off first.

    Args:
        path: of the log; it and its folder are created if missing.

    Raises:
        ValueError: the file exists and is not such a log.
    """

    def __init__(self, path: Path) -> None:
        _refuse_other_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        os.ftruncate(self._file.fileno(), _size_of_whole_lines(path))

    def append(self, scored: ScoredRequest) -> bool:
        """Write one line; return whether the request's model is known, else skip it.

        Raises:
            OSError: the disk is full; nothing of the line is left.
        """
        finished = scored.finished
        if not finished.model:
            return False
        logged = LoggedRequest(
            request_id=finished.event.request_id,
            instance=finished.instance.name,
            model=finished.model,
            checkpoint=finished.checkpoint,
            finish_reason=finished.event.finish_reason,
            total_tokens=finished.event.total_tokens,
            generated=[int(n) for n in scored.generated],
            levels=scored.levels.clip(0, 1).round(6).tolist(),
            cut=scored.cut,
            medians=scored.medians.round(1).tolist(),
        )
        line = msgspec.json.encode(logged) + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            os.ftruncate(self._file.fileno(), before)
            raise OSError(errno.ENOSPC, "no room for another line", self._file.name)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_finished_log(path: Path) -> Iterator[LoggedRequest]:
    """Yield the requests of a log, oldest first; half a line at its end is ignored.

    Raises:
        ValueError: the file is not there, or a whole line is none of a log.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give --telemetry, and {path} is written first")
    for number, line in enumerate(text_lines(path, half_line=False), start=1):
        if line.strip():
            yield _parsed(path, number, line)


def _parsed(path: Path, number: int, line: str | bytes) -> LoggedRequest:
    try:
        return msgspec.json.decode(line, type=LoggedRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, line {number}: no log of finished requests: {error}") from error


def _refuse_other_file(path: Path) -> None:
    """Refuse to append to a file that does not begin like a log."""
    if not path.exists():
        return
    with path.open("rb") as file:
        first = file.readline()
    if first.endswith(b"\n"):
        _parsed(path, 1, first)
    elif not _BEGINNING.startswith(first[: len(_BEGINNING)]):
        raise ValueError(f"{path}: no log of finished requests; give another file")


def _size_of_whole_lines(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
