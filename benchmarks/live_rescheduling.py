"""What rescheduling is worth on real engines: nothing moves, STAR, and Headway's planner.

    python -m benchmarks.live_rescheduling [--quick] [--rounds N] [--out FOLDER]
        [--json OUT] [--png OUT]

One prefill and two decode engines on this machine's CPU, with KV caches so small that imbalance
hurts, behind `headway serve`. Every arm gets the same requests at the same times, with the same
seeds, so that every arm generates the same tokens; a round is each arm once, and the next round
begins with the next arm. Requests are starter prompts, of which every second one asks for a long
answer, and they are placed in turn on the decode engines, so that one of them gets most of the
long ones. Lengths are the model's own, up to a cap. An arm's proxy is its own; engines stay.

Finished rounds are kept in the folder, and are not run again. The objectives of goodput are
multiples of what requests take that are alone, measured before the first round that is missing;
without `alone.json` in the folder they are measured again.
"""

import asyncio
import dataclasses
import hashlib
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import cycle
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.report import arguments, report
from benchmarks.support.rescheduling_figures import FULL, draw, print_table, summarised
from data_collection.atomic_file import write_text_atomically
from data_collection.workload.prompts import load_prompts
from rescheduler.demo.demo_figures import Objectives, load_figures, metric_total, preemptions
from rescheduler.demo.demo_load import LoadRequest, LoadRun, ServedRequest
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.engine_command import EngineCommand
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment, write_deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.launch_progress import LaunchProgress
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import ControlError

ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=16,
    kv_blocks=72,
    enforce_eager=True,
    checkpoint="checkpoints/smollm2-135m-instruct",
    k=10,
)
COST = {
    "interval_seconds": 1.0,
    "handshake_seconds": 0.2,
    "bandwidth": 5e8,
    "kv_bytes_per_token": 46_080,  # 30 layers, 3 heads of 64, keys and values, float32
    "step_seconds": 0.1,
    "horizon": 500,
}
ARMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "star_no_prediction": {"name": "star", "prediction": False, **COST},
    "star": {"name": "star", **COST},
    "survival": {"name": "survival", **COST},
}
SECONDS = 100.0  # that requests arrive in
RATE = 0.6  # requests a second
MAX_TOKENS = 500
ASKS_FOR_MUCH = re.compile(
    r"[0-9]00 words|\blong\b|detail|interview|hour by hour|verses|30 |tutorial|table|every"
    r"|Write a story|steps"
)
TTFT_TIMES, TPOT_TIMES = 20.0, 4.0
LIMIT_SECONDS = 180.0
SAMPLE_SECONDS = 0.5
IDLE_SECONDS = 60.0
PROXY_SECONDS = 60.0
ALONE = "alone.json"


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


def main() -> None:
    """Run what is missing, and print the means over rounds."""
    parser = arguments("what rescheduling is worth on real engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second")
    parser.add_argument("--out", type=Path, default=Path("runs/live_rescheduling"))
    parser.add_argument("--png", type=Path, help="draw the KV usage of the first round here")
    options = parser.parse_args()
    load = skewed_load(20.0 if options.quick else SECONDS, options.rate)
    settings = [to_builtins(ENGINE), ARMS, [asdict(request) for request in load]]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    folder = options.out / digest
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        (number, arm)
        for number in range(1 if options.quick else options.rounds)
        for arm in rotated(options.arms, number)
        if not round_file(folder, number, arm).is_file()
    ]
    if missing or not (folder / ALONE).is_file():
        run_missing(folder, load, missing)
    alone = json.loads((folder / ALONE).read_text())
    rounds = {
        arm: [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{arm}.json"))]
        for arm in options.arms
    }
    if options.png is not None:
        draw(rounds, options.png)
    ttft, tpot = TTFT_TIMES * alone["alone_ttft"], TPOT_TIMES * alone["alone_tpot"]
    figures = summarised(rounds, ttft, tpot) | alone
    print_table(figures, options.arms)
    report("live_rescheduling", figures, options.json)


def skewed_load(seconds: float, rate: float) -> list[LoadRequest]:
    """Return requests of a Poisson process, those that ask for much on every second place."""
    generator = random.Random(0)
    much: list[LoadRequest] = []
    little: list[LoadRequest] = []
    for number, prompt in enumerate(load_prompts("starter")):
        text = prompt.messages[-1]["content"]
        kind = much if ASKS_FOR_MUCH.search(text) else little
        kind.append(LoadRequest(prompt.id, text, MAX_TOKENS, number, 0.0))
    kinds = cycle([iter(much), iter(little)])
    load: list[LoadRequest] = []
    now = generator.expovariate(rate)
    while now < seconds:
        load.append(dataclasses.replace(next(next(kinds)), arrives=now))
        now += generator.expovariate(rate)
    return load


def rotated(arms: Sequence[str], number: int) -> list[str]:
    """Return the arms in a round's order: each round begins with another."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def round_file(folder: Path, number: int, arm: str) -> Path:
    """Return where the result of an arm in a round is kept."""
    return folder / f"round-{number}-{arm}.json"


def run_missing(
    folder: Path, load: Sequence[LoadRequest], missing: Sequence[tuple[int, str]]
) -> None:
    """Start the engines once, and run what is missing; each result is kept at once."""
    deployment = local_deployment(
        "smollm2", ENGINE, routing={"name": "round_robin"}, migration=None
    )
    with ExitStack() as stack:
        progress = stack.enter_context(LaunchProgress(folder))
        stack.enter_context(launched(deployment, folder, report=progress.report))
        progress.finish()
        if not (folder / ALONE).is_file():
            alone = asyncio.run(measure_alone(deployment, folder))
            write_text_atomically(folder / ALONE, json.dumps(alone))
        for number, arm in missing:
            serving = replace(deployment, migration=ARMS[arm])
            salt = f"{number}-{arm}"
            result = asyncio.run(run_arm(serving, folder, load, salt))
            write_text_atomically(round_file(folder, number, arm), json.dumps(result))
            shown = {k: round(result[k], 3) for k in ("throughput", "tpot_p99", "seconds")}
            counts = {k: result[k] for k in ("migrations", "preemptions", "failed")}
            print(f"round {number}, {arm}: {shown | counts}", file=sys.stderr, flush=True)


async def measure_alone(deployment: Deployment, folder: Path) -> dict[str, float]:
    """Return what a request takes that has the engines to itself: means, seconds."""
    text = "Write a story about a lighthouse keeper."
    load = [LoadRequest(f"alone-{i}", text, 60, i, 8.0 * i) for i in range(6)]
    with proxy(deployment, folder):
        run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt="alone")
        served = (await run.run())[2:]  # the first two shake hands with the prefill engine
    return {
        "alone_ttft": float(np.mean([one.ttft for one in served])),
        "alone_tpot": float(np.mean([one.tpot for one in served])),
    }


async def run_arm(
    deployment: Deployment, folder: Path, load: Sequence[LoadRequest], salt: str
) -> dict[str, Any]:
    """Serve the load once, and return the figures, the samples and every request's times."""
    await until_idle(deployment)
    before = await asyncio.to_thread(preemptions, deployment)
    with proxy(deployment, folder):
        run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt=salt)
        samples: list[Sample] = []
        sampling = asyncio.create_task(sample(deployment, run, before, samples))
        try:
            served = await asyncio.wait_for(run.run(), LIMIT_SECONDS)
        finally:
            sampling.cancel()
        migrations = await asyncio.to_thread(moved, deployment)
    await until_idle(deployment)
    busiest = [max(one.kv) for one in samples]
    return {
        **load_figures(served, run.seconds, Objectives(inf, inf)),  # those come with the summary
        "migrations": migrations,
        "preemptions": await asyncio.to_thread(preemptions, deployment) - before,
        "kv_full_share": float(np.mean([kv > FULL for kv in busiest])),
        "kv_difference": float(np.mean([max(one.kv) - min(one.kv) for one in samples])),
        "samples": [asdict(one) for one in samples],
        "requests": [as_json(one) for one in served],
    }


