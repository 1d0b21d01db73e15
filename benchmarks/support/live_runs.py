"""One load on real engines behind one configuration of the proxy: what came of it, and why."""

import asyncio
import hashlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.support.move_log import read_moves, read_placements, with_overflows
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
from rescheduler.engines.engine_command import EngineCommand
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.telemetry.forecast_batch import ForecastBatch
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import TelemetryView
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import ControlError

__all__ = [
    "FULL",
    "LiveRun",
    "StalledError",
    "completed",
    "patient",
    "proxy",
    "run_load",
    "until_idle",
]

FULL = 0.99
"""Share of the KV cache from which on it is full, as in STAR's Figure 12."""

_SAMPLE_SECONDS = 1.0
_POLL_SECONDS = 0.2
_LONG = 86_400.0


class StalledError(RuntimeError):
    """Nobody has got a token for too long."""


@dataclass(frozen=True)
class Sample:
    """The decode engines at one moment.

    Attributes:
        seconds: since the load began.
        kv: share of each engine's KV cache in use, in the deployment's order.
        running: requests each runs.
        waiting: requests that wait in each.
        migrations: so far.
        preemptions: so far.
    """

    seconds: float
    kv: list[float]
    running: list[int]
    waiting: list[int]
    migrations: int
    preemptions: int


@dataclass(frozen=True)
class LiveRun:
    """What a load has left behind.

    Attributes:
        result: figures, samples, requests, placements and moves, as JSON.
        forecasts: that the engines published meanwhile.
        served: what the clients saw.
        pause: mean seconds from a moved request's last token at its source to its next one.
        copying: mean seconds of the copies made before.
    """

    result: dict[str, Any]
    forecasts: list[ForecastBatch]
    served: list[ServedRequest]
    pause: float
    copying: float


def patient(deployment: Deployment) -> Deployment:
    """Return the deployment with a proxy that gives nothing up on a slow machine."""
    options = replace(
        deployment.proxy,
        pool=10_000,
        pool_seconds=_LONG,
        prefill_seconds=_LONG,
        first_token_seconds=_LONG,
        token_seconds=_LONG,
        control_seconds=60.0,
        freeze_seconds=60.0,
        moved_token_seconds=600.0,
    )
    return replace(deployment, proxy=options)


async def run_load(
    deployment: Deployment, folder: Path, load: Sequence[LoadRequest], salt: str, patience: float
) -> LiveRun:
    """Serve a load once.

    Args:
        deployment: whose engines run and are idle.
        folder: of the proxy's configuration and log.
        load: the requests.
        salt: keeps engines from finding prompts of other runs in their caches.
        patience: see `completed`.

    Raises:
        StalledError: as `completed` and `until_idle`.
        RuntimeError: the proxy has ended.
    """
    await until_idle(deployment, patience)
    before = await asyncio.to_thread(preemptions, deployment)
    log = folder / "proxy.log"
    log.unlink(missing_ok=True)
    run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt=salt)
    samples: list[Sample] = []
    with proxy(deployment, folder) as server:
        endpoints = [str(instance.telemetry) for instance in deployment.decode]
        with TelemetrySubscriber(endpoints, view=TelemetryView(history=False)) as telemetry:
            epoch = time.time()
            async with _sampling(deployment, run, before, samples):
                served = await completed(run, patience, server)
            forecasts = list(telemetry.take_forecasts())
        metrics = f"{deployment.proxy_url}/metrics"
        migrations = await asyncio.to_thread(_moved, deployment)
        pause = await asyncio.to_thread(_mean, metrics, "headway_proxy_migration_gap_seconds")
        copying = await asyncio.to_thread(_mean, metrics, "headway_proxy_migration_copy_seconds")
    await until_idle(deployment, patience)
    requests = [_as_json(one, run.started) for one in served]
    names, placements = read_placements(log, epoch)
    moves = with_overflows(
        read_moves(log, epoch, names), placements, requests, capacity_tokens(deployment)
    )
    loaded = [one for one in samples if one.seconds <= load[-1].arrives] or samples
    result = {
        **load_figures(served, run.seconds, Objectives(inf, inf)),  # those come with the summary
        "migrations": migrations,
        "preemptions": await asyncio.to_thread(preemptions, deployment) - before,
        "kv_use": float(np.mean([one.kv for one in loaded])) if loaded else float("nan"),
        "kv_full_share": float(np.mean([max(one.kv) > FULL for one in loaded])),
        "kv_difference": float(np.mean([max(one.kv) - min(one.kv) for one in loaded])),
        "samples": [asdict(one) for one in samples],
        "requests": requests,
        "placements": placements,
        "moves": moves,
    }
    return LiveRun(result, forecasts, served, pause, copying)


