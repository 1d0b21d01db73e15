"""Units of the times in traces: what a trace would be in each, and when to ask which it is."""

from typing import Literal, NamedTuple, get_args

__all__ = [
    "SAMPLED",
    "Expected",
    "TimeSample",
    "TimeUnit",
    "check_unit",
    "refuse_doubt",
    "ticks",
    "words",
]

TimeUnit = Literal["s", "ms", "us", "ns"]

SAMPLED = 10_000
"""Requests from the beginning of a trace by which its unit is judged."""

_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_DATES = 1e9, 4.1e9
"""Seconds since 1970 from 2001 to 2099: whatever the unit, one power of 1000 fits."""

_RATE_OF_FRACTIONS = 0.001


def check_unit(given: str | None) -> None:
    """Refuse what is no unit of time.

    Raises:
        ValueError: it is none.
    """
    if given is not None and given not in get_args(TimeUnit):
        raise ValueError(f"time_unit is one of {', '.join(get_args(TimeUnit))}, not {given!r}")


class Expected(NamedTuple):
    """The rates that the mean of a trace's beginning is expected between.

    Attributes:
        slowest: requests per second.
        fastest: requests per second.
        requests: fewer are too few to judge.
        whole: whether the times are published as whole numbers.
    """

    slowest: float
    fastest: float
    requests: int = 2
    whole: bool = False


class TimeSample(NamedTuple):
    """The times of a trace's beginning.

    Attributes:
        requests: number of them.
        first: time of the first.
        last: time of the last.
        whole: whether all are whole numbers.
    """

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

    Args:
        where: the file and the column, for the error.
        unit: that was taken.
        sample: of the times.
        expected: of such traces.
        option: that says the unit, as users spell it.

    Raises:
        ValueError: with what the trace would be in both units.
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
    rate, at = sample.rate(unit), units.index(unit)
    if sample.requests < expected.requests or rate == float("inf"):
        return None, None
    uncertain = f"is taken for {_WORDS[unit]}, which is uncertain"
    longer = units[at - 1] if at > 0 else None
    if rate > expected.fastest:
        return uncertain, longer
    if rate < expected.slowest and at + 1 < len(units):
        return uncertain, units[at + 1]
    if (
        expected.whole
        and not sample.whole
        and longer is not None
        and sample.rate(longer) > _RATE_OF_FRACTIONS
    ):
        return f"has fractions, which {_WORDS[unit]} seldom have", longer
    return None, None


def _duration(seconds: float) -> str:
    for name, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= (2 if name == "days" else 0.95) * size:
            return f"{_number(seconds / size)} {name}"
    return f"{seconds:.2g} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"
