"""A trace drawn again from itself, so that seeds mean something where the requests are given."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rescheduler.simulator.workloads.trace import TraceBlock, block_sizes

__all__ = ["ResampledTrace"]

_RUN = 500
_LEAST_RUNS = 20


@dataclass(frozen=True)
class ResampledTrace:
    r"""Runs of consecutive requests of a trace, drawn with replacement and put end to end.

    A file's requests are the same at every seed, so that all seeds would give one result and
    an interval over them would say nothing. This is the circular block bootstrap: a run of
    :math:`\min(500, \lceil N / 20 \rceil)` consecutive requests begins at a request drawn
    uniformly, and past the last request goes on with the first. Within a run the order of the
    requests and the gaps between their arrivals are kept, hence bursts too; the first request
    of all has a mean gap before it. What repeats over more requests than a run, such as the time
    of day, is lost.

    Attributes:
        name: of the trace.
        recorded: [N] its requests.
        requests: how many are drawn.

    Source: Politis and Romano 1992, 'A circular block-resampling procedure for stationary data'.
    """

    name: str
    recorded: TraceBlock
    requests: int

    @property
    def has_arrivals(self) -> bool:
        """Whether the requests have arrival times."""
        return not np.isnan(self.recorded.arrival[0])

    @property
    def rate(self) -> float:
        """Mean requests per second as recorded; NaN without times, infinite if all are at once."""
        arrival = self.recorded.arrival
        if len(arrival) < 2:
            return float("nan")
        span = float(arrival[-1] - arrival[0])
        return (len(arrival) - 1) / span if span != 0 else float("inf")

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield the drawn requests, at most `BLOCK_REQUESTS` at a time."""
        gaps = self._gaps()
        n = len(self.recorded.prompt)
        length = min(_RUN, -(-n // _LEAST_RUNS))
        now = 0.0
        for size in block_sizes(self.requests):
            starts = generator.integers(0, n, -(-size // length))
            chosen = ((starts[:, None] + np.arange(length)) % n).ravel()[:size]
            arrival = now + np.cumsum(gaps[chosen])
            now = float(arrival[-1])
            yield TraceBlock(
                arrival=arrival,
                prompt=self.recorded.prompt[chosen],
                output=self.recorded.output[chosen],
                template=self.recorded.template[chosen],
            )

    def _gaps(self) -> npt.NDArray[np.float64]:
        """Return [N] seconds before each request."""
        arrival = self.recorded.arrival
        gaps = np.diff(arrival, prepend=arrival[0])
        if len(gaps) > 1:
            gaps[0] = gaps[1:].mean()
        return gaps
