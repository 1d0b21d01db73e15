"""When requests arrive: as fast as the concurrency allows, at a rate, or as in a trace."""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from data_collection.text_file import text_lines
from data_collection.workload.time_units import (
    SAMPLED,
    Expected,
    TimeSample,
    TimeUnit,
    check_unit,
    refuse_doubt,
    ticks,
)

__all__ = ["EXPECTED", "Arrivals", "arrival_times"]

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
        seed: of the Poisson arrivals.
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
