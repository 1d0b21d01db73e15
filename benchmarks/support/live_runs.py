"""One load on real engines behind one configuration of the proxy, and what came of it."""

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.deployments import POLL_SECONDS, StalledError, proxy, until_idle
from data_collection.workload.prompts import load_prompts
from rescheduler.demo.demo_load import LoadRequest, LoadRun, ServedRequest, preemptions
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.launch_process import ServerProcess

_ASKS_FOR_MUCH = re.compile(
    r"[0-9]00 words|\blong\b|detail|interview|hour by hour|verses|30 |tutorial|table|every"
    r"|Write a story|steps"
)


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
) -> tuple[dict[str, Any], list[ServedRequest]]:
    """Serve a load once, by engines that run and are idle; return what is kept, and all of it.

    The salt keeps engines from finding prompts of other runs in their caches.

    Raises:
        StalledError: as `completed` and `until_idle`.
        RuntimeError: the proxy has ended.
    """
    await until_idle(deployment, patience)
    before = await asyncio.to_thread(preemptions, deployment)
    (folder / "proxy.log").unlink(missing_ok=True)
    run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt=salt)
    with proxy(deployment, folder) as server:
        served = await completed(run, patience, server)
    await until_idle(deployment, patience)
    result = {
        "seconds": run.seconds,
        "failed": float(sum(bool(one.error) for one in served)),
        "preemptions": await asyncio.to_thread(preemptions, deployment) - before,
        "requests": [_as_json(one, run.started) for one in served],
    }
    return result, served


def served_rate(served: Sequence[ServedRequest]) -> float:
    r"""Return the requests a second that a saturated deployment serves.

    .. math:: \frac{0.6 \sum_i o_i}{t_{0.8} - t_{0.2}} \Big/ \frac1n \sum_i o_i

    with o tokens of a request and t the times by which a fifth and four fifths of all tokens had
    come: neither the beginning, when caches fill, nor the end, when they empty, counts.
    """
    times = []
    for one in served:
        before = 0
        for piece in one.chunks:
            times += [piece.time] * (piece.tokens - before)
            before = piece.tokens
    begin, end = np.quantile(times, [0.2, 0.8])
    return float(0.6 * len(served) / (end - begin))


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


def _as_json(served: ServedRequest, started: float) -> dict[str, Any]:
    """Return what is kept of a request; times are seconds since the load began."""
    return {
        "name": served.request.name,
        "arrives": served.request.arrives,
        "tokens": served.tokens,
        "ttft": served.ttft,
        "ended": served.chunks[-1].time - started if served.chunks else inf,
        "error": served.error,
        "text": hashlib.sha256(served.text.encode()).hexdigest()[:16],
    }
