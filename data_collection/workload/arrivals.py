"""When requests arrive: as fast as the concurrency allows, at a rate, or as in a trace."""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from data_collection.files import text_lines

TimeUnit = Literal["s", "ms", "us", "ns"]

LONGEST = 10_000_000
"""Tokens above which a length is taken for a mistake."""

SAMPLED = 10_000
"""Requests from the beginning of a trace by which its unit is judged."""

_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_DATES = 1e9, 4.1e9
"""Seconds since 1970 from 2001 to 2099: whatever the unit, one power of 1000 fits."""

_RATE_OF_FRACTIONS = 0.001


def check_unit(given: str | None) -> None:
    """Raise `ValueError` for an invalid unit of time."""
    if given is not None and given not in get_args(TimeUnit):
        raise ValueError(f"time_unit is one of {', '.join(get_args(TimeUnit))}, not {given!r}")


class Expected(NamedTuple):
    """The rates that the mean of a trace's beginning is expected between.

    Attributes:
        slowest: requests per second; so is ``fastest``.
        requests: fewer are too few to judge.
        whole: whether the times are published as whole numbers.
    """

    slowest: float
    fastest: float
    requests: int = 2
    whole: bool = False


class TimeSample(NamedTuple):
    """The times of a trace's beginning: how many, the first and last, whether all are whole."""

    requests: int
    first: float
    last: float
    whole: bool

    def rate(self, unit: TimeUnit) -> float:
        """Return requests per second in a unit; infinite if all come at once."""
        span = (self.last - self.first) / _TICKS[unit]
        return (self.requests - 1) / span if span > 0 else float("inf")

    def span(self, unit: TimeUnit) -> str:
        """Return in words how long it is and how many requests that is a second."""
        seconds = (self.last - self.first) / _TICKS[unit]
        if seconds == 0:
            return "at one time"
        rate = _number(self.rate(unit))
        return f"in {_duration(seconds)} ({rate} request{'s' * (rate != '1')}/s)"


def ticks(unit: TimeUnit) -> int:
    """Return how many of a unit are a second."""
    return _TICKS[unit]


def words(unit: TimeUnit) -> str:
    """Return a unit's name."""
    return _WORDS[unit]


def refuse_doubt(
    where: str, unit: TimeUnit, sample: TimeSample, expected: Expected, option: str
) -> None:
    """Refuse times that are implausible in the unit that was taken, or as plausible in another.

    Raises:
        ValueError: with the file and the column, what the trace would be in both units, and the
            option that says the unit, as users spell it.
    """
    why, other = _doubt(unit, sample, expected)
    if why is None:
        return
    readings = [
        f"as {_WORDS[unit]}: {sample.requests:,} requests {sample.span(unit)}",
        *([f"as {_WORDS[other]}: {sample.span(other)}"] if other else []),
    ]
    values = " or ".join([*([other] if other else []), unit])
    raise ValueError(f"{where} {why}: {'; '.join(readings)}; say {option} {values}")


def _doubt(
    unit: TimeUnit, sample: TimeSample, expected: Expected
) -> tuple[str | None, TimeUnit | None]:
    """Return what is odd about a unit and which one it may be instead."""
    units: tuple[TimeUnit, ...] = get_args(TimeUnit)
    since_1970 = [
        other for other in units if _DATES[0] <= sample.first / _TICKS[other] <= _DATES[1]
    ]
    if since_1970 and unit not in since_1970:
        return f"looks like {_WORDS[since_1970[0]]} since 1970", since_1970[0]
    if since_1970 and not expected.whole:
        return None, None  # dates, in this unit: however few or many requests came
    rate, at = sample.rate(unit), units.index(unit)
    if sample.requests < expected.requests or rate == float("inf"):
        return None, None
    uncertain = f"is taken for {_WORDS[unit]}, which is uncertain"
    longer = units[at - 1] if at > 0 else None
    if rate > expected.fastest:
        return uncertain, longer
    if rate < expected.slowest and at + 1 < len(units):
        return uncertain, units[at + 1]
    fractions = expected.whole and not sample.whole
    if fractions and longer is not None and sample.rate(longer) > _RATE_OF_FRACTIONS:
        return f"has fractions, which {_WORDS[unit]} seldom have", longer
    return None, None


def _duration(seconds: float) -> str:
    for name, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= (2 if name == "days" else 0.95) * size:
            return f"{_number(seconds / size)} {name}"
    return f"{seconds:.2g} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


EXPECTED = Expected(0.01, 1000, requests=10)
"""Of times in a column whose name says that they are seconds."""


@dataclass(frozen=True)
class Arrivals:
    """How prompts are driven.

    Attributes:
        kind: ``closed`` keeps ``concurrency`` requests running; ``poisson`` starts them at
            ``rate``; ``trace`` at the times of ``trace``.
        concurrency: most requests in flight at once, for every kind.
        rate: mean requests per second of ``poisson``.
        trace: CSV file with a column ``arrival_s``, plain or gzipped.
        time_unit: s, ms, us or ns, of the times in ``trace``. Seconds when None, as the column's
            name has it; if the trace is implausible in seconds it is refused.
        scale: multiplies the rate of ``trace``: 2 makes it arrive twice as fast.
        seed: Seed of the Poisson arrivals.
    """

    kind: Literal["closed", "poisson", "trace"] = "closed"
    concurrency: int = 64
    rate: float = 1.0
    trace: str | None = None
    time_unit: TimeUnit | None = None
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.rate <= 0 or self.scale <= 0:
            raise ValueError("rate and scale must be above 0")
        check_unit(self.time_unit)
        if self.kind == "trace" and self.trace is None:
            raise ValueError("arrivals of kind 'trace' need the path of a trace")


def arrival_times(arrivals: Arrivals) -> Iterator[float]:
    """Yield seconds after the start at which requests arrive, non-decreasing.

    For ``poisson`` the gaps are independent and exponential with mean 1/rate.

    Raises:
        ValueError: the trace cannot be read or is empty, its times are not non-decreasing, or
            their unit is in doubt.
    """
    match arrivals.kind:
        case "closed":
            while True:
                yield 0.0
        case "poisson":
            generator = np.random.default_rng(arrivals.seed)
            now = 0.0
            while True:
                now += float(generator.exponential(1.0 / arrivals.rate))
                yield now
        case "trace":
            assert arrivals.trace is not None
            yield from _trace_times(Path(arrivals.trace), arrivals.scale, arrivals.time_unit)


def _trace_times(path: Path, scale: float, unit: TimeUnit | None) -> Iterator[float]:
    times = _read_times(path)
    beginning = list(islice(times, SAMPLED))
    if not beginning:
        raise ValueError(f"{path}: no arrivals found")
    first = beginning[0]
    if unit is None:
        sample = TimeSample(len(beginning), first, beginning[-1], whole=False)
        refuse_doubt(f"{path}: arrival_s", "s", sample, EXPECTED, "--arrivals.time-unit")
    for time in chain(beginning, times):
        yield (time - first) / ticks(unit or "s") / scale


def _read_times(path: Path) -> Iterator[float]:
    last = -math.inf
    rows = csv.DictReader(text_lines(path))
    try:
        for row in rows:
            try:
                time = float(row["arrival_s"])
                if not math.isfinite(time):
                    raise ValueError(time)
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{path}:{rows.line_num}: needs a column 'arrival_s' of seconds, found "
                    f"{dict(row)}"
                ) from None
            if time < last:
                raise ValueError(f"{path}:{rows.line_num}: arrival {time} comes before {last}")
            last = time
            yield time
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num}: {error}") from error
