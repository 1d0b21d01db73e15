"""Traces read from files in the formats they are published in, block by block."""

import gzip
import io
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rescheduler.cluster.registry import Registry
from rescheduler.simulator.workloads.burstgpt_sample import BurstGPTSample
from rescheduler.simulator.workloads.five_tasks import FiveTasks
from rescheduler.simulator.workloads.forecast_recording import ReplayTrace
from rescheduler.simulator.workloads.length_generators import (
    GeometricLengths,
    HomogeneousLengths,
    LognormalLengths,
)
from rescheduler.simulator.workloads.mixed_classes import MixedClasses
from rescheduler.simulator.workloads.published_lengths import BurstGPTLike, StarLengths
from rescheduler.simulator.workloads.trace import BLOCK_REQUESTS, Trace, TraceBlock, lengths_block
from rescheduler.simulator.workloads.trace_formats import Row, recognise

__all__ = ["GENERATORS", "TraceFile", "create_trace", "read_trace"]

GENERATORS = Registry[Trace](
    "generator",
    {
        "burstgpt_like": BurstGPTLike,
        "burstgpt_sample": BurstGPTSample,
        "five_tasks": FiveTasks,
        "geometric": GeometricLengths,
        "homogeneous": HomogeneousLengths,
        "lognormal": LognormalLengths,
        "mixed_classes": MixedClasses,
        "replay": ReplayTrace,
        "star": StarLengths,
    },
)
"""Name in a configuration -> trace that is drawn, not read."""

LONGEST = 10_000_000
"""Tokens above which a length is taken for a mistake."""

_LONGEST_LINE = 1 << 20