def capacity_tokens(deployment: Deployment) -> int:
    """Return the tokens that a decode engine's KV cache holds; vLLM keeps one block to itself."""
    engine = deployment.engine
    assert engine.kv_blocks is not None
    return (engine.kv_blocks - 1) * engine.block_size


async def completed(
    run: LoadRun, patience: float, server: ServerProcess | None = None
) -> list[ServedRequest]:
    """Serve a load to its end, however long it takes while tokens keep coming.

    Args:
        run: the load.
        patience: seconds for which requests may run and none of them get a token.
        server: that must keep running.

    Raises:
        StalledError: nothing came for so long.
        RuntimeError: the server has ended.
    """
    serving = asyncio.create_task(run.run())
    try:
        while not serving.done():
            await asyncio.wait([serving], timeout=_POLL_SECONDS)
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


async def until_idle(deployment: Deployment, patience: float) -> None:
    """Wait until no decode engine holds a block.

    Raises:
        StalledError: one holds the same blocks for too long, so that they have leaked.
    """
    for instance in deployment.decode:
        client = ControlClient(str(instance.control))
        held, since = -1, time.monotonic()
        try:
            while (state := await client.state(60.0)).free_blocks != state.num_blocks:
                if state.free_blocks != held:
                    held, since = state.free_blocks, time.monotonic()
                if time.monotonic() - since > patience:
                    raise StalledError(f"{instance.name} is idle and yet holds blocks: {state}")
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            client.close()


@contextmanager
def proxy(deployment: Deployment, folder: Path) -> Any:
    """Run `headway serve` for a deployment whose engines run; yield its process.

    Raises:
        RuntimeError: it ended before it was ready.
    """
    config = folder / "deployment.yaml"
    write_deployment(deployment, config)
    command = [sys.executable, "-m", "rescheduler", "serve", "--config", str(config)]
    server = ServerProcess(
        "proxy",
        EngineCommand([*command, "--verbose"], {}),
        deployment.proxy_url,
        folder / "proxy.log",
    )
    server.start()
    try:
        while not server.is_healthy():  # it may have to compile first
            if not server.is_running:
                raise RuntimeError(server.why_it_ended())
            time.sleep(_POLL_SECONDS)
        yield server
    finally:
        server.signal(signal.SIGTERM)
        server.end_by(time.monotonic() + deployment.proxy.shutdown_seconds + 5)


@asynccontextmanager
async def _sampling(
    deployment: Deployment, run: LoadRun, preempted: float, samples: list[Sample]
) -> AsyncIterator[None]:
    """Look at the decode engines again and again while the body runs."""
    clients = [ControlClient(str(instance.control)) for instance in deployment.decode]

    async def sample() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            with suppress(ControlError, OSError):  # one moment is missing then
                states = [await client.state(10 * _SAMPLE_SECONDS) for client in clients]
                samples.append(
                    Sample(
                        round(time.monotonic() - run.started, 3),
                        [round(1 - s.free_blocks / s.num_blocks, 4) for s in states],
                        [state.running for state in states],
                        [state.waiting for state in states],
                        await asyncio.to_thread(_moved, deployment),
                        round(await asyncio.to_thread(preemptions, deployment) - preempted),
                    )
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
    """Return how many requests the proxy has moved."""
    url, name = f"{deployment.proxy_url}/metrics", "headway_proxy_migrations_total"
    return round(metric_total(url, name, outcome="moved"))


def _mean(url: str, histogram: str) -> float:
    count = metric_total(url, f"{histogram}_count")
    return metric_total(url, f"{histogram}_sum") / count if count else float("nan")
