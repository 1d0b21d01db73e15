"""Requests as the simulator reads them: streams of blocks of arrival times and lengths."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK_REQUESTS",
    "Trace",
    "TraceBlock",
    "block_sizes",
    "first_requests",
    "lengths_block",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BLOCK_REQUESTS = 65_536
"""Most requests in a block, so that memory does not grow with a trace's length."""


class TraceBlock(NamedTuple):
    """Requests that follow one another in a trace.

    Attributes:
        arrival: [n] seconds from the start, ascending; NaN where the trace has no times.
        prompt: [n] prompt tokens, at least 1.
        output: [n] tokens that the request generates, at least 1.
        template: [n] row of a recording of forecasts that the request repeats; -1 without.
    """

    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    template: IntArray


class Trace(Protocol):
    """A stream of requests: a file that is read, or a distribution that is drawn from."""

    @property
    def name(self) -> str:
        """What errors and reports call it."""
        ...

    @property
    def has_arrivals(self) -> bool:
        """Whether its requests have arrival times."""
        ...

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield all requests from the first on, at most `BLOCK_REQUESTS` at a time.

        Args:
            generator: of whatever is drawn; the same state gives the same requests.

        Raises:
            ValueError: a file cannot be read on, with its line.
        """
        ...


def lengths_block(
    prompt: IntArray, output: IntArray, template: IntArray | None = None
) -> TraceBlock:
    """Return a block without arrival times."""
    return TraceBlock(
        arrival=np.full(len(prompt), np.nan),
        prompt=np.ascontiguousarray(prompt, dtype=np.int64),
        output=np.ascontiguousarray(output, dtype=np.int64),
        template=np.full(len(prompt), -1, dtype=np.int64) if template is None else template,
    )


def block_sizes(requests: int) -> Iterator[int]:
    """Yield the sizes of the blocks that make up so many requests."""
    for start in range(0, requests, BLOCK_REQUESTS):
        yield min(BLOCK_REQUESTS, requests - start)


def first_requests(trace: Trace, generator: np.random.Generator, at_most: int) -> TraceBlock:
    """Return the first requests of a trace as one block, such as a sample of its lengths.

    Raises:
        ValueError: as `Trace.blocks`, or ``at_most`` is below 1.
    """
    if at_most < 1:
        raise ValueError(f"at least one request must be asked for, not {at_most}")
    taken: list[TraceBlock] = []
    missing = at_most
    for block in trace.blocks(generator):
        taken.append(block)
        missing -= len(block.prompt)
        if missing <= 0:
            break
    return TraceBlock(
        arrival=np.concatenate([block.arrival for block in taken])[:at_most],
        prompt=np.concatenate([block.prompt for block in taken])[:at_most],
        output=np.concatenate([block.output for block in taken])[:at_most],
        template=np.concatenate([block.template for block in taken])[:at_most],
    )
