"""Traces of LLM requests by name: files of them, and generators."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data_collection.files import ParquetFileError, text_lines
from data_collection.workload.arrivals import (
    LONGEST,
    SAMPLED,
    TimeSample,
    TimeUnit,
    check_unit,
    refuse_doubt,
    words,
)
from rescheduler.cluster.registry import Registry
from rescheduler.simulator.workloads.length_generators import (
    BurstGPTLike,
    BurstGPTSample,
    FiveTasks,
    GeometricLengths,
    HomogeneousLengths,
    LognormalLengths,
    MixedClasses,
    StarLengths,
)
from rescheduler.simulator.workloads.trace import (
    BLOCK_REQUESTS,
    MOST_CLIENTS,
    ReplayTrace,
    Trace,
    TraceBlock,
    lengths_block,
)
from rescheduler.simulator.workloads.trace_formats import Row, TraceFormatName, recognise

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

_LONGEST_LINE, _LONGEST_CLIENT = 1 << 20, 256


_FILE_OPTIONS = ("requests", "skip_empty", "format", "time_unit")


class TraceFile:
    """A file of requests: Azure's, BurstGPT's, Mooncake's, or Headway's own columns.

    Told apart by their first line, plain or gzipped, whatever the file is called:

    - Headway CSV: ``arrival_s,input_tokens,output_tokens``; ``arrival_s`` may be missing, and
      ``client`` may say who sent each request: clients are numbered as they appear; ``session``
      may say which conversation it belongs to;
    - Azure LLM inference traces 2023 and 2024: ``TIMESTAMP,ContextTokens,GeneratedTokens``;
    - BurstGPT (arXiv:2401.17644): ``Timestamp,Model,Request tokens,Response tokens,Total
      tokens,Log Type``; a request with 0 response tokens failed there, and is left out;
      ``Session ID`` may say which conversation a request belongs to;
    - Mooncake JSON Lines: ``timestamp`` (ms), ``input_length``, ``output_length``, and
      ``hash_ids`` of the prompt's blocks, which may be missing.

    Other columns are ignored. Arrivals are counted from the first request that is read. Unless
    the unit of the arrivals is given or they are dates, it is refused if the trace's beginning is
    implausible in it, or as plausible in another one.

    Args:
        path: of the file.
        requests: number to read from the start; all when None.
        skip_empty: leave out requests without prompt or output tokens, which no simulator can
            run; an error otherwise.
        format: of the file; told by its first line when None.
        time_unit: of its arrivals; as its format has it when None.
        option: what the user calls ``time_unit``, for errors.

    Raises:
        ValueError: the file cannot be opened, its first line is of no known format, or the unit
            of its arrivals is in doubt.
    """

    def __init__(
        self,
        path: str | Path,
        requests: int | None = None,
        skip_empty: bool = False,
        format: TraceFormatName | None = None,
        time_unit: TimeUnit | None = None,
        option: str = "--trace.time-unit",
    ) -> None:
        if requests is not None and requests < 1:
            raise ValueError(f"{path}: requests must be at least 1, not {requests}")
        check_unit(time_unit)
        self._path = Path(path)
        self._requests = requests
        self._skip_empty = skip_empty
        try:
            self._reader = recognise(self._path, self._lines(), format, time_unit)
        except ParquetFileError as error:
            raise ValueError(
                f"{path}: a Parquet file, not a trace; of a recording of forecasts give "
                "`name: replay` and `recording: PATH`"
            ) from error
        self.read_as = self._read_as(format, time_unit, option)
        """In words: the format and the unit of time that were taken, and why."""

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
        first: float | None = None
        clients: dict[str, int] = {}
        requests = islice(self._checked(), self._requests)
        while rows := list(islice(requests, BLOCK_REQUESTS)):
            first = rows[0][1] if first is None else first
            yield self._block(rows, first, clients)
        if first is None:
            raise ValueError(f"{self._path}: no requests in it")

    def _lines(self) -> Iterator[str]:
        return text_lines(self._path, _LONGEST_LINE, again=True)

    def _read_as(
        self, format: TraceFormatName | None, time_unit: TimeUnit | None, option: str
    ) -> str:
        """Return which format and unit were taken and why; refuse a unit in doubt."""
        reader = self._reader
        form = reader.form
        said = "as given" if format else "by its first line"
        taken = f"{self._path.name}: {form.title}'s format {said}"
        if not reader.timed:
            return f"{taken}; no column {form.time}, so lengths without arrival times"
        unit = time_unit or form.unit
        if unit is None:
            return f"{taken}; arrivals are dates"
        sample = self._sample()
        if time_unit is None and sample is not None:
            where = f"{self._path}: {form.title}'s format {said}: {form.time}"
            refuse_doubt(where, unit, sample, form.expected, option)
        why = "as given" if time_unit else form.why
        taken = f"{taken}; {form.time} in {words(unit)}, {why}"
        if sample is None:
            return taken
        of_how_many = f"the first {SAMPLED:,}" if sample.requests == SAMPLED else "its"
        return f"{taken}: {of_how_many} requests are {sample.span(unit)}"

    def _sample(self) -> TimeSample | None:
        """Return the times of the beginning, up to a line that is wrong, which `blocks` reports."""
        times: list[float] = []
        with suppress(ValueError):
            times.extend(row[1] for row in islice(self._checked(), SAMPLED))
        if not times:
            return None
        whole = all(float(time).is_integer() for time in times)
        return TimeSample(len(times), times[0], times[-1], whole)

    def _checked(self) -> Iterator[Row]:
        path, timed = self._path, self._reader.timed
        logs_failures, skip_empty = self._reader.form.logs_failures, self._skip_empty
        last = -math.inf
        for row in self._reader.rows(path, self._lines()):
            line, time, prompt, output, client, _ = row
            if (output == 0 and logs_failures) or (skip_empty and 0 in (prompt, output)):
                continue
            if not (0 < prompt <= LONGEST and 0 < output <= LONGEST):
                raise ValueError(f"{path}:{line}: {_wrong_length(prompt, output)}")
            if timed:
                if not last <= time < math.inf:
                    raise ValueError(f"{path}:{line}: {_wrong_time(time)}")
                last = time
            if len(client) > _LONGEST_CLIENT:
                raise ValueError(
                    f"{path}:{line}: a client of {len(client)} characters, "
                    f"{_LONGEST_CLIENT} are the most: is it the right column?"
                )
            yield row

    def _block(self, rows: list[Row], first: float, numbers: dict[str, int]) -> TraceBlock:
        _, times, prompts, outputs, clients, prefixes = zip(*rows, strict=True)
        # Subtracted before the division, so that time stamps since 1970 lose no digits.
        since_first = np.array([time - first for time in times], dtype=np.float64)
        lengths = lengths_block(np.array(prompts), np.array(outputs))
        if self._reader.has_prefixes:
            lengths = lengths._replace(prefixes=np.array(prefixes, dtype=np.object_))
        return lengths._replace(
            arrival=since_first / self._reader.ticks,
            client=np.array([_number(numbers, client) for client in clients], dtype=np.int64),
        )


def announce_traces(verb: str, traces: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Say on standard error as what the files among some traces are read, each once.

    Args:
        verb: that reads them.
        traces: as configurations have them. A file that cannot be read is left to its simulation.

    Returns:
        The same for a result's notes; nothing without files.
    """
    said: dict[str, None] = {}
    for options in traces:
        with suppress(ValueError, TypeError):
            if "path" in options:
                said[TraceFile(**options).read_as] = None
    for sentence in said:
        print(f"headway {verb}: {sentence}", file=sys.stderr)
    return {"traces": list(said)} if said else {}


def create_trace(name: str | None = None, path: str | Path | None = None, **options: Any) -> Trace:
    """Return the trace that a configuration names.

    Args:
        name: of a generator, see `GENERATORS`.
        path: of a file, see `TraceFile`, instead of a name.
        **options: of the generator; of a file ``requests``, ``skip_empty``, ``format`` and
            ``time_unit``.

    Raises:
        ValueError: not exactly one of name and path, an unknown generator or option, or a value or
            a file that is refused.
    """
    if name is not None and path is None:
        return GENERATORS.create(name, options)
    if name is not None or path is None:
        raise ValueError("a trace is either the name of a generator or the path of a file")
    for option in options:
        if option not in _FILE_OPTIONS:
            raise ValueError(
                f"a trace file has no option {option!r}; it takes: {', '.join(_FILE_OPTIONS)}"
            )
    return TraceFile(path, **options)


def _number(numbers: dict[str, int], client: str) -> int:
    """Return the number of a client, and note it if it is new and not one of too many."""
    number = numbers.get(client, len(numbers))
    if number < MOST_CLIENTS - 1:
        numbers[client] = number
    return number


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
