"""The formats in which traces of LLM requests are published, and their rows."""

import csv
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, get_args

import msgspec

from data_collection.workload.arrivals import EXPECTED, Expected, TimeUnit, ticks
from predictor.past.length_memory import MOST_CHAIN

TraceFormatName = Literal["headway", "azure", "burstgpt", "mooncake"]

_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_WHOLE_FILE = ("[", "{\n", "{\r\n")

Row = tuple[int, float, int, int, str, bytes]
"""Line, arrival in ticks (NaN without), prompt and output tokens of one request, the name of its
client (empty without), and the keys of its prefixes (likewise), unchecked."""


@dataclass(frozen=True)
class TraceFormat:
    """A published format.

    Attributes:
        title: of the format.
        time: its column of arrivals.
        prompt: its column of prompt tokens.
        output: its column of generated tokens.
        unit: of its arrivals; None: they are dates.
        why: the unit is taken to be this.
        expected: of its arrivals, if they are in this unit.
        client: its column of clients, which may be missing; None: it has none.
        session: its column of conversations, likewise.
        timeless: whether the column of arrivals may be missing.
        logs_failures: whether requests without output are failures.
        lines: whether a line is a JSON object, not CSV.
    """

    title: str
    time: str
    prompt: str
    output: str
    unit: TimeUnit | None
    why: str
    expected: Expected
    client: str | None = None
    session: str | None = None
    timeless: bool = False
    logs_failures: bool = False
    lines: bool = False

    def missing(self, header: list[str]) -> list[str]:
        """Return the columns that a header lacks."""
        needed = (self.prompt, self.output) if self.timeless else self.columns
        return [column for column in needed if column not in header]

    @property
    def columns(self) -> tuple[str, str, str]:
        """The columns that are read."""
        return self.time, self.prompt, self.output


FORMATS: dict[TraceFormatName, TraceFormat] = {
    "headway": TraceFormat(
        "Headway",
        "arrival_s",
        "input_tokens",
        "output_tokens",
        unit="s",
        why="by the name of arrival_s",
        expected=EXPECTED,
        client="client",
        session="session",
        timeless=True,
    ),
    "azure": TraceFormat(
        "Azure",
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        unit=None,
        why="arrivals are dates",
        expected=Expected(0, math.inf),
    ),
    "burstgpt": TraceFormat(
        "BurstGPT",
        "Timestamp",
        "Request tokens",
        "Response tokens",
        unit="s",
        why="as BurstGPT is published",
        expected=Expected(0.002, 1000, requests=10),
        session="Session ID",
        logs_failures=True,
    ),
    "mooncake": TraceFormat(
        "Mooncake",
        "timestamp",
        "input_length",
        "output_length",
        unit="ms",
        why="as Mooncake's traces are published",
        expected=Expected(0.02, 50, whole=True),
        lines=True,
    ),
}
"""Name in a configuration -> format. Rates span three powers of ten where only a name that other
traces use, too, says the unit: then they are plausible in one unit alone."""


def _microseconds(text: str) -> int:
    if text.strip().isdecimal():  # 20231116 would be a date
        raise ValueError(text)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return (moment - _EPOCH) // _MICROSECOND


@dataclass(frozen=True)
class RowReader:
    """Reads the requests of one file of a known format, the first line's included.

    Attributes:
        form: of the file.
        header: its columns.
        unit: of its arrivals; None: they are dates.
    """

    form: TraceFormat
    header: Sequence[str]
    unit: TimeUnit | None

    @property
    def ticks(self) -> int:
        """Units of its arrivals in a second."""
        return 10**6 if self.unit is None else ticks(self.unit)

    @property
    def timed(self) -> bool:
        """Whether its requests have arrivals."""
        return self.form.time in self.header

    @property
    def has_prefixes(self) -> bool:
        """Whether requests may have keys of their prefixes."""
        return self.form.lines or self.form.session in self.header

    @property
    def _clock(self) -> Callable[[str], float]:
        return _microseconds if self.unit is None else float

    def rows(self, path: Path, lines: Iterator[str]) -> Iterator[Row]:
        """Yield the requests of the lines of a file; the path is for errors."""
        return self._of_json(path, lines) if self.form.lines else self._of_csv(path, lines)

    def _of_json(self, path: Path, lines: Iterator[str]) -> Iterator[Row]:
        decode = msgspec.json.Decoder(_MooncakeLine).decode
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                request = decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: no request of Mooncake's: {error}") from None
            time, prompt, output = request.timestamp, request.input_length, request.output_length
            yield number, time, prompt, output, "", _hash_ids(request.hash_ids)

    def _of_csv(self, path: Path, lines: Iterator[str]) -> Iterator[Row]:
        reader = csv.reader(lines)
        width, clock = len(self.header), self._clock
        time_at = self.header.index(self.form.time) if self.timed else None
        prompt_at = self.header.index(self.form.prompt)
        output_at = self.header.index(self.form.output)
        client = self.form.client
        client_at = self.header.index(client) if client in self.header else None
        session = self.form.session
        session_at = self.header.index(session) if session in self.header else None
        try:
            while _is_blank(next(reader, ["no lines"])):
                pass
            for row in reader:
                if len(row) != width:
                    if _is_blank(row):
                        continue
                    if len(row) < width or not _is_blank(row[width:]):
                        raise ValueError(
                            f"{path}:{reader.line_num}: {len(row)} columns, but the header has "
                            f"{width}"
                        )
                try:
                    time = math.nan if time_at is None else clock(row[time_at])
                    prompt, output = int(row[prompt_at]), int(row[output_at])
                except ValueError:
                    time, prompt, output = self._odd(row, f"{path}:{reader.line_num}")
                client = "" if client_at is None else row[client_at].strip()
                session = "" if session_at is None else row[session_at].strip()
                prefixes = _digest(session) if session else b""
                yield reader.line_num, time, prompt, output, client, prefixes
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from error

    def _odd(self, row: list[str], where: str) -> tuple[float, int, int]:
        """Read a row whose token counts are written as 12.0; say what is wrong with another."""
        cells = dict(zip(self.header, row, strict=False))
        try:
            name, kind = self.form.time, "time"
            if self.timed:
                kind += _other_kind_of_time(cells[name], self.unit)
            time = self._clock(cells[name]) if self.timed else math.nan
            kind, tokens = "whole number", []
            for name in (self.form.prompt, self.form.output):
                count = float(cells[name])
                if not count.is_integer():
                    raise ValueError
                tokens.append(int(count))
        except ValueError:
            raise ValueError(f"{where}: {name} is {cells[name][:40]!r}, no {kind}") from None
        return time, tokens[0], tokens[1]


