"""What routing gains where all engines step together, on vLLM's own scheduler.

    python -m benchmarks.emulated_barrier [--quick] [--rounds N] [--arms NAME ...] [--ranks N]
        [--dilation D] [--report] [--out FOLDER] [--json OUT]

Eight emulated ranks of DeepSeek-V3 on H800 GPUs, each with 88 places, behind a barrier: a step of
all takes as long as that of the rank with the most context. Requests come prefilled (their prompts
cost nothing) and faster than they are served, so that 200 always wait. In a round every arm gets
the same requests, in the same order, until a number of them has ended.

Prints, relative to ``jsq_load`` with half a 95% interval over rounds, tokens per second, the time
of a step, and what of it the barrier costs: how much longer it is than the mean of the ranks' own.
A run whose steps took over 0.01% longer than asked is repeated. What is finished is kept in the
folder, and not run again while its settings stay the same.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.deployments import patient, proxy, until_idle
from benchmarks.support.emulated_load import PromptLengths, drawn_load
from benchmarks.support.emulated_runs import EXACT, PATIENCE, RECORDED, kept_rounds, run_missing
from benchmarks.support.report import (
    Cells,
    arguments,
    change,
    relative_cells,
    resumable,
    write_report,
)
from benchmarks.support.stream_client import session
from rescheduler.demo.scripted_load import EmulatedRequest, asked_body, step_rows
from rescheduler.emulation.emulate_options import (
    AnswerLengths,
    EmulateOptions,
    StepSeconds,
    read_machine,
)
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.results.report import markdown_table

PROFILE, PLACES, WAITING = "h800-deepseek-v3", 88, 200
LAW = AnswerLengths(median=300, sigma=1.0, longest=8_000)
PROMPTS = PromptLengths(500, 16_000)
SCRATCH = Path("runs/emulated_barrier")
BASE = "jsq_load"
FIGURES = ("tokens_per_s", "step_ms", "barrier_share")
BFIO_0, BFIO = {"name": "bfio", "horizon": 0}, {"name": "bfio"}
WARM, MEASURED = 1, 2
"""Requests that end before anything is measured, and while it is, for each place."""


class Arm(NamedTuple):
    routing: dict[str, Any]
    exact: bool = False


ARMS = {
    "jsq_load": Arm({"name": "jsq_load"}),
    "jsq": Arm({"name": "jsq"}),
    "bfio_0": Arm(BFIO_0),
    "bfio": Arm(BFIO),
    "bfio_exact": Arm(BFIO, exact=True),
}


class Plan(NamedTuple):
    """What is the same for all runs."""

    out: Path
    ranks: int
    dilation: float

    def deployment(self, exact: bool) -> Deployment:
        """Return the ranks, whose prompts cost nothing."""
        step = read_machine(PROFILE).step_time
        constant = step.constant + PLACES * step.per_new
        emulate = EmulateOptions(
            step_time=StepSeconds(constant=constant, per_new=0.0, per_context=step.per_context),
            kv_tokens=1_000_000,
            max_num_batched_tokens=131_072,
            dilation=self.dilation,
            lengths=LAW,
            forecast=EXACT if exact else RECORDED,
            prompt_forecast=EXACT if exact else RECORDED,
            logs=str((SCRATCH / "steps").absolute()),
            barrier=True,
        )
        engine = EngineOptions(
            max_num_seqs=PLACES,
            block_size=32,
            max_model_len=32_768,
            emulate=emulate,
            arguments=["--no-enable-log-requests", "--disable-uvicorn-access-log"],
        )
        return patient(local_deployment("smollm2", engine, decode=self.ranks, prefill=0))

    def cells(self, number: int, arm: str) -> Cells:
        emulate = to_builtins(self.deployment(ARMS[arm].exact).engine.emulate)
        del emulate["logs"]
        settings = {
            "emulate": emulate,
            "ranks": self.ranks,
            "arm": ARMS[arm]._asdict(),
            "prompts": PROMPTS,
            "places": PLACES,
            "waiting": WAITING,
            "ended": (WARM, MEASURED),
        }
        return Cells(self.out / f"round-{number}", settings)


class Clients:
    """So many clients, which take the same requests in the same order, one after the other."""

    def __init__(self, deployment: Deployment, number: int, clients: int) -> None:
        self._url, self._model = f"{deployment.proxy_url}/v1/completions", deployment.served_name
        self._requests, self._clients = self._drawn(number), clients
        self.ended, self.failed = 0, 0

    def _drawn(self, number: int) -> Iterator[EmulatedRequest]:
        for part in range(100):
            yield from drawn_load(100 * number + part, 1_000, 1.0, PROMPTS, LAW)

    async def until(self, ended: int) -> None:
        """Return once so many requests have ended."""
        while self.ended < ended:
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with session(close=True) as client, asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client(client))

    async def _client(self, client: aiohttp.ClientSession) -> None:
        for request in self._requests:
            body = asked_body(self._model, request, 0, LAW.longest)
            async with client.post(self._url, json=body) as response:
                await response.read()
                self.failed += response.status != 200
            self.ended += 1


def main() -> None:
    parser = arguments("what routing gains behind a barrier, on emulated engines")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--dilation", type=float, default=4.0, help="of all times (4)")
    parser.add_argument("--report", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/emulated_barrier"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.ranks, options.arms = 1, 2, ["jsq_load", "bfio_0"]
        options.out = Path("runs/emulated_barrier_quick")
    for folder in (options.out, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(options.out, options.ranks, options.dilation)
    arms = [name for name in ARMS if name in {*options.arms, BASE}]
    if not options.report:
        with resumable():
            serve = partial(served, plan)
            exact = {name: ARMS[name].exact for name in arms}
            run_missing(plan, options.rounds, exact, serve, SCRATCH / "logs")
    found = kept_rounds(plan, options.rounds, arms)
    table = "\n".join(report(found))
    print(table)
    write_report("emulated_barrier", figures_of(found), options.json, tables=[table])


async def served(
    plan: Plan, deployment: Deployment, number: int, name: str, _attempt: int
) -> Mapping[str, float]:
    places = plan.ranks * PLACES
    serving = replace(deployment, routing=ARMS[name].routing)
    await until_idle(deployment, PATIENCE)
    with proxy(serving, SCRATCH):
        clients = Clients(serving, number, places + WAITING)
        running = asyncio.create_task(clients.run())
        try:
            ended = asyncio.create_task(clients.until(WARM * places))
            await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
            since = time.perf_counter()
            ended = asyncio.create_task(clients.until((WARM + MEASURED) * places))
            await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
            until = time.perf_counter()
            if running.done():
                running.result()  # why it ended
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    if clients.failed:
        raise RuntimeError(f"{clients.failed} requests failed")
    await until_idle(deployment, PATIENCE)
    step = deployment.engine.emulate.step_time if deployment.engine.emulate else None
    assert step is not None
    logs = [SCRATCH / "steps" / f"{one.name}.csv" for one in deployment.decode]
    return step_figures(logs, since, until, step, plan.dilation)


def step_figures(
    logs: list[Path], since: float, until: float, step: StepSeconds, dilation: float
) -> Mapping[str, float]:
    """Return figures of the ranks' steps that ended between two times, in emulated time."""
    tokens, asked, real, own, steps = 0.0, 0.0, 0.0, 0.0, 0
    for log in logs:
        rows = step_rows(log)
        rows = rows[(rows["end"] > since) & (rows["end"] <= until)]
        tokens += float(rows["requests"].sum())
        asked += float(rows["asked_seconds"].sum())
        real += float(rows["seconds"].sum())
        own += dilation * float((step.constant + step.per_context * rows["context_tokens"]).sum())
        steps += len(rows)
    return {
        "tokens_per_s": dilation * tokens / (until - since),
        "step_ms": 1e3 * asked / steps / dilation,
        "barrier_share": asked / own - 1,
        "running": tokens / steps,
        "excess": real / asked - 1,
        "steps": float(steps),
        "seconds": until - since,
    }


def report(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[str]:
    rows = [
        [arm, f"{len(runs)}", *relative_cells(found, arm, BASE, FIGURES)]
        for arm, runs in found.items()
        if runs
    ]
    return markdown_table(["arm", "rounds", *FIGURES], rows)


def figures_of(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for arm, runs in found.items():
        if not runs:
            continue
        figures[f"barrier_share_{arm}"] = float(
            np.mean([one["barrier_share"] for one in runs.values()])
        )
        if arm != BASE:
            estimate = change(runs, found[BASE], "tokens_per_s")
            figures[f"tokens_gain_{arm}"] = estimate.mean
            figures[f"tokens_gain_{arm}_half_interval"] = estimate.half
    every = [one["excess"] for runs in found.values() for one in runs.values()]
    return figures | {"excess_step_time": float(np.mean(every))} if every else figures


if __name__ == "__main__":
    main()
