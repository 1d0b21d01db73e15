"""When the requests of a trace arrive: at their own times, or at drawn ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rescheduler.simulator.workloads.trace import Trace, TraceBlock

__all__ = ["ArrivalKind", "TimedTrace", "with_arrivals"]

ArrivalKind = Literal["revelation", "trace", "poisson", "gamma"]


@dataclass(frozen=True)
class TimedTrace:
    r"""The requests of another trace, at other times.

    Gaps of ``poisson`` are exponential with mean 1/rate; those of ``gamma`` follow

    .. math:: \Gamma(k, \theta), \qquad k = 1 / cv^2, \qquad \theta = cv^2 / rate

    with mean 1/rate and coefficient of variation cv: 1 is a Poisson process, more is burstier.
    The first request comes after a gap of its own.

    Attributes:
        trace: whose requests they are.
        kind: ``trace``: its own times; ``poisson``; ``gamma``; ``revelation``: none, a request
            is there as soon as the simulator has room for it.
        scale: multiplies the rate of ``trace``: 2 makes it arrive twice as fast.
        rate: mean requests per second of ``poisson`` and ``gamma``.
        cv: of ``gamma``.

    Raises:
        ValueError: an unknown kind, a number that is not above 0, or ``trace`` for a trace
            without times.
    """

    trace: Trace
    kind: ArrivalKind
    scale: float = 1.0
    rate: float = 1.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what gives no times."""
        if self.kind not in get_args(ArrivalKind):
            raise ValueError(
                f"no arrivals {self.kind!r}; known: {', '.join(get_args(ArrivalKind))}"
            )
        for name in ("scale", "rate", "cv"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.kind == "trace" and not self.trace.has_arrivals:
            raise ValueError(
                f"{self.trace.name} has no arrival times; take arrivals poisson or gamma, or "
                "revelation, which needs none"
            )

    @property
    def name(self) -> str:
        """Name of the trace."""
        return self.trace.name

    @property
    def has_arrivals(self) -> bool:
        """Whether there are times."""
        return self.kind != "revelation"

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield the trace's blocks with these arrivals.

        Gaps are drawn from a generator of their own, so that a seed gives the same lengths
        whatever the arrivals are.
        """
        (gaps,) = generator.spawn(1)
        now = 0.0
        for block in self.trace.blocks(generator):
            n = len(block.prompt)
            if self.kind == "trace":
                arrival = block.arrival / self.scale
            elif self.kind == "revelation":
                arrival = np.full(n, np.nan)
            else:
                shape = 1.0 if self.kind == "poisson" else self.cv**-2
                arrival = now + np.cumsum(gaps.gamma(shape, 1 / (shape * self.rate), n))
                now = float(arrival[-1])
            yield block._replace(arrival=arrival)


def with_arrivals(
    trace: Trace, kind: ArrivalKind, scale: float = 1.0, rate: float = 1.0, cv: float = 1.0
) -> Trace:
    """Return a trace with other arrivals, see `TimedTrace`.

    Raises:
        ValueError: as `TimedTrace`.
    """
    return TimedTrace(trace, kind, scale, rate, cv)