def _is_blank(cells: list[str]) -> bool:
    return not "".join(cells).strip()


def _other_kind_of_time(text: str, unit: TimeUnit | None) -> str:
    """Return what to do about a date where a number should be, or a number where a date should."""
    try:
        if unit is None:
            float(text)
            return " as Azure's traces have it, a date, but a number: say its time_unit"
        _microseconds(text)
    except ValueError:
        return ""
    return f" in {unit}, but a date, as only Azure's traces have it, which needs no time_unit"


class _MooncakeLine(msgspec.Struct):
    """What is read of a line; whatever else is there is skipped."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: msgspec.Raw = msgspec.Raw()


_hashes = msgspec.json.Decoder(list[int | str])


def _hash_ids(given: msgspec.Raw) -> bytes:
    """Return the keys of the blocks of a prompt; none where they are of another kind."""
    try:
        ids = _hashes.decode(given)
    except msgspec.DecodeError:
        return b""
    if len(ids) > MOST_CHAIN:
        ids = [*ids[: MOST_CHAIN // 4], *ids[-(MOST_CHAIN - MOST_CHAIN // 4) :]]
    return b"".join(
        id.to_bytes(8, sys.byteorder)
        if isinstance(id, int) and 0 <= id < 1 << 40
        else _digest(str(id))
        for id in ids
    )


def _digest(name: str) -> bytes:
    """Return a key of a name."""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()


def recognise(
    path: Path,
    lines: Iterator[str],
    name: TraceFormatName | None = None,
    time_unit: TimeUnit | None = None,
) -> RowReader:
    """Return what reads a file.

    Args:
        path: of the file, for errors.
        lines: from its beginning on.
        name: of its format; None: its first line that is not blank tells.
        time_unit: of its arrivals; None: as its format has it.

    Raises:
        ValueError: it is of no known format or of several, or lacks a column of its format.
    """
    if name is not None and name not in FORMATS:
        raise ValueError(f"format is one of {', '.join(get_args(TraceFormatName))}, not {name!r}")
    number, first = next(((i, line) for i, line in enumerate(lines, 1) if line.strip()), (0, ""))
    if not first:
        raise ValueError(f"{path}: no requests in it")
    where = f"{path}:{number}"
    first = first.lstrip()
    if first.startswith(_WHOLE_FILE):
        raise ValueError(
            f"{where}: JSON over several lines, or an array; Mooncake's JSON Lines have one object "
            "a line, as `jq -c '.[]'` writes them"
        )
    is_json = first.startswith("{")
    form = FORMATS["mooncake"] if is_json and name is None else name and FORMATS[name]
    if form and form.lines != is_json:
        raise ValueError(
            f"{where}: format {name} is {'JSON Lines' if form.lines else 'CSV'}, but the file "
            f"begins {first.strip()[:60]!r}"
        )
    if form and form.lines:
        return RowReader(form, form.columns, time_unit or form.unit)
    try:
        header = [column.strip() for column in next(csv.reader([first]))]
    except csv.Error as error:
        raise ValueError(f"{where}: {error}") from error
    form = form or _of_header(where, header, first.strip())
    if form.missing(header):
        raise ValueError(
            f"{where}: lacks {', '.join(map(repr, form.missing(header)))}, which format {name} has"
        )
    read = (*form.columns, form.client, form.session)
    twice = [column for column in read if column is not None and header.count(column) > 1]
    if twice:
        raise ValueError(f"{where}: has the column {twice[0]!r} twice")
    if time_unit is not None and form.time not in header:
        raise ValueError(f"{where}: no {form.time} that time_unit could be of")
    return RowReader(form, header, time_unit or form.unit)


def _of_header(where: str, header: list[str], line: str) -> TraceFormat:
    """Return the format that a header belongs to."""
    tables = {name: form for name, form in FORMATS.items() if not form.lines}
    fitting = {name: form for name, form in tables.items() if not form.missing(header)}
    if len(fitting) > 1:
        raise ValueError(
            f"{where}: has the columns of several formats; say which format: {', '.join(fitting)}"
        )
    for form in fitting.values():
        return form
    for separator, said in ((";", "semicolons"), ("\t", "tabs")):
        columns = [column.strip() for column in line.split(separator)]
        if any(not form.missing(columns) for form in tables.values()):
            raise ValueError(f"{where}: columns are separated by {said}; save it with commas")
    for form in tables.values():
        known = [column for column in form.columns if column in header]
        if known:
            raise ValueError(
                f"{where}: has the column {known[0]!r} as {form.title}'s traces do, but lacks "
                f"{', '.join(map(repr, form.missing(header)))}"
            )
    raise ValueError(
        f"{where}: unknown header {line[:200]!r}; known: "
        f"{'; '.join(','.join(form.columns) for form in tables.values())}; or Mooncake's JSON "
        "Lines with timestamp, input_length and output_length"
    )
