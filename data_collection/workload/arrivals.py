"""When requests arrive: as fast as the concurrency allows, at a rate, or as in a trace."""

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

__all__ = ["Arrivals", "arrival_times"]


@dataclass(frozen=True)
class Arrivals:
    """How prompts are driven.

    Attributes:
        kind: ``closed`` keeps ``concurrency`` requests running; ``poisson`` starts them at
            ``rate``; ``trace`` at the times of ``trace``.
        concurrency: most requests in flight at once, for every kind.
        rate: mean requests per second of ``poisson``.
        trace: CSV file with a column ``arrival_s`` (seconds), plain or gzipped.
        scale: multiplies the rate of ``trace``: 2 makes it arrive twice as fast.
        seed: of the Poisson arrivals.
    """

    kind: Literal["closed", "poisson", "trace"] = "closed"
    concurrency: int = 64
    rate: float = 1.0
    trace: str | None = None
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.rate <= 0 or self.scale <= 0:
            raise ValueError("rate and scale must be above 0")
        if self.kind == "trace" and self.trace is None:
            raise ValueError("arrivals of kind 'trace' need the path of a trace")


def arrival_times(arrivals: Arrivals) -> Iterator[float]:
    """Yield seconds after the start at which requests arrive, non-decreasing.

    For ``poisson`` the gaps are independent and exponential with mean 1/rate.

    Raises:
        ValueError: the trace cannot be read or is empty, or its times are not non-decreasing.
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
            yield from _trace_times(Path(arrivals.trace), arrivals.scale)


def _trace_times(path: Path, scale: float) -> Iterator[float]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            first = last = None
            for row in csv.DictReader(file):
                try:
                    time = float(row["arrival_s"])
                    if not math.isfinite(time):
                        raise ValueError(time)
                except (KeyError, TypeError, ValueError):
                    raise ValueError(
                        f"{path}: needs a column 'arrival_s' of seconds, found {dict(row)}"
                    ) from None
                if first is None:
                    first = last = time
                if last is not None and time < last:
                    raise ValueError(f"{path}: arrival {time} comes before {last}")
                last = time
                yield (time - first) / scale
            if first is None:
                raise ValueError(f"{path}: no arrivals found")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
