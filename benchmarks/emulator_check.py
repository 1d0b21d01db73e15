"""How far the simulator is from vLLM's own scheduler, where the times of steps are exact.

    python -m benchmarks.emulator_check [--report] [--check] [--requests N] [--json OUT]

Serves requests on four emulated engines, as `benchmarks.emulated_fleet` does, by four policies
without forecasts at 90, 105 and 130% of the capacity, by one of them also with suspension by age,
then simulates the same requests with the same times of steps: what differs is the simulator's idea
of vLLM's scheduler, of its queue, its blocks and its preemptions. What is finished is kept in the
folder and not run again; what `benchmarks.emulated_fleet` has kept counts, too.

One number is fitted: how long a request is on its way from the router to an engine (``dispatch``),
so that at 90% first tokens come as late as they do with `jsq_load`. Who is preempted is a matter of
microseconds: simulated figures are means over eight runs whose arrivals differ by up to a
millisecond.

Prints, for each arm and load, the emulated figures (means over rounds), the simulated ones, and by
how much they differ in percent; ``simulator_error`` in the file is the largest difference, where
preemptions count if there is one in twenty requests. With ``--check`` it may be 10%.
"""

import csv
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.emulated_fleet import (
    ARMS,
    KV_TOKENS,
    LAW,
    PROFILE,
    PROMPTS,
    REPLICAS,
    SLOTS,
    EmulatedFleet,
)
from benchmarks.support.experiment import MOST_EXCESS, Run, drawn_load
from benchmarks.support.report import arguments, resumable, write_report
from rescheduler.demo.load import TPOT_S, TTFT_S, EmulatedRequest
from rescheduler.emulation.emulate_options import StepSeconds, read_machine
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    PrefillConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.results.metrics import RunResult, run_metrics
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.simulation import create_candidates, run, run_setup

COMPARED = ("latency", "ttft", "tpot", "goodput", "preemptions")
BLOCK = 32
LOADS = (1.05, 0.9, 1.3)
REPEATABLE = ("jsq_load", "jsq_load_age", "vllm", "max_capacity", "reserve")
FLEET = Path("benchmarks/results/emulated_fleet")
DILATION, CAPACITY = 2.0, 16.19
"""Requests a second, as `benchmarks.emulated_fleet` has measured."""
FITTED, MOST_DISPATCH = ("90", "jsq_load"), 0.05
SIMULATED = 8
MOST_ERROR = 10.0
FEW = 20
"""Preemptions do not count where there are fewer than one in so many requests."""


def main() -> None:
    parser = arguments("the simulator against emulated engines", quick=False)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/emulator_check"))
    parser.add_argument("--requests", type=int, default=600, help="of a run (600)")
    parser.add_argument("--report", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--check", action="store_true", help="fail where over 10%% differ")
    options = parser.parse_args()
    if not options.report:
        fleet = fleet_of(options.requests, options.out)
        fleet.scratch.mkdir(parents=True, exist_ok=True)
        with resumable():
            fleet.run_missing(REPEATABLE, rounds=1)
    found = emulated_runs((FLEET, options.out))
    if FITTED not in found:
        sys.exit(f"{options.out}: no runs of {FITTED[1]} at {FITTED[0]}%: leave --report out")
    dispatch = fitted_dispatch(found[FITTED])
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    shown = track(sorted(found.items()), "simulating", console=Console(stderr=True))
    for (load, arm), runs in shown:
        compared = comparison(arm, runs, dispatch, SIMULATED)
        cells = [
            f"{one.emulated:.4g} → {one.simulated:.4g} ({one.error:+.0f}%)"
            for one in compared.values()
        ]
        counted = {name: one for name, one in compared.items() if one.counts}
        figures |= {f"{name}_error_{arm}_{load}": one.error for name, one in counted.items()}
        rows.append([f"{arm}, {load}%", f"{len(runs)}", *cells])
    table = "\n".join(markdown_table(["arm and load", "rounds", *COMPARED], rows))
    print(table)
    error = max(map(abs, figures.values()))
    figures |= {"simulator_error": error, "dispatch": dispatch}
    write_report("emulator_check", figures, options.json, tables=[table])
    if options.check and error > MOST_ERROR:
        sys.exit(f"the simulator is off by {error:.1f}%, more than {MOST_ERROR:.0f}%")


class Compared(NamedTuple):
    """A figure of emulated and simulated runs, and whether their difference says something."""

    emulated: float
    simulated: float
    counts: bool

    @property
    def error(self) -> float:
        """Return by how many percent they differ."""
        if not self.emulated:
            return 100.0 if self.simulated else 0.0
        return 100 * (self.simulated / self.emulated - 1)


def comparison(
    arm: str, runs: Sequence[dict[str, Any]], dispatch: float, times: int
) -> dict[str, Compared]:
    """Simulate emulated runs so many times each, and compare the means."""
    emulated = mean([one["result"] for one in runs])
    simulated = mean([simulated_run(arm, one, dispatch, times) for one in runs])
    few = float(np.mean([one["settings"]["requests"] for one in runs])) / FEW
    return {
        name: Compared(
            emulated[name],
            simulated[name],
            name != "preemptions" or max(emulated[name], simulated[name]) >= few,
        )
        for name in COMPARED
    }


def fitted_dispatch(runs: Sequence[dict[str, Any]]) -> float:
    """Return the way to an engine with which the first tokens of runs come as late as they did."""
    low, high = 0.0, MOST_DISPATCH
    for _ in range(7):
        middle = (low + high) / 2
        if comparison(FITTED[1], runs, middle, SIMULATED)["ttft"].error < 0:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 4)


