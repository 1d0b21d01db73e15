"""Requests as the simulator reads them: streams of blocks of arrival times and lengths."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast_recording import ForecastRecording, read_recording
from rescheduler.cluster.registry import COUNT, Checked

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BLOCK_REQUESTS = 65_536
"""Most requests in a block, so that memory does not grow with a trace's length."""

MOST_CLIENTS = 4_096
"""Clients of a file that are told apart: all that come later count as one, the last."""


_NO_PREFIXES = np.empty(0, dtype=np.object_)


class TraceBlock(NamedTuple):
    """Requests that follow one another in a trace.

    Attributes:
        arrival: [n] seconds from the start, ascending; NaN where the trace has no times.
        prompt: [n] prompt tokens, at least 1.
        output: [n] tokens that the request generates, at least 1.
        template: [n] row of a recording of forecasts that the request repeats; -1 without.
        client: [n] number of the account that sent it, below `MOST_CLIENTS` where a file says it;
            0 without.
        prefixes: [n] bytes of the keys (uint64) of its prompt's prefixes, each of which stands for
            all before it; empty where the trace has none.
    """

    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    template: IntArray
    client: IntArray
    prefixes: npt.NDArray[np.object_] = _NO_PREFIXES


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
        client=np.zeros(len(prompt), dtype=np.int64),
    )


def block_sizes(requests: int) -> Iterator[int]:
    """Yield the sizes of the blocks that make up so many requests."""
    for start in range(0, requests, BLOCK_REQUESTS):
        yield min(BLOCK_REQUESTS, requests - start)


def first_requests(trace: Trace, generator: np.random.Generator, at_most: int) -> TraceBlock:
    """Return the first requests of a trace as one block, such as a sample of its lengths.

    Raises:
        ValueError: as `Trace.blocks`.
    """
    taken: list[TraceBlock] = []
    missing = at_most
    for block in trace.blocks(generator):
        taken.append(block)
        missing -= len(block.prompt)
        if missing <= 0:
            break
    columns = zip(*taken, strict=True)
    return TraceBlock(*(np.concatenate(column)[:at_most] for column in columns))


ArrivalKind = Literal["revelation", "trace", "poisson", "gamma"]


def timed_blocks(
    trace: Trace,
    generator: np.random.Generator,
    kind: ArrivalKind,
    scale: float = 1.0,
    rate: float = 1.0,
    cv: float = 1.0,
) -> Iterator[TraceBlock]:
    r"""Yield the blocks of a trace with other arrivals; with its own for ``revelation``.

    Gaps of ``poisson`` are exponential with mean 1/rate; those of ``gamma`` follow

    .. math:: \Gamma(k, \theta), \qquad k = 1 / cv^2, \qquad \theta = cv^2 / rate

    with mean 1/rate and coefficient of variation cv: 1 is a Poisson process, more is burstier.
    The first request comes after a gap of its own. Gaps are drawn from a generator of their own,
    so that a seed gives the same lengths whatever the arrivals are.
    """
    if kind == "revelation":
        yield from trace.blocks(generator)
        return
    (gaps,) = generator.spawn(1)
    now = 0.0
    for block in trace.blocks(generator):
        if kind == "trace":
            arrival = block.arrival / scale
        else:
            shape = 1.0 if kind == "poisson" else cv**-2
            arrival = now + np.cumsum(gaps.gamma(shape, 1 / (shape * rate), len(block.prompt)))
            now = float(arrival[-1])
        yield block._replace(arrival=arrival)


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
        now, runs = 0.0, 0
        for size in block_sizes(self.requests):
            starts = generator.integers(0, n, -(-size // length))
            chosen = ((starts[:, None] + np.arange(length)) % n).ravel()[:size]
            arrival = now + np.cumsum(gaps[chosen])
            now = float(arrival[-1])
            columns = (column[chosen] for column in self.recorded if len(column))
            drawn = TraceBlock(*columns)._replace(arrival=arrival)
            yield self._told_apart(drawn, runs + np.arange(size) // length)
            runs += len(starts)

    def _told_apart(self, drawn: TraceBlock, run: IntArray) -> TraceBlock:
        """Give each run prefixes of its own: what is drawn twice has not been there before."""
        prefixes = np.empty(len(drawn.prefixes), dtype=np.object_)
        for i, recorded in enumerate(drawn.prefixes):
            keys = np.frombuffer(recorded, dtype=np.uint64)
            prefixes[i] = (keys ^ (np.uint64(run[i]) << np.uint64(40))).tobytes()
        return drawn._replace(prefixes=prefixes)

    def _gaps(self) -> npt.NDArray[np.float64]:
        """Return [N] seconds before each request."""
        arrival = self.recorded.arrival
        gaps = np.diff(arrival, prepend=arrival[0])
        if len(gaps) > 1:
            gaps[0] = gaps[1:].mean()
        return gaps


@dataclass(frozen=True, kw_only=True)
class ReplayTrace(Checked, requests=COUNT):
    """Recorded requests, drawn with replacement: their lengths are those that were forecast.

    A block's ``template`` is the request's number in the recording, which the forecast source
    ``replay`` of the same file looks up.

    Attributes:
        recording: path of a recording of forecasts.
        requests: how many are drawn.
        recorded: what is in the recording.
    """

    name: ClassVar[str] = "replay"
    has_arrivals: ClassVar[bool] = False

    recording: str | Path
    requests: int = 10_000
    recorded: ForecastRecording = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the recording."""
        object.__setattr__(self, "recorded", read_recording(Path(self.recording)))
        super().__post_init__()

    def _section(self) -> str:
        return f"{self.name}: "

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield all requests, at most `BLOCK_REQUESTS` at a time."""
        prompt, output = self.recorded.prompt, self.recorded.output
        for size in block_sizes(self.requests):
            template = generator.integers(0, len(output), size)
            yield lengths_block(prompt[template], output[template], template)
