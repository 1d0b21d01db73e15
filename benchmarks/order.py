"""What the order of service is worth: who of those that wait goes first.

    python -m benchmarks.order [--quick] [--seeds N] [--traces DIR] [--out FOLDER] --json OUT

The settings of `benchmarks.room`: instances whose KV caches fill, at 80, 100 and 120% of what they
serve, and a pool of 256 requests that are placed by `max_capacity` with a tenth kept free. Orders:
as they come; by the prompt alone (shortest first, the highest response ratio, as engines have it);
and by what a request is expected to cost, with forecasts that are exact, noisy (σ = 0.8), recorded,
or none but the lengths of others (``kaplan_meier``). With chunked prefill a recorded forecast
exists once a request has its first token, too late for a pool; so the requests of SmolLM2 are also
served by prefill instances and decode instances, where it is there in time. ``jsq_load`` is what
`headway serve` does by default.

Prints, relative to the order of arrival and paired by seed with half a 95% interval, latency and
time to first token, median and P99 latency, slowdown (latency over output tokens), the longest
wait; and preemptions. The runs of a trace and load are kept in the folder as they finish, and not
run again while their settings stay the same.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from benchmarks.room import BY_AGE, EXACT, NONE, RECORDED, Case, at_rate, capacity, cases
from benchmarks.support.report import (
    Cells,
    Rounds,
    arguments,
    change,
    relative_cells,
    write_report,
)
from rescheduler.ordering import create_order
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import PrefillConfig
from rescheduler.simulator.results.metrics import run_metrics
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.run_setup import RunSetup
from rescheduler.simulator.simulation import run

LOADS = (1.2, 1.0, 0.8)
NOISY = {"name": "noisy", "sigma": 0.8}
FCFS = {"name": "fcfs"}
TENTH_FREE = {"name": "max_capacity", "reserve": 0.1}
BASE = "fcfs"
RELATIVE = ("latency", "latency_p50", "latency_p99", "ttft", "slowdown", "longest_wait")
PREFILL_SERVERS = 8

Runs = dict[str, list[dict[str, float]]]
"""Arm → the figures of each seed."""


class Arm(NamedTuple):
    order: dict[str, Any]
    forecast: dict[str, Any] = NONE
    policy: dict[str, Any] = TENTH_FREE


class Setting(NamedTuple):
    """A case of `benchmarks.room`, and whether prompts are computed by instances of their own."""

    case: Case
    staged: bool = False

    @property
    def name(self) -> str:
        return f"{self.case.name}_staged" if self.staged else self.case.name

    def setup(self, rate: float, arm: Arm) -> RunSetup:
        setup = at_rate(self.case, rate, arm.forecast)
        if self.staged:
            stage = PrefillConfig("stage", instances=PREFILL_SERVERS)
            setup = replace(setup, config=replace(setup.config, prefill=stage))
        return setup

    def arms(self) -> dict[str, Arm]:
        forecasts: list[dict[str, Any]] = [EXACT, NOISY, BY_AGE]
        if self.staged:
            forecasts.append(RECORDED)
        found = {
            BASE: Arm(FCFS),
            "fcfs, jsq_load": Arm(FCFS, policy={"name": "jsq_load"}),
            "shortest prompt": Arm({"name": "shortest", "by": "prompt"}, BY_AGE),
            "response ratio of prompts": Arm({"name": "response_ratio", "by": "prompt"}, BY_AGE),
        }
        for name in ("shortest", "response_ratio", "boost"):
            for forecast in forecasts:
                found[f"{name}, {forecast['name']}"] = Arm({"name": name}, forecast)
        return found


def main() -> None:
    parser = arguments("what it gains to serve those first that are expected to cost least")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="more traces, *.csv.gz")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each arm (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("runs/order"), metavar="FOLDER")
    options = parser.parse_args()
    seeds = 2 if options.quick else options.seeds
    kept = Cells(options.out)
    cells = [
        (one, load)
        for load in LOADS
        for one in settings(options.traces, 10 if options.quick else 1)
    ]
    with suppress(KeyboardInterrupt), Progress() as progress:
        for setting, load in progress.track(cells, description="simulating"):
            name = name_of(setting, load, seeds)
            if kept.read(name) is None:
                kept.write(name, simulated(setting, load, seeds))
    figures: dict[str, float] = {}
    tables = []
    for setting, load in cells:
        runs = kept.read(name_of(setting, load, seeds))
        if runs is not None:
            arms = {label: dict(enumerate(by_seed)) for label, by_seed in runs.items()}
            tables.append(table(f"{setting.name}, {load:.0%} load", arms))
            figures |= figures_of(f"{setting.name}_{100 * load:.0f}", arms)
    figures |= goals(figures)
    print("\n\n".join(tables))
    write_report("order", figures, options.json, tables=tables)


def settings(folder: Path | None, few: int) -> list[Setting]:
    found = cases(folder, few)
    return [Setting(found[0], staged=True), *map(Setting, found)]


def name_of(setting: Setting, load: float, seeds: int) -> str:
    """Return what a trace's runs at a load are kept as, otherwise for other settings."""
    text = repr((setting, setting.arms(), PREFILL_SERVERS, seeds))
    return f"{setting.name}-{load}-{sha256(text.encode()).hexdigest()[:8]}"


