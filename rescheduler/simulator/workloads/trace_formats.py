"""The formats in which traces of LLM requests are published, and how a line of each is read."""

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec

__all__ = ["Row", "RowReader", "recognise"]

_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)

Row = tuple[int, float, int, int]
"""Line, arrival in ticks (NaN without), prompt and output tokens of one request, unchecked."""


class RowReader(Protocol):
    """Reads the requests of one file."""

    @property
    def ticks(self) -> int:
        """Units of its arrivals in a second."""
        ...

    @property
    def timed(self) -> bool:
        """Whether its requests have arrivals."""
        ...

    @property
    def logs_failures(self) -> bool:
        """Whether requests without output are failures that were logged."""
        ...

    def rows(self, path: Path, lines: Iterator[str]) -> Iterator[Row]:
        """Yield the requests of all lines, the first line included.

        Raises:
            ValueError: a line that cannot be read, by path and number.
        """
        ...


def _microseconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return (moment - _EPOCH) // _MICROSECOND


@dataclass(frozen=True)
class _CSVFormat:
    """A published CSV format.

    Attributes:
        title: of the format.
        time: its column of arrivals.
        prompt: its column of prompt tokens.
        output: its column of generated tokens.
        clock: reads an arrival.
        ticks: units of ``clock`` in a second.
        timeless: whether the column of arrivals may be missing.
        logs_failures: whether requests without output are failures.
    """

    title: str
    time: str
    prompt: str
    output: str
    clock: Callable[[str], float] = float
    ticks: int = 1
    timeless: bool = False
    logs_failures: bool = False

    def missing(self, header: list[str]) -> list[str]:
        """Return the columns that a header lacks."""
        needed = (self.prompt, self.output) if self.timeless else self.columns
        return [column for column in needed if column not in header]

    @property
    def columns(self) -> tuple[str, str, str]:
        """The columns that are read."""
        return self.time, self.prompt, self.output


_FORMATS = (
    _CSVFormat("Headway", "arrival_s", "input_tokens", "output_tokens", timeless=True),
    _CSVFormat(
        "Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", clock=_microseconds, ticks=10**6
    ),
    _CSVFormat("BurstGPT", "Timestamp", "Request tokens", "Response tokens", logs_failures=True),
)


@dataclass(frozen=True)
class _CSVReader:
    """Reads a CSV file of a known format, with the columns of its own header."""

    form: _CSVFormat
    header: list[str]

    @property
    def ticks(self) -> int:
        return self.form.ticks

    @property
    def timed(self) -> bool:
        return self.form.time in self.header

    @property
    def logs_failures(self) -> bool:
        return self.form.logs_failures

    def rows(self, path: Path, lines: Iterator[str]) -> Iterator[Row]:
        reader = csv.reader(lines)
        next(reader)
        width, clock = len(self.header), self.form.clock
        time_at = self.header.index(self.form.time) if self.timed else None
        prompt_at = self.header.index(self.form.prompt)
        output_at = self.header.index(self.form.output)
        try:
            for row in reader:
                if not row:
                    continue
                if len(row) < width:
                    raise ValueError(
                        f"{path}:{reader.line_num}: {len(row)} columns, but the header has {width}"
                    )
                try:
                    time = math.nan if time_at is None else clock(row[time_at])
                    prompt, output = int(row[prompt_at]), int(row[output_at])
                except ValueError:
                    time, prompt, output = self._odd(row, f"{path}:{reader.line_num}")
                yield reader.line_num, time, prompt, output
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from error

    def _odd(self, row: list[str], where: str) -> tuple[float, int, int]:
        """Read a row whose token counts are written as 12.0; say what is wrong with another."""
        cells = dict(zip(self.header, row, strict=False))
        try:
            name, kind = self.form.time, "time"
            time = self.form.clock(cells[name]) if self.timed else math.nan
            kind, tokens = "whole number", []
            for name in (self.form.prompt, self.form.output):
                count = float(cells[name])
                if not count.is_integer():
                    raise ValueError
                tokens.append(int(count))
        except ValueError:
            raise ValueError(f"{where}: {name} is {cells[name][:40]!r}, no {kind}") from None
        return time, tokens[0], tokens[1]


class _MooncakeLine(msgspec.Struct):
    """What is read of a line; ``hash_ids`` and whatever else is there is skipped."""

    timestamp: float
    input_length: int
    output_length: int


class _MooncakeReader:
    """Reads Mooncake's JSON Lines."""

    ticks: ClassVar[int] = 1000
    timed: ClassVar[bool] = True
    logs_failures: ClassVar[bool] = False

    def rows(self, path: Path, lines: Iterator[str]) -> Iterator[Row]:
        decode = msgspec.json.Decoder(_MooncakeLine).decode
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                request = decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: no request of Mooncake's: {error}") from None
            yield number, request.timestamp, request.input_length, request.output_length


def recognise(path: Path, first_line: str) -> RowReader:
    """Return what reads a file that begins with this line.

    Raises:
        ValueError: it is of no known format, or lacks a column.
    """
    if not first_line.strip():
        raise ValueError(f"{path}: no requests in it")
    if first_line.startswith("{"):
        return _MooncakeReader()
    header = [column.strip() for column in next(csv.reader([first_line]))]
    for form in _FORMATS:
        if not form.missing(header):
            return _CSVReader(form, header)
    for form in _FORMATS:
        known = [column for column in form.columns if column in header]
        if known:
            raise ValueError(
                f"{path}:1: has the column {known[0]!r} as {form.title}'s traces do, but lacks "
                f"{', '.join(map(repr, form.missing(header)))}"
            )
    raise ValueError(
        f"{path}:1: unknown header {first_line.strip()[:200]!r}; known: "
        f"{'; '.join(','.join(form.columns) for form in _FORMATS)}; or Mooncake's JSON Lines with "
        "timestamp, input_length and output_length"
    )
