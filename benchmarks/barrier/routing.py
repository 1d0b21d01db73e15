"""The same requests through vLLM's own balancer and through `headway serve`, two ranks behind."""

import asyncio
import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from msgspec.structs import replace

from benchmarks.barrier.engines import Engines, contexts_at, read_steps
from benchmarks.barrier.grid import LONGEST, SEQUENCES, Ask
from benchmarks.support.deployments import patient, proxy
from benchmarks.support.stream_client import Stream, read_stream, session

BALANCER = "vllm"
"""One server that divides its requests among its ranks."""

ARMS: dict[str, dict[str, Any] | None] = {
    BALANCER: None,
    "in_turns": None,
    "vllm_score": {"name": "vllm"},
    "jsq_load": {"name": "jsq_load"},
    "bfio": {"name": "bfio", "horizon": 0},
}
"""What `headway serve` routes by, if it serves; once by the balancer's own score.

Without it requests go to the one server, or to the two ranks' servers in turns, which shows what a
second server costs on the same cores.
"""

AT_ONCE = 20
"""Requests under way: the ranks decode twelve, the others wait."""

_SHORT, _LONG = (32, 512), (1_500, LONGEST)
_ANSWER = (16, 144)


def asks_of(number: int, requests: int) -> list[Ask]:
    """Return the requests of a round: half with long prompts, in random order."""
    generator = random.Random(number)
    lengths = [_SHORT, _LONG] * (requests // 2)
    generator.shuffle(lengths)
    return [
        Ask(generator.randrange(SEQUENCES), generator.randint(*length), generator.randint(*_ANSWER))
        for length in lengths
    ]


def served_by(engines: Engines, arm: str, asks: Sequence[Ask], folder: Path) -> dict[str, float]:
    routing = ARMS[arm]
    if routing is None:
        return asyncio.run(_serve(engines, engines.urls, asks))
    deployment = patient(replace(engines.deployment, routing=routing, migration=None))
    with proxy(deployment, folder):
        return asyncio.run(_serve(engines, [deployment.proxy_url], asks))


async def _serve(engines: Engines, urls: Sequence[str], asks: Sequence[Ask]) -> dict[str, float]:
    """Keep so many requests under way until none are left; they go to the servers in turns."""
    gate = asyncio.Semaphore(AT_ONCE)
    streams = [Stream() for _ in asks]

    async def serve(client: aiohttp.ClientSession, url: str, ask: Ask, stream: Stream) -> None:
        async with gate:
            await read_stream(client, url, ask.fields, stream)

    async with session(close=True) as client:
        turns = zip(cycle(urls), asks, streams, strict=False)
        await asyncio.gather(*(serve(client, *one) for one in turns))
    return _figures(engines, streams)


def _figures(engines: Engines, streams: Sequence[Stream]) -> dict[str, float]:
    r"""Return figures of the time in which more requests waited, and of all requests.

    ``fullest``: the context of the fuller rank as a multiple of the mean,
    :math:`\int \max_g L_g\,dt \,/ \int \bar L\,dt`.
    """
    start, end = streams[AT_ONCE].sent, streams[-1].sent
    came = sum(start <= time <= end for one in streams for time in one.times)
    logs = [read_steps(log) for log in engines.logs]
    times = np.unique(np.concatenate([log.between(start, end).begins for log in logs]))
    loads = np.stack([contexts_at(log, times[:-1]) for log in logs])
    lasts = np.diff(times)
    steps = np.concatenate([np.diff(log.between(start, end).begins) for log in logs])
    tpot = [one.tpot for one in streams]
    ttft = [one.ttft for one in streams]
    return {
        "throughput": came / (end - start),
        "tpot_mean": float(np.mean(tpot)),
        "tpot_p99": float(np.quantile(tpot, 0.99)),
        "ttft_mean": float(np.mean(ttft)),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "fullest": float((loads.max(axis=0) @ lasts) / (loads.mean(axis=0) @ lasts)),
        "context": float((loads.mean(axis=0) @ lasts) / lasts.sum()),
        "step_mean": float(steps.mean()),
        "seconds": streams[-1].times[-1] - streams[0].sent,
    }
