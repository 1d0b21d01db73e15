"""What routing gains where all engines step together, on vLLM's own scheduler.

    python -m benchmarks.emulated_barrier [--quick] [--rounds N] [--arms NAME ...] [--ranks N]
        [--dilation D] [--report] [--out FOLDER] [--json OUT]

Eight emulated ranks with BF-IO's 72 places each and its time of a step (Chen et al. 2026, §6.2),
behind a barrier: a step of all takes as long as that of the rank with the most context. Requests
come prefilled (their prompts cost nothing) and faster than they are served, so that 32 always
wait. In a round every arm gets the same requests, in the same order, until a number of them has
ended.

Prints, relative to ``jsq_load`` with half a 95% interval over rounds, tokens per second, the time
of a step, and what of it the barrier costs: how much longer it is than the mean of the ranks' own;
and what the simulator says of the same requests. A run whose steps took over 0.01% longer than
asked is repeated. What is finished is kept in the folder, and not run again while its settings stay
the same.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.emulator_check import write_trace
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
)
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    SimulationConfig,
)
from rescheduler.simulator.results.metrics import RunResult
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.simulation import create_candidates, run, run_setup
from rescheduler.step_time.step_time import bfio_step_time

PLACES, WAITING = 72, 4
"""Of a rank."""
PAPER = bfio_step_time(PLACES)
STEP = StepSeconds(constant=PAPER.constant, per_new=0.0, per_context=PAPER.per_context)
LAW = AnswerLengths(median=300, sigma=1.0, longest=8_000)
PROMPTS = PromptLengths(500, 16_000)
SCRATCH = Path("runs/emulated_barrier")
BASE = "jsq_load"
FIGURES = ("tokens_per_s", "step_ms", "barrier_share")
SIMULATED = ("jsq_load", "jsq", "bfio_0")
"""Those that need no forecast: what differs is the simulator's idea of vLLM and of the proxy."""
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
        emulate = EmulateOptions(
            step_time=STEP,
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


def drawn(number: int) -> Iterator[EmulatedRequest]:
    """Return a round's requests, whose order counts, and not when they arrive."""
    for part in range(100):
        for one in drawn_load(100 * number + part, 1_000, 1.0, PROMPTS, LAW):
            yield replace_fields(one, arrives=0.0)


class Clients:
    """So many clients, which take the same requests in the same order, one after the other."""

    def __init__(self, deployment: Deployment, number: int, clients: int) -> None:
        self._url, self._model = f"{deployment.proxy_url}/v1/completions", deployment.served_name
        self._requests, self._clients = drawn(number), clients
        self.ended, self.failed = 0, 0

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
    simulations = {
        arm: {number: simulated(plan, number, arm) for number in found[arm]}
        for arm in SIMULATED
        if arm in found
    }
    tables = ["\n".join(report(found)), "\n".join(["Simulated:", "", *report(simulations)])]
    print("\n\n".join(tables))
    figures = figures_of(found)
    figures |= {f"{name}_simulated": one for name, one in figures_of(simulations).items()}
    write_report("emulated_barrier", figures, options.json, tables=tables)


async def served(
    plan: Plan, deployment: Deployment, number: int, name: str, _attempt: int
) -> Mapping[str, float]:
    places = plan.ranks * PLACES
    serving = replace(deployment, routing=ARMS[name].routing)
    await until_idle(deployment, PATIENCE)
    with proxy(serving, SCRATCH):
        clients = Clients(serving, number, places + plan.ranks * WAITING)
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
    logs = [SCRATCH / "steps" / f"{one.name}.csv" for one in deployment.decode]
    return step_figures(logs, since, until, plan.dilation)


def step_figures(
    logs: list[Path], since: float, until: float, dilation: float
) -> Mapping[str, float]:
    """Return figures of the ranks' steps that ended between two times, in emulated time."""
    tokens, asked, real, own, steps = 0.0, 0.0, 0.0, 0.0, 0
    for log in logs:
        rows = step_rows(log)
        rows = rows[(rows["end"] > since) & (rows["end"] <= until)]
        tokens += float(rows["requests"].sum())
        asked += float(rows["asked_seconds"].sum())
        real += float(rows["seconds"].sum())
        own += dilation * float((STEP.constant + STEP.per_context * rows["context_tokens"]).sum())
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


def simulated(plan: Plan, number: int, arm: str) -> Mapping[str, float]:
    """Return what the simulator says of the same requests, of the same stretch of the run."""
    places = plan.ranks * PLACES
    load = list(
        itertools.islice(drawn(number), (WARM + MEASURED + 1) * places + plan.ranks * WAITING)
    )
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        write_trace(load, trace)
        config = SimulationConfig(
            cluster=ClusterConfig(plan.ranks, PLACES),
            clock="barrier",
            dispatch="pool",
            step_time={"name": "bfio"},
            trace={"path": str(trace), "requests": len(load)},
            arrivals=ArrivalsConfig("revelation", target=plan.ranks * WAITING),
            forecast={"name": "none"},
            policies=[ARMS[arm].routing],
        )
        ends = np.sort(simulation(config).requests.end)
        first, last = (
            simulation(replace_fields(config, max_seconds=float(ends[ended * places - 1])))
            for ended in (WARM, WARM + MEASURED)
        )
    seconds, steps = last.seconds - first.seconds, last.steps - first.steps
    uneven = last.imbalance * last.steps - first.imbalance * first.steps
    waited = STEP.per_context * uneven / plan.ranks
    return {
        "tokens_per_s": (last.tokens - first.tokens) / seconds,
        "step_ms": 1e3 * seconds / steps,
        "barrier_share": waited / (seconds - waited),
    }


def simulation(config: SimulationConfig) -> RunResult:
    (found,) = create_candidates(run_setup(config)).values()
    return run(found.setup, found.policy, 0, planner=found.planner)


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
    every = [one["excess"] for runs in found.values() for one in runs.values() if "excess" in one]
    return figures | {"excess_step_time": float(np.mean(every))} if every else figures


if __name__ == "__main__":
    main()
