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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from msgspec.structs import replace

from benchmarks.emulator_check import simulation, trace_of
from benchmarks.support.deployments import proxy, until_idle
from benchmarks.support.experiment import (
    PATIENCE,
    Arms,
    Experiment,
    PromptLengths,
    Run,
    drawn_load,
    emulated_replicas,
    excess_of,
    of_results,
    step_logs,
)
from benchmarks.support.report import by_round, change, mean_of, relative_cells
from benchmarks.support.stream_client import session
from rescheduler.demo.load import EmulatedRequest, asked_body, step_rows
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions, StepSeconds
from rescheduler.engines.deployment import Deployment
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    SimulationConfig,
)
from rescheduler.simulator.results.report import markdown_table
from rescheduler.step_time.step_time import bfio_step_time

PLACES, WAITING = 72, 4
"""Of a rank."""
PAPER = bfio_step_time(PLACES)
STEP = StepSeconds(constant=PAPER.constant, per_new=0.0, per_context=PAPER.per_context)
LAW = AnswerLengths(median=300, sigma=1.0, longest=8_000)
PROMPTS = PromptLengths(500, 16_000)
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


class EmulatedBarrier(Experiment):
    """Ranks that step together, whose prompts cost nothing."""

    name = "emulated_barrier"
    arms = ARMS
    base = BASE
    figures = FIGURES
    has_loads = False

    def engines_of(self, arm: str) -> bool:
        return ARMS[arm].exact

    def emulate(self, exact: bool) -> EmulateOptions:
        return self.emulated(
            LAW,
            exact,
            step_time=STEP,
            kv_tokens=1_000_000,
            max_num_batched_tokens=131_072,
            dilation=self.options.dilation,
            barrier=True,
        )

    def deployment(self, key: bool) -> Deployment:
        emulate, ranks = self.emulate(key), self.options.ranks
        return emulated_replicas(emulate, ranks, PLACES, max_model_len=32_768)

    def settings(self, run: Run | None) -> dict[str, Any]:
        assert run is not None, "there always is more than is served"
        arm = ARMS[run.arm]
        return {
            "emulate": of_results(self.emulate(arm.exact)),
            "ranks": self.options.ranks,
            "arm": arm._asdict(),
            "prompts": PROMPTS,
            "places": PLACES,
            "waiting": WAITING,
            "ended": (WARM, MEASURED),
        }

    async def serve(self, deployment: Deployment, run: Run, salt: int) -> dict[str, float]:
        ranks = self.options.ranks
        places = ranks * PLACES
        serving = replace(deployment, routing=ARMS[run.arm].routing)
        await until_idle(deployment, PATIENCE)
        with proxy(serving, self.scratch):
            clients = Clients(serving, run.round, places + ranks * WAITING)
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
        logs = step_logs(self.scratch, deployment.decode)
        return step_figures(logs, since, until, self.options.dilation)

    def results(self, load: float, arms: Sequence[str]) -> Arms:
        """Return the valid results, and keep what the simulator says of the same requests."""
        found = super().results(load, arms)
        self.simulations = {
            arm: {number: simulated(self.options.ranks, number, arm) for number in found[arm]}
            for arm in SIMULATED
            if arm in found
        }
        return found

    def tables(self, found: Mapping[float, Arms]) -> list[str]:
        (served,) = found.values()
        simulations = report(self.simulations)
        return ["\n".join(report(served)), "\n".join(["Simulated:", "", *simulations])]

    def summary(self, found: Mapping[float, Arms]) -> dict[str, float]:
        (served,) = found.values()
        simulations = figures_of(self.simulations)
        return figures_of(served) | {f"{name}_simulated": v for name, v in simulations.items()}


def main() -> None:
    description = "what routing gains behind a barrier, on emulated engines"
    parser = EmulatedBarrier.parser(description, rounds=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--dilation", type=float, default=4.0, help="of all times (4)")
    barrier = EmulatedBarrier(parser.parse_args())
    barrier.capacity = 1.0
    barrier.main({"ranks": 2, "arms": ["jsq_load", "bfio_0"]})


def step_figures(logs: list[Path], since: float, until: float, dilation: float) -> dict[str, float]:
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


def simulated(ranks: int, number: int, arm: str) -> Mapping[str, float]:
    """Return what the simulator says of the same requests, of the same stretch of the run."""
    places = ranks * PLACES
    load = list(itertools.islice(drawn(number), (WARM + MEASURED + 1) * places + ranks * WAITING))
    with trace_of(load) as trace:
        config = SimulationConfig(
            cluster=ClusterConfig(ranks, PLACES),
            clock="barrier",
            dispatch="pool",
            step_time={"name": "bfio"},
            trace=trace,
            arrivals=ArrivalsConfig("revelation", target=ranks * WAITING),
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
    waited = STEP.per_context * uneven / ranks
    return {
        "tokens_per_s": (last.tokens - first.tokens) / seconds,
        "step_ms": 1e3 * seconds / steps,
        "barrier_share": waited / (seconds - waited),
    }


def report(found: Arms) -> list[str]:
    rows = [
        [arm, f"{len(runs)}", *relative_cells(found, arm, BASE, FIGURES)]
        for arm, runs in found.items()
        if runs
    ]
    return markdown_table(["arm", "rounds", *FIGURES], rows)


def figures_of(found: Arms) -> dict[str, float]:
    figures: dict[str, float] = {}
    for arm, runs in found.items():
        if not runs:
            continue
        figures[f"barrier_share_{arm}"] = mean_of(by_round(runs, "barrier_share")).mean
        if arm != BASE:
            estimate = change(runs, found[BASE], "tokens_per_s")
            figures |= estimate.figures(f"tokens_gain_{arm}")
    return figures | excess_of(found)


if __name__ == "__main__":
    main()
