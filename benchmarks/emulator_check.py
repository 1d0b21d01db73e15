"""How far the simulator is from vLLM's own scheduler, where the times of steps are exact.

    python -m benchmarks.emulator_check [--kept FOLDER] [--json OUT]

Simulates the requests that `benchmarks.emulated_fleet` has served, as they arrived there, with the
same times of steps, and compares: what differs is the simulator's idea of vLLM's scheduler, of its
queue, its blocks and its preemptions. Only arms without forecasts and moves count.

Prints, for each arm and load, the emulated figures (means over rounds), the simulated ones, and by
how much they differ in percent; ``simulator_error`` in the file is the largest difference.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulated_fleet import (
    ARMS,
    BLOCK,
    KV_TOKENS,
    LAW,
    MOST_EXCESS,
    PROFILE,
    PROMPTS,
    REPLICAS,
)
from benchmarks.support.emulated_load import TPOT_S, TTFT_S, EmulatedRequest, drawn_load
from benchmarks.support.report import arguments, write_report
from rescheduler.emulation.emulate_options import read_machine
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    PrefillConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.results.metrics import run_metrics
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.run_setup import run_setup
from rescheduler.simulator.simulation import run

COMPARED = ("latency", "ttft", "tpot", "goodput", "preemptions")
SLOTS = 128


def main() -> None:
    parser = arguments("the simulator against emulated engines", quick=False)
    kept = Path("benchmarks/results/emulated_fleet")
    parser.add_argument("--kept", type=Path, default=kept, help="folder of emulated runs")
    options = parser.parse_args()
    rows, figures = [], {}
    found = emulated_runs(options.kept)
    if not found:
        sys.exit(f"{options.kept}: no valid runs of benchmarks.emulated_fleet")
    for (load, arm), runs in sorted(found.items()):
        emulated = mean([one["result"] for one in runs])
        simulated = mean([simulated_run(arm, one["round"], one["settings"]) for one in runs])
        cells = []
        for name in COMPARED:
            error = 100 * (simulated[name] / emulated[name] - 1) if emulated[name] else 0.0
            cells.append(f"{emulated[name]:.4g} → {simulated[name]:.4g} ({error:+.0f}%)")
            figures[f"{name}_error_{arm}_{load}"] = error
        rows.append([f"{arm}, {load}%", f"{len(runs)}", *cells])
    table = "\n".join(markdown_table(["arm and load", "rounds", *COMPARED], rows))
    print(table)
    figures["simulator_error"] = max(map(abs, figures.values()), default=float("nan"))
    write_report("emulator_check", figures, options.json, tables=[table])


def emulated_runs(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the valid runs of arms that the simulator can repeat, by load and arm."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*/round-*/*.json")):
        arm = ARMS.get(file.stem)
        if arm is None or arm.migration or arm.order != "fcfs" or arm.routing["name"] == "headroom":
            continue
        kept = json.loads(file.read_text())
        if kept["result"]["excess"] <= MOST_EXCESS:
            number = int(file.parent.name.removeprefix("round-"))
            key = (file.parent.parent.name, file.stem)
            found.setdefault(key, []).append(kept | {"round": number})
    return found


def simulated_run(arm: str, number: int, settings: dict[str, Any]) -> dict[str, float]:
    load = drawn_load(number, settings["requests"], settings["rate"], PROMPTS, LAW)
    times = read_machine(PROFILE)
    step = times.step_time
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        write_trace(load, trace)
        config = SimulationConfig(
            # vLLM keeps one block empty.
            cluster=ClusterConfig(
                REPLICAS, SLOTS, KV_TOKENS, prefix_caching=True, block_tokens=BLOCK
            ),
            clock="independent",
            prefill=PrefillConfig("chunked", max_batched_tokens=times.max_num_batched_tokens or 0),
            step_time={
                "name": "batch",
                "a": step.constant,
                "b": step.per_new,
                "c": step.per_context,
            },
            trace={"path": str(trace), "requests": len(load)},
            arrivals=ArrivalsConfig("trace"),
            forecast={"name": "none"},
        )
        slo = SLOConfig(ttft_s=TTFT_S, tpot_s=TPOT_S)
        result = run(run_setup(config), create_policy(**ARMS[arm].routing), 0)
        return run_metrics(result, slo)


def write_trace(load: list[EmulatedRequest], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "input_tokens", "output_tokens"))
        for one in load:
            writer.writerow((f"{one.arrives:.6f}", one.prompt_tokens, one.answer_tokens))


def mean(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in runs])) for name in COMPARED}


if __name__ == "__main__":
    main()
