"""One load on real engines behind one configuration of the proxy: what came of it, and why."""

import asyncio
import hashlib
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.deployments import POLL_SECONDS, StalledError, proxy, until_idle
from data_collection.workload.prompts import load_prompts
from rescheduler.demo.demo_load import (
    LoadRequest,
    LoadRun,
    Objectives,
    ServedRequest,
    load_figures,
    metric_total,
    preemptions,
)
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import ControlError

FULL = 0.99
"""Share of the KV cache from which on it is full, as in STAR's Figure 12."""

_SAMPLE_SECONDS = 1.0
_ASKS_FOR_MUCH = re.compile(
    r"[0-9]00 words|\blong\b|detail|interview|hour by hour|verses|30 |tutorial|table|every"
    r"|Write a story|steps"
)

Sample = dict[str, Any]
"""The decode engines at one moment, in the deployment's order; counts are so far."""


@dataclass(frozen=True)
class LiveRun:
    """What a load has left behind; mean seconds of moved streams' pauses, and of copies before."""

    result: dict[str, Any]
    served: list[ServedRequest]
    pause: float
    copying: float


def round_load(number: int, requests: int, rate: float, max_tokens: int) -> list[LoadRequest]:
    """Return a round's requests, a Poisson process; at an infinite rate all come at once.

    Half of them ask for long answers, in random order. A round draws prompts, seeds and gaps
    between arrivals of its own, the same every time; loads only stretch its gaps.
    """
    generator = random.Random(number)
    kinds: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for prompt in load_prompts("starter"):
        text = prompt.messages[-1]["content"]
        kinds[_ASKS_FOR_MUCH.search(text) is None].append((prompt.id, text))
    much = generator.sample(kinds[0], requests // 2)
    little = generator.sample(kinds[1], requests - requests // 2)
    chosen = much + little
    generator.shuffle(chosen)
    load, now = [], 0.0
    for i, (name, text) in enumerate(chosen):
        now += generator.expovariate(1.0) / rate
        load.append(LoadRequest(name, text, max_tokens, 1_000 * number + i, now))
    return load


async def run_load(
    deployment: Deployment, folder: Path, load: Sequence[LoadRequest], salt: str, patience: float
) -> LiveRun:
    """Serve a load once, by engines that run and are idle.

    The salt keeps engines from finding prompts of other runs in their caches.

    Raises:
        StalledError: as `completed` and `until_idle`.
        RuntimeError: the proxy has ended.
    """
    await until_idle(deployment, patience)
    before = await asyncio.to_thread(preemptions, deployment)
    (folder / "proxy.log").unlink(missing_ok=True)
    run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt=salt)
    samples: list[Sample] = []
    with proxy(deployment, folder) as server:
        async with _sampling(deployment, run, before, samples):
            served = await completed(run, patience, server)
        migrations = await asyncio.to_thread(_moved, deployment)
        pause = await asyncio.to_thread(_mean, deployment, "headway_proxy_migration_gap_seconds")
        copying = await asyncio.to_thread(_mean, deployment, "headway_proxy_migration_copy_seconds")
    await until_idle(deployment, patience)
    loaded = [one for one in samples if one["seconds"] <= load[-1].arrives] or samples
    result = {
        **load_figures(served, run.seconds, Objectives(inf, inf)),  # those come with the summary
        "migrations": migrations,
        "preemptions": await asyncio.to_thread(preemptions, deployment) - before,
        "kv_use": float(np.mean([one["kv"] for one in loaded])) if loaded else float("nan"),
        "kv_full_share": float(np.mean([max(one["kv"]) > FULL for one in loaded])),
        "kv_difference": float(np.mean([max(one["kv"]) - min(one["kv"]) for one in loaded])),
        "samples": samples,
        "requests": [_as_json(one, run.started) for one in served],
    }
    return LiveRun(result, served, pause, copying)


async def completed(
    run: LoadRun, patience: float, server: ServerProcess | None = None
) -> list[ServedRequest]:
    """Serve a load to its end, however long it takes while tokens keep coming.

    Raises:
        StalledError: requests run, and none of them has got a token for so many seconds.
        RuntimeError: the server has ended.
    """
    serving = asyncio.create_task(run.run())
    try:
        while not serving.done():
            await asyncio.wait([serving], timeout=POLL_SECONDS)
            if server is not None and not server.is_running:
                raise RuntimeError(server.why_it_ended())
            open_ones = [one for one in run.served.values() if not one.finish_reason + one.error]
            if not open_ones:
                continue
            newest = max(one.chunks[-1].time if one.chunks else one.sent for one in open_ones)
            ended = [one.chunks[-1].time for one in run.served.values() if one.chunks]
            quiet = time.monotonic() - max([newest, *ended])
            if quiet > patience:
                names = ", ".join(one.request.name for one in open_ones[:5])
                raise StalledError(
                    f"no token came for {quiet:.0f} s, though {len(open_ones)} of "
                    f"{len(run.served)} requests run ({names}): an engine or the proxy hangs; "
                    "see the logs"
                )
        return serving.result()
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


@asynccontextmanager
async def _sampling(
    deployment: Deployment, run: LoadRun, preempted: float, samples: list[Sample]
) -> AsyncIterator[None]:
    clients = [ControlClient(str(instance.control)) for instance in deployment.decode]

    async def sample() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            with suppress(ControlError, OSError):  # one moment is missing then
                states = [await client.state(10 * _SAMPLE_SECONDS) for client in clients]
                migrations = await asyncio.to_thread(_moved, deployment)
                now = await asyncio.to_thread(preemptions, deployment)
                samples.append(
                    {
                        "seconds": round(time.monotonic() - run.started, 3),
                        "kv": [round(1 - s.free_blocks / s.num_blocks, 4) for s in states],
                        "running": [state.running for state in states],
                        "waiting": [state.waiting for state in states],
                        "migrations": migrations,
                        "preemptions": round(now - preempted),
                    }
                )

    sampling = asyncio.create_task(sample())
    try:
        yield
    finally:
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
        for client in clients:
            client.close()


def _as_json(served: ServedRequest, started: float) -> dict[str, Any]:
    """Return what is kept of a request; times are seconds since the load began."""
    chunks = served.chunks
    return {
        "name": served.request.name,
        "arrives": served.request.arrives,
        "max_tokens": served.request.max_tokens,
        "prompt": served.prompt_tokens,
        "tokens": served.tokens,
        "ttft": served.ttft,
        "tpot": served.tpot,
        "longest_gap": served.longest_gap,
        "ended": chunks[-1].time - started if chunks else inf,
        "finish_reason": served.finish_reason,
        "error": served.error,
        "text": hashlib.sha256(served.text.encode()).hexdigest()[:16],
        "times": [[piece.tokens, round(piece.time - started, 3)] for piece in chunks],
    }


def _moved(deployment: Deployment) -> int:
    url, name = f"{deployment.proxy_url}/metrics", "headway_proxy_migrations_total"
    return round(metric_total(url, name, outcome="moved"))


def _mean(deployment: Deployment, histogram: str) -> float:
    url = f"{deployment.proxy_url}/metrics"
    count = metric_total(url, f"{histogram}_count")
    return metric_total(url, f"{histogram}_sum") / count if count else float("nan")
