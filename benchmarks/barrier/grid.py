"""The time of a step over a grid of loads on two engines."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from benchmarks.barrier.engines import Engines, read_steps
from benchmarks.support.stream_client import Stream, read_stream, session
from rescheduler.demo.demo_load import metric_total

Pair = Annotated[list[float], msgspec.Meta(min_length=2, max_length=2)]

SEQUENCES = 4
"""Different texts that prompts are the beginnings of."""
LONGEST = 3_000
"""Tokens of a prompt, at most."""

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 300.0
_MOST_TOKENS = 600


class Ask(msgspec.Struct, frozen=True):
    """A prompt of so many tokens, the beginning of one of `SEQUENCES` texts, and its answer's."""

    sequence: int
    prompt: int
    answer: int

    @property
    def fields(self) -> dict[str, Any]:
        text = random.Random(self.sequence).choices(range(1_000, 40_000), k=LONGEST)
        return {"model": "moe", "prompt": text[: self.prompt], "max_tokens": self.answer}


class Load(msgspec.Struct, frozen=True):
    """What an engine decodes: so many requests, with prompts of so many tokens."""

    requests: int
    prompt: int


class Point(msgspec.Struct, frozen=True):
    loads: tuple[Load, Load]

    @property
    def name(self) -> str:
        return "-".join(f"{load.requests}x{load.prompt}" for load in self.loads)


_LOADS = (Load(0, 0), Load(6, 512), Load(2, 3_000), Load(6, 1_536), Load(6, 3_000))
POINTS = tuple(Point((a, b)) for a in _LOADS for b in _LOADS if a.requests + b.requests)


class Measured(msgspec.Struct, frozen=True):
    """What was measured at a point, of both engines."""

    requests: Pair
    context: Pair  # tokens, in the middle of the time
    seconds: Pair  # of a step, in the median; 0 where it made none
    spread: Pair  # their interquartile range
    steps: Pair


async def fill_caches(engines: Engines) -> None:
    """Have both engines compute all prompts, so that they find them in their prefix caches."""
    asks = [Ask(number, LONGEST, 1) for number in range(SEQUENCES)]
    places: list[tuple[str, dict[str, str]]] = [(url, {}) for url in engines.urls]
    if len(places) == 1:
        places = [(engines.urls[0], {"X-data-parallel-rank": rank}) for rank in "01"]
    async with session(close=True) as client:
        await asyncio.gather(
            *(
                read_stream(client, url, ask.fields, Stream(), headers)
                for url, headers in places
                for ask in asks
            )
        )


async def measured(engines: Engines, point: Point, steps: int) -> Measured:
    """Have both engines decode the loads of a point for so many steps of each."""
    asks = [
        (rank, Ask(number % SEQUENCES, load.prompt, _MOST_TOKENS))
        for rank, load in enumerate(point.loads)
        for number in range(load.requests)
    ]
    streams = [Stream() for _ in asks]
    async with session(close=True) as client:
        reads = [
            asyncio.create_task(read_stream(client, engines.urls[rank], ask.fields, stream))
            for (rank, ask), stream in zip(asks, streams, strict=True)
        ]
        try:
            start = await _all_have(streams, reads, [2] * len(streams))
            end = await _all_have(streams, reads, [len(one.times) + steps for one in streams])
        finally:
            for one in reads:
                one.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
    await _until_idle(engines.urls)
    return _figures(engines, point, start, end)


async def _all_have(
    streams: Sequence[Stream], reads: Sequence["asyncio.Task[None]"], tokens: Sequence[int]
) -> float:
    patience = time.monotonic() + _PATIENCE_SECONDS
    while any(len(one.times) < least for one, least in zip(streams, tokens, strict=True)):
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