def simulated(setting: Setting, load: float, seeds: int) -> Runs:
    served = capacity(setting.case)
    runs: Runs = defaultdict(list)
    for seed in range(seeds):
        for label, arm in setting.arms().items():
            policy, order = create_policy(**arm.policy), create_order(**arm.order)
            result = run(setting.setup(load * served, arm), policy, seed, order=order)
            requests = result.requests
            latency = requests.end - requests.arrival
            further = {
                "slowdown": float((latency / requests.output).mean()),
                "longest_wait": float(np.nanmax(requests.start - requests.arrival)),
            }
            runs[label].append(run_metrics(result) | further)
    return runs


def figures_of(name: str, arms: Mapping[str, Rounds]) -> dict[str, float]:
    return {
        f"{figure}_{name}_{label}": change(rounds, arms[BASE], figure).mean
        for label, rounds in arms.items()
        if label != BASE
        for figure in ("latency", "latency_p99", "ttft")
    }


def goals(figures: dict[str, float]) -> dict[str, float]:
    """Return what is asked of the default order, of the figures that are there."""
    found = {}
    for staged in ("smollm2_staged", "smollm2"):
        by = "replay" if staged != "smollm2" else "kaplan_meier"
        for figure, key in (
            ("latency", "latency_gain"),
            ("ttft", "ttft_gain"),
            ("latency_p99", "p99_change"),
        ):
            value = figures.get(f"{figure}_{staged}_120_boost, {by}")
            if value is not None:
                found[f"{key}_{staged}_120"] = value if key == "p99_change" else -value
    exact = figures.get("latency_smollm2_staged_120_boost, oracle")
    if exact:
        found["kept_of_exact"] = figures["latency_smollm2_staged_120_boost, replay"] / exact
    for by in ("oracle", "noisy", "kaplan_meier", "replay"):
        means = [
            value
            for key, value in figures.items()
            if key.startswith("latency_")
            and key.endswith(f"boost, {by}")
            and not key.startswith("latency_p99")
        ]
        if means:
            found[f"worst_mean_change_{by}"] = max(means)
    return found


def table(title: str, arms: Mapping[str, Rounds]) -> str:
    rows = []
    for label, rounds in arms.items():
        preemptions = np.mean([one["preemptions"] for one in rounds.values()])
        cells = relative_cells(arms, label, BASE, RELATIVE)
        rows.append([label, *cells, f"{preemptions:.0f}"])
    heads = ["order", "latency", "P50", "P99", "TTFT", "slowdown", "longest wait", "preemptions"]
    return "\n".join([f"### {title}, times in seconds", *markdown_table(heads, rows)])


if __name__ == "__main__":
    main()