class TraceFile:
    """A file of requests: Azure's, BurstGPT's, Mooncake's, or Headway's own columns.

    Told apart by their first line, plain or gzipped, whatever the file is called:

    - Headway CSV: ``arrival_s,input_tokens,output_tokens``; ``arrival_s`` may be missing;
    - Azure LLM inference traces 2023 and 2024: ``TIMESTAMP,ContextTokens,GeneratedTokens``;
    - BurstGPT (arXiv:2401.17644): ``Timestamp,Model,Request tokens,Response tokens,Total
      tokens,Log Type``; a request with 0 response tokens failed there, and is left out;
    - Mooncake JSON Lines: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

    Other columns are ignored. Arrivals are counted from the first request that is read.

    Args:
        path: of the file.
        requests: number to read from the start; all when None.
        skip_empty: leave out requests without prompt or output tokens, which no simulator can
            run; an error otherwise.

    Attributes:
        left_out: requests left out by the last reading, as far as it went.

    Raises:
        ValueError: the file cannot be opened, or its first line is of no known format.
    """

    def __init__(
        self, path: str | Path, requests: int | None = None, skip_empty: bool = False
    ) -> None:
        if requests is not None and requests < 1:
            raise ValueError(f"{path}: requests must be at least 1, not {requests}")
        self._path = Path(path)
        self._requests = requests
        self._skip_empty = skip_empty
        self.left_out = 0
        with _opened(self._path) as file:
            self._reader = recognise(self._path, next(_lines(self._path, file), ""))

    @property
    def name(self) -> str:
        """The file's name."""
        return self._path.name

    @property
    def has_arrivals(self) -> bool:
        """Whether the file has a column of arrivals."""
        return self._reader.timed

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield the requests in the file's order; nothing is drawn.

        Raises:
            ValueError: a line that is not a request, with its number; a file without requests;
                bytes that are no UTF-8 or no whole gzip file.
        """
        del generator
        self.left_out = 0
        first: float | None = None
        with _opened(self._path) as file:
            requests = islice(self._checked(_lines(self._path, file)), self._requests)
            while rows := list(islice(requests, BLOCK_REQUESTS)):
                first = rows[0][1] if first is None else first
                yield self._block(rows, first)
        if first is None:
            raise ValueError(f"{self._path}: no requests in it")

    def _checked(self, lines: Iterator[str]) -> Iterator[Row]:
        path, timed, logs_failures = self._path, self._reader.timed, self._reader.logs_failures
        skip_empty = self._skip_empty
        last = -math.inf
        for row in self._reader.rows(path, lines):
            line, time, prompt, output = row
            if (output == 0 and logs_failures) or (skip_empty and 0 in (prompt, output)):
                self.left_out += 1
                continue
            if not (0 < prompt <= LONGEST and 0 < output <= LONGEST):
                raise ValueError(f"{path}:{line}: {_wrong_length(prompt, output)}")
            if timed:
                if not last <= time < math.inf:
                    raise ValueError(f"{path}:{line}: {_wrong_time(time)}")
                last = time
            yield row

    def _block(self, rows: list[Row], first: float) -> TraceBlock:
        _, times, prompts, outputs = zip(*rows, strict=True)
        # Subtracted before the division, so that time stamps since 1970 lose no digits.
        since_first = np.array([time - first for time in times], dtype=np.float64)
        lengths = lengths_block(np.array(prompts), np.array(outputs))
        return lengths._replace(arrival=since_first / self._reader.ticks)


def read_trace(
    path: str | Path, requests: int | None = None, skip_empty: bool = False
) -> TraceFile:
    """Return the trace in a file, see `TraceFile`; its requests are read when they are needed.

    Raises:
        ValueError: the file cannot be opened, or its first line is of no known format.
    """
    return TraceFile(path, requests, skip_empty)


def create_trace(name: str | None = None, path: str | Path | None = None, **options: Any) -> Trace:
    """Return the trace that a configuration names.

    Args:
        name: of a generator, see `GENERATORS`.
        path: of a file, see `TraceFile`, instead of a name.
        **options: of the generator; ``requests`` and ``skip_empty`` of a file.

    Raises:
        ValueError: not exactly one of name and path, an unknown generator or option, or a value or
            a file that is refused.
    """
    if name is not None and path is None:
        return GENERATORS.create(name, options)
    if name is not None or path is None:
        raise ValueError("a trace is either the name of a generator or the path of a file")
    for option in options:
        if option not in ("requests", "skip_empty"):
            raise ValueError(
                f"a trace file has no option {option!r}; it takes: requests, skip_empty"
            )
    return read_trace(path, **options)


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    try:
        with path.open("rb") as raw:
            beginning = raw.peek(4)[:4]
            if beginning == b"PAR1":
                raise ValueError(
                    f"{path}: a Parquet file, not a trace; of a recording of forecasts give "
                    "`name: replay` and `recording: PATH`"
                )
            zipped = beginning[:2] == b"\x1f\x8b"
            with (
                gzip.GzipFile(fileobj=raw) if zipped else raw as binary,
                io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file,
            ):
                yield file
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def _lines(path: Path, file: io.TextIOWrapper) -> Iterator[str]:
    """Yield the lines; none is read without a bound, and none that is damaged is passed on."""
    number = 1
    try:
        while line := file.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise ValueError(f"{path}:{number}: not a trace: a line of over 1 MiB")
            yield line
            number += 1
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number}: not UTF-8 here or shortly after") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number}: the gzip file is not whole: {error}") from error


def _wrong_length(prompt: int, output: int) -> str:
    for what, tokens in (("prompt", prompt), ("output", output)):
        if tokens == 0:
            return (
                f"0 {what} tokens; a request has at least one: take the line out, or set "
                "skip_empty: true"
            )
        if tokens < 0:
            return f"{tokens} {what} tokens; a length cannot be negative"
        if tokens > LONGEST:
            return f"{tokens} {what} tokens are more than {LONGEST}: is it the right column?"
    raise AssertionError("both lengths are right")


def _wrong_time(time: float) -> str:
    if not math.isfinite(time):
        return f"{time} is not a time"
    return "arrives before the request above it; sort the file by time"