def as_json(served: ServedRequest) -> dict[str, Any]:
    """Return what is kept of a request."""
    return {
        "name": served.request.name,
        "tokens": served.tokens,
        "ttft": served.ttft,
        "tpot": served.tpot,
        "longest_gap": served.longest_gap,
        "finish_reason": served.finish_reason,
        "error": served.error,
        "text": hashlib.sha256(served.text.encode()).hexdigest()[:16],
    }


@contextmanager
def proxy(deployment: Deployment, folder: Path) -> Iterator[None]:
    """Run `headway serve` for a deployment whose engines run."""
    config = folder / "deployment.yaml"
    write_deployment(deployment, config)
    command = [sys.executable, "-m", "rescheduler", "serve", "--config", str(config)]
    server = ServerProcess(
        "proxy", EngineCommand(command, {}), deployment.proxy_url, folder / "proxy.log"
    )
    server.start()
    try:
        deadline = time.monotonic() + PROXY_SECONDS
        while not server.is_healthy():
            if not server.is_running or time.monotonic() > deadline:
                raise RuntimeError(server.why_it_ended())
            time.sleep(0.1)
        yield
    finally:
        server.signal(signal.SIGTERM)
        server.end_by(time.monotonic() + deployment.proxy.shutdown_seconds + 5)


async def until_idle(deployment: Deployment) -> None:
    """Wait until no decode engine holds a block.

    Raises:
        RuntimeError: one still does after a while, so that blocks have leaked.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    for instance in deployment.decode:
        client = ControlClient(str(instance.control))
        try:
            while (state := await client.state(5.0)).free_blocks != state.num_blocks:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{instance.name} is idle and yet holds blocks: {state}")
                await asyncio.sleep(SAMPLE_SECONDS)
        finally:
            client.close()


async def sample(
    deployment: Deployment, run: LoadRun, preempted: float, samples: list[Sample]
) -> None:
    """Look at the decode engines again and again."""
    clients = [ControlClient(str(instance.control)) for instance in deployment.decode]
    try:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            with suppress(ControlError, OSError):  # one moment is missing then
                states = [await client.state(SAMPLE_SECONDS) for client in clients]
                samples.append(
                    Sample(
                        time.monotonic() - run.started,
                        [1 - state.free_blocks / state.num_blocks for state in states],
                        [state.running for state in states],
                        [state.waiting for state in states],
                        await asyncio.to_thread(moved, deployment),
                        round(await asyncio.to_thread(preemptions, deployment) - preempted),
                    )
                )
    finally:
        for client in clients:
            client.close()


def moved(deployment: Deployment) -> int:
    """Return how many requests the proxy has moved."""
    url, name = f"{deployment.proxy_url}/metrics", "headway_proxy_migrations_total"
    return round(metric_total(url, name, outcome="moved"))


if __name__ == "__main__":
    main()
