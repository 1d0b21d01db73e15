"""The time of a step over a grid of loads on two engines."""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from benchmarks.barrier.engines import Engines
from benchmarks.barrier.steps import read_steps
from benchmarks.barrier.streams import LONGEST, SEQUENCES, Ask, Stream, read, session
from rescheduler.demo.demo_load import metric_total

__all__ = ["POINTS", "Load", "Measured", "Point", "fill_caches", "measured"]

Pair = Annotated[list[float], msgspec.Meta(min_length=2, max_length=2)]

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 300.0
_MOST_TOKENS = 600


class Load(msgspec.Struct, frozen=True):
    """What an engine decodes: so many requests, with prompts of so many tokens."""

    requests: int
    prompt: int


class Point(msgspec.Struct, frozen=True):
    """The loads of both engines."""

    loads: tuple[Load, Load]

    @property
    def name(self) -> str:
        """Of its file."""
        return "-".join(f"{load.requests}x{load.prompt}" for load in self.loads)


_LOADS = (Load(0, 0), Load(6, 512), Load(2, 3_000), Load(6, 1_536), Load(6, 3_000))
POINTS = tuple(Point((a, b)) for a in _LOADS for b in _LOADS if a.requests + b.requests)


class Measured(msgspec.Struct, frozen=True):
    """What was measured at a point, of both engines.

    Attributes:
        requests: that each decoded.
        context: tokens of context of each, in the middle of the time.
        seconds: of its steps, in the median; 0 where it made none.
        spread: their interquartile range.
        steps: that this is of.
    """

    requests: Pair
    context: Pair
    seconds: Pair
    spread: Pair
    steps: Pair


async def fill_caches(engines: Engines) -> None:
    """Have both engines compute all prompts, so that they find them in their prefix caches."""
    asks = [Ask(number, LONGEST, 1) for number in range(SEQUENCES)]
    async with session() as client:
        if len(engines.urls) == 1:
            (url,) = engines.urls
            places: list[tuple[str, int | None]] = [(url, 0), (url, 1)]
        else:
            places = [(url, None) for url in engines.urls]
        await asyncio.gather(
            *(read(client, url, Stream(ask, 0.0), rank) for url, rank in places for ask in asks)
        )


async def measured(engines: Engines, point: Point, steps: int) -> Measured:
    """Have both engines decode the loads of a point for so many steps of each.

    Raises:
        RuntimeError: an engine fails, or does not get there.
    """
    asks = [
        (rank, Ask(number % SEQUENCES, load.prompt, _MOST_TOKENS))
        for rank, load in enumerate(point.loads)
        for number in range(load.requests)
    ]
    streams = [Stream(ask, 0.0) for _, ask in asks]
    async with session() as client:
        reads = [
            asyncio.create_task(read(client, engines.urls[rank], stream))
            for (rank, _), stream in zip(asks, streams, strict=True)
        ]
        try:
            start = await _all_have(streams, reads, [2] * len(streams))
            end = await _all_have(streams, reads, [one.tokens[-1] + steps for one in streams])
        finally:
            for one in reads:
                one.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
    await _until_idle(engines.urls)
    return _figures(engines, point, start, end)


async def _all_have(
    streams: Sequence[Stream], reads: Sequence["asyncio.Task[None]"], tokens: Sequence[int]
) -> float:
    """Return when all streams have so many tokens.

    Raises:
        RuntimeError: one ends before, or they take too long.
    """
    patience = time.monotonic() + _PATIENCE_SECONDS
    while not all(
        one.tokens and one.tokens[-1] >= least for one, least in zip(streams, tokens, strict=True)
    ):
        for one in reads:
            if one.done():
                await one
                raise RuntimeError("an answer ended before all had been measured")
        if time.monotonic() > patience:
            raise RuntimeError(f"the engines decode too little in {_PATIENCE_SECONDS:.0f} s")
        await asyncio.sleep(_POLL_SECONDS)
    return time.monotonic()


async def _until_idle(urls: Sequence[str]) -> None:
    patience = time.monotonic() + _PATIENCE_SECONDS
    for url in urls:
        while await asyncio.to_thread(metric_total, f"{url}/metrics", "vllm:num_requests_running"):
            if time.monotonic() > patience:
                raise RuntimeError(f"{url}: still decodes what nobody reads")
            await asyncio.sleep(_POLL_SECONDS)


def _figures(engines: Engines, point: Point, start: float, end: float) -> Measured:
    context, seconds, spread, counts = [], [], [], []
    for log, load in zip(engines.logs, point.loads, strict=True):
        steps = read_steps(log).between(start, end)
        times = steps.seconds(load.requests)
        quartiles = np.quantile(times, [0.25, 0.5, 0.75]) if len(times) else np.zeros(3)
        context.append(float(np.median(steps.context)) if len(times) else 0.0)
        seconds.append(float(quartiles[1]))
        spread.append(float(quartiles[2] - quartiles[0]))
        counts.append(float(len(times)))
    requests = [float(load.requests) for load in point.loads]
    return Measured(requests, context, seconds, spread, counts)
