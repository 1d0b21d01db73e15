"""The steps of an engine as it served them: a CSV file, and which engine it was beside it."""

import csv
from io import TextIOWrapper
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from data_collection.atomic_file import write_text_atomically
from rescheduler.step_time.engine_description import EngineDescription

__all__ = ["COLUMNS", "StepLog", "read_engine", "read_steps"]

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
        ValueError: that is not said beside it.
    """
    beside = _engine_file(path)
    try:
        return msgspec.json.decode(beside.read_bytes(), type=EngineDescription)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{beside}: does not say whose steps {path.name} holds: {error}"
        ) from error


def read_steps(path: Path, start: int = 0) -> FloatArray:
    """Return the steps from a byte of the file on, [n, 3]: new tokens, context tokens, seconds.

    A last line that is being written is left out.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read().decode()
        lines = text[: text.rfind("\n") + 1].splitlines()
        if start == 0 and lines[:1] != [",".join(COLUMNS)]:
            raise ValueError(f"its first line is not {','.join(COLUMNS)}")
        rows = [[float(value) for value in line.split(",")] for line in lines[start == 0 :]]
        steps = np.array(rows).reshape(len(rows), len(COLUMNS))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no log of an engine's steps: {error}") from error
    return steps


def _engine_file(path: Path) -> Path:
    return path.with_name(path.name + _ENGINE)
