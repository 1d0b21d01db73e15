"""The steps of an engine as it served them: a CSV file, and which engine it was beside it."""

import csv
import io
import math
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from data_collection.files import read_text, text_lines, write_text_atomically
from rescheduler.step_time.profile import EngineDescription

__all__ = ["StepLog", "read_engine", "read_steps"]

FloatArray = npt.NDArray[np.float64]

COLUMNS = ("new_tokens", "context_tokens", "seconds")
_ENGINE = ".engine.json"


class StepLog:
    """Writes a line for every step, which reaches the file at once.

    Args:
        path: CSV file, written anew.
        engine: whose steps they are.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, engine: EngineDescription) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(_engine_file(path), msgspec.json.encode(engine).decode() + "\n")
        self._file: TextIOWrapper = path.open("w", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def add(self, new: int, context: int, seconds: float) -> None:
        """Write a step."""
        self._writer.writerow((new, context, f"{seconds:.6f}"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_engine(path: Path) -> EngineDescription:
    """Return which engine a log of steps is of.

    Raises:
        ValueError: the file beside it is missing or damaged.
    """
    beside = _engine_file(path)
    try:
        return msgspec.json.decode(read_text(beside), type=EngineDescription)
    except ValueError as error:  # msgspec's too
        raise ValueError(
            f"{beside}: does not say whose steps {path.name} holds: {error}"
        ) from error


def read_steps(path: Path, start: int | None = None) -> FloatArray:
    """Return the steps of a log, [n, 3]: new tokens, context tokens, seconds.

    Args:
        path: CSV file, plain or gzipped; columns other than `COLUMNS` are ignored. The unit of
            the times is their column's name.
        start: byte from which on a log is read that is being written; its last line is left out
            until it is whole. The whole file when None.

    Raises:
        ValueError: the file cannot be read, has no such columns, or has a line that is not a
            step, with its number.
    """
    try:
        lines = text_lines(path) if start is None else _lines_from(path, start)
        reader = csv.DictReader(lines, COLUMNS if start else None)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"no column {missing[0]!r}; needs {', '.join(COLUMNS)}")
        steps = [_step(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error).removeprefix(f"{path}:").strip()
        raise ValueError(f"{path}: not a log of an engine's steps: {reason}") from error
    return np.array(steps, dtype=np.float64).reshape(len(steps), len(COLUMNS))


def _lines_from(path: Path, start: int) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(start)
        text = file.read().decode()
    yield from io.StringIO(text[: text.rfind("\n") + 1], newline="")


def _step(line: int, row: dict[str, str]) -> tuple[float, ...]:
    try:
        step = tuple(float(row[name]) for name in COLUMNS)
    except (TypeError, ValueError):
        raise ValueError(f"line {line}: {', '.join(COLUMNS)} must be numbers") from None
    if not all(0 <= value < math.inf for value in step) or step[2] == 0:
        raise ValueError(f"line {line}: tokens below 0, or seconds not above 0")
    return step


def _engine_file(path: Path) -> Path:
    return path.with_name(path.name + _ENGINE)