def fleet_of(requests: int, out: Path) -> EmulatedFleet:
    """Return the fleet that serves so many requests a run."""
    options = Namespace(requests=requests, out=out, loads=LOADS, rounds=1, dilation=DILATION)
    fleet = EmulatedFleet(options)
    fleet.capacity = CAPACITY
    return fleet


def emulated_runs(folders: Sequence[Path]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the valid runs of arms that the simulator can repeat, by load and arm.

    Those of other engines, prompts or policies than the present ones are none.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    files = [file for folder in folders for file in sorted(folder.glob("*/round-*/*.json"))]
    for file in files:
        if file.stem not in REPEATABLE:
            continue
        kept = json.loads(file.read_text())
        load, number = file.parent.parent.name, int(file.parent.name.removeprefix("round-"))
        asked = fleet_of(kept["settings"]["requests"], file.parent)
        settings = asked.settings(Run(float(load) / 100, number, file.stem))
        settings["rate"] = kept["settings"]["rate"]  # of the capacity that was measured then
        same = json.loads(json.dumps(settings)) == kept["settings"]
        if same and kept["result"]["excess"] <= MOST_EXCESS:
            found.setdefault((load, file.stem), []).append(kept | {"round": number})
    return found


def simulated_run(
    arm: str, emulated: dict[str, Any], dispatch: float, times: int
) -> dict[str, float]:
    """Return the means over simulations of the requests of an emulated run."""
    settings, machine = emulated["settings"], read_machine(PROFILE)
    number, requests, rate = emulated["round"], settings["requests"], settings["rate"]
    load, slo = drawn_load(number, requests, rate, PROMPTS, LAW), SLOConfig(TTFT_S, TPOT_S)
    runs = []
    for seed in range(times):
        with trace_of(shaken(load, seed)) as trace:
            config = SimulationConfig(
                cluster=ClusterConfig(
                    *(REPLICAS, SLOTS, KV_TOKENS),
                    prefix_caching=True,
                    block_tokens=BLOCK,
                    dispatch_s=dispatch,
                    victim=ARMS[arm].victim,
                ),
                clock="independent",
                prefill=PrefillConfig(
                    "chunked", max_batched_tokens=machine.max_num_batched_tokens or 0
                ),
                step_time=step_time_of(machine.step_time),
                trace=trace,
                arrivals=ArrivalsConfig("trace"),
                forecast={"name": "none"},
                policies=[ARMS[arm].routing],
            )
            runs.append(run_metrics(simulation(config), slo))
    return mean(runs)


def shaken(load: Sequence[EmulatedRequest], seed: int) -> list[EmulatedRequest]:
    """Return a load whose requests arrive up to a millisecond later."""
    late = np.random.default_rng(seed).uniform(0.0, 1e-3, len(load)).tolist()
    moved = [replace(one, arrives=one.arrives + by) for one, by in zip(load, late, strict=True)]
    return sorted(moved, key=lambda one: one.arrives)


@contextmanager
def trace_of(load: Sequence[EmulatedRequest]) -> Iterator[dict[str, Any]]:
    """Write a load as a trace; yield it as the configuration of a simulation names it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("arrival_s", "input_tokens", "output_tokens"))
            for one in load:
                writer.writerow((f"{one.arrives:.6f}", one.prompt_tokens, one.answer_tokens))
        yield {"path": str(path), "requests": len(load)}


def step_time_of(step: StepSeconds) -> dict[str, Any]:
    """Return the time of an emulated engine's step as the configuration of a simulation has it."""
    return {"name": "batch", "a": step.constant, "b": step.per_new, "c": step.per_context}


def simulation(config: SimulationConfig) -> RunResult:
    """Simulate the only policy and planner of a configuration."""
    (found,) = create_candidates(run_setup(config)).values()
    return run(found.setup, found.policy, 0, planner=found.planner)


def mean(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in runs])) for name in COMPARED}


if __name__ == "__main__":
    main()
