"""What room in KV caches, an order of service, and forecasts are worth, on ten simulated traces.

    python -m benchmarks.worth STUDY [--quick] [--seeds N] [--traces DIR] [--out FOLDER] --json OUT

The settings are files of ``configs/simulate``. Their requests are those that SmolLM2 served, with
what a predictor forecast of them; in their place also come five tasks, the CSV files of a folder,
and the settings of two papers. The load is a share of what ``max_capacity`` with a tenth kept free
serves when overloaded. What needs a forecast is simulated with each that the file varies, all else
once. Studies:

- ``room``: `headroom` against six shares kept free, of which the best is chosen afterwards for each
  trace and load. *Goodput* counts requests whose TTFT is at most 20 times, and whose TPOT at most 4
  times, what it is on an empty cluster. *KV* is the share in use until the last request has come.
- ``order``: who of a pool goes first, relative to the order of arrival. With chunked prefill a
  recorded forecast exists too late for a pool; so SmolLM2's requests are also served by prefill
  instances and decode instances (``staged``), where it is there in time.
- ``forecast_value``: routing, room and moves over the best that needs no forecast.

Gains are paired by seed, with half a 95% interval. The runs of a trace and load are kept in the
folder as they finish, and not run again while their settings stay the same; the report has those
that are there when the program ends, or is interrupted.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.progress import Progress

from benchmarks.support.report import (
    Cells,
    Estimate,
    Rounds,
    arguments,
    change,
    gain,
    relative_cells,
    write_report,
)
from rescheduler.routing import Needs, create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    MigrationConfig,
    PrefillConfig,
    SimulationConfig,
    SLOConfig,
    read_config,
)
from rescheduler.simulator.results.metrics import RunResult, run_metrics
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.simulation import Candidate, create_candidates, run, run_setup

LOADS = (0.8, 1.0, 1.2)
TTFT_TIMES, TPOT_TIMES = 20.0, 4.0
STAGE = PrefillConfig("stage", instances=8)
NONE: dict[str, Any] = {"name": "none"}
FORECASTS = ("oracle", "replay", "kaplan_meier")
MEANS = (
    *("latency", "latency_p99", "ttft", "tpot", "tpot_p99"),
    *("goodput", "throughput", "kv", "preemptions"),
)
CHANGES = ("latency", "latency_p50", "latency_p99", "ttft", "slowdown", "longest_wait")

Runs = dict[str, dict[int, dict[str, float]]]
"""Arm → seed → figures."""


class Case(NamedTuple):
    """Requests, and a cluster that they fill; ``staged`` has prefill instances of its own."""

    name: str
    config: SimulationConfig
    staged: bool = False

    def at(self, rate: float, **settings: Any) -> SimulationConfig:
        """Return the simulation of so many requests a second, with other settings."""
        prefill = STAGE if self.staged else self.config.prefill
        arrivals = ArrivalsConfig("poisson", rate=rate)
        return replace(self.config, arrivals=arrivals, prefill=prefill, **settings)


class Use(NamedTuple):
    """What is compared: the files' arms, with the best of those whose labels begin like this."""

    files: tuple[str, ...]
    loads: tuple[float, ...]
    base: tuple[str, ...]
    figures: tuple[str, ...] = ("latency",)


STUDIES = {
    "room": {"room": Use(("room_at_once", "room"), LOADS, ("reserve",))},
    "order": {"order": Use(("order",), LOADS, ("fcfs",))},
    "forecast_value": {
        "moving": Use(("moving",), (0.9,), ("no moves", "star"), ("latency", "tpot_p99")),
        "room": Use(("room",), (1.0,), ("jsq_load", "reserve")),
        "routing": Use(("routing",), (1.0,), ("jsq", "bfio 0"), ("throughput",)),
    },
}


def main() -> None:
    parser = arguments("what room, an order of service, and forecasts are worth")
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--traces", type=Path, metavar="DIR", help="more traces, *.csv.gz")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each arm (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("runs/worth"), metavar="FOLDER")
    options = parser.parse_args()
    few, seeds = (10, 2) if options.quick else (1, options.seeds)
    traces = cases(options.traces, few, staged=options.study == "order")
    cells = [
        (name, use, case, load)
        for name, use in STUDIES[options.study].items()
        for case in traces
        for load in use.loads
    ]
    results: list[tuple[str, Use, Case, float, Runs]] = []
    with suppress(KeyboardInterrupt), Progress() as progress:
        for name, use, case, load in progress.track(cells, description="simulating"):
            depends = repr((use, case, seeds, [settings(f"simulate/{file}") for file in use.files]))
            folder = options.out / options.study / name / case.name
            kept, key = Cells(folder, {"of": depends}), f"load-{load}"
            if kept.read(key) is None:
                kept.write(key, simulated(use, case, load, seeds))
            runs = {arm: dict(enumerate(by_seed)) for arm, by_seed in kept.read(key).items()}
            results.append((name, use, case, load, runs))
    figures: dict[str, float] = {}
    tables, rows = [], []
    for name, use, case, load, runs in results:
        title = f"{case.name}, {load:.0%} load"
        if options.study == "order":
            tables.append(order_table(title, runs))
            figures |= order_figures(f"{case.name}_{100 * load:.0f}", runs)
            continue
        for figure in use.figures:
            found = gains(runs, use, figure)
            if options.study == "room":
                prefix = f"gain_{case.name}_{load}"
                tables.append(room_table(title, runs, found))
            else:
                prefix = f"{name}_{case.name}_{figure}"
                rows.append([name, case.name, figure, *value_cells(runs, use, figure, found)])
            figures |= {f"{prefix}_{forecast}": one.mean for forecast, one in found.items()}
    if rows:
        heads = ["use", "trace", "figure", "best without forecasts", "exact", "recorded"]
        tables.append("\n".join(markdown_table([*heads, "Kaplan–Meier"], rows, "llll")))
    print("\n\n".join(tables))
    write_report(options.study, figures, options.json, tables=tables)


def settings(name: str) -> tuple[SimulationConfig, list[dict[str, Any]]]:
    """Return a simulation of ``configs``, and the forecasts that it varies."""
    values = yaml.safe_load(Path(f"configs/{name}.yaml").read_text(encoding="utf-8"))
    forecasts = values.pop("vary", {}).get("forecast", [])
    return read_config(values), forecasts


def cases(folder: Path | None, few: int, staged: bool = False) -> list[Case]:
    """Return the traces and papers, each with a ``few``-th of its requests."""
    room, _ = settings("simulate/room")
    found = {
        "smollm2": room,
        "five_tasks": replace(room, trace={"name": "five_tasks", "requests": 3000}),
    }
    for path in sorted(folder.glob("*.csv.gz")) if folder else ():
        trace = {"path": str(path), "requests": 1500, "skip_empty": True}
        cluster = replace(room.cluster, kv_capacity=tokens(path))
        found[path.name.split(".")[0]] = replace(room, trace=trace, cluster=cluster)
    for name, requests in (("mixed_workloads", 3000), ("star_trace", 800)):
        paper, _ = settings(f"papers/{name}")
        found[name] = replace(
            paper,
            cluster=replace(paper.cluster, prefix_caching=True),  # as vLLM does by default
            trace=paper.trace | {"requests": requests},
            migration=MigrationConfig(),
            max_seconds=None,
        )
    each = []
    for name, config in found.items():
        trace = config.trace | {"requests": config.trace["requests"] // few}
        each.append(Case(name, replace(config, trace=trace)))
    return [Case("smollm2_staged", each[0].config, staged=True), *each] if staged else each


def tokens(path: Path) -> int:
    """Return a KV cache that holds some 32 requests of a trace, and the longest one."""
    table = np.genfromtxt(path, delimiter=",", names=True)
    inputs, outputs = table["input_tokens"], table["output_tokens"]
    mean = (outputs * (inputs + outputs / 2)).sum() / outputs.sum()
    return int(max(32 * mean, (inputs + outputs).max() + 200))


def alone(case: Case, rate: float, **policy: Any) -> RunResult:
    config = case._replace(staged=False).at(rate, forecast=NONE, dispatch="pool")
    return run(run_setup(config), create_policy(**policy), 0)


def capacity(case: Case) -> float:
    """Return the requests per second that a tenth kept free serves of far too many.

    Counted from the first fifth of them to the last third, so that neither filling nor draining
    the instances counts.
    """
    end = alone(case, 1000.0, name="max_capacity", reserve=0.1).requests.end
    first, last = np.nanquantile(end, [0.2, 2 / 3])
    return float((2 / 3 - 0.2) * len(end) / (last - first))


def objectives(case: Case, served: float) -> SLOConfig:
    """Return multiples of what requests take at a hundredth of the capacity."""
    found = run_metrics(alone(case, served / 100, name="jsq_load"))
    return SLOConfig(ttft_s=TTFT_TIMES * found["ttft"], tpot_s=TPOT_TIMES * found["tpot"])


def arms(file: str, case: Case, rate: float) -> Iterator[tuple[str, Candidate]]:
    """Return the candidates of a file in a case, those that need a forecast with each of them."""
    config, forecasts = settings(f"simulate/{file}")
    if config.arrivals.kind == "revelation":
        trace = case.config.trace | {"requests": 4 * case.config.trace["requests"]}
        config = replace(config, trace=trace)
    else:
        step = case.config.step_time
        cost = {"prefill_cost": step["b"] / step["a"]}
        config = case.at(
            rate,
            dispatch=config.dispatch,
            policies=[
                choice.plain | (cost if choice.name == "headroom" else {})
                for choice in config.policy_choices()
            ],
            orders=config.orders,
            migration=config.migration,
        )
    if case.staged:
        forecasts = [*forecasts, {"name": "replay", "recording": case.config.trace["recording"]}]
    elif case.config.trace.get("name") != "replay":
        forecasts = [one for one in forecasts if one["name"] != "replay"]
    made = {
        forecast["name"]: create_candidates(run_setup(replace(config, forecast=forecast)))
        for forecast in (NONE, *forecasts)
    }
    for label, candidate in made["none"].items():
        if not needs_forecasts(candidate):
            yield label, candidate
        elif getattr(candidate.order, "by", "") == "prompt":  # only a long wait is forecast
            yield label, made["kaplan_meier"][label]
        else:
            yield from ((f"{label}, {one['name']}", made[one["name"]][label]) for one in forecasts)


def needs_forecasts(candidate: Candidate) -> bool:
    planner = candidate.planner
    return (
        candidate.policy.needs >= Needs.LENGTHS
        or (planner is not None and planner.needs >= Needs.LENGTHS)
        or candidate.order.needs_lengths
    )


def simulated(use: Use, case: Case, load: float, seeds: int) -> dict[str, list[dict[str, float]]]:
    served = capacity(case)
    slo = objectives(case, served)
    each = [arm for file in use.files for arm in arms(file, case, load * served)]
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for seed in range(seeds):
        for label, (policy, planner, setup, order) in each:
            result = run(setup, policy, seed, label, planner, order)
            runs[label].append(run_metrics(result, slo) | further(result, setup.config))
    return runs


def further(result: RunResult, config: SimulationConfig) -> dict[str, float]:
    requests = result.requests
    arriving = result.series.time <= requests.arrival.max()
    kv = result.series.load[arriving].sum() / max(1, result.series.load[arriving].size)
    return {
        "kv": float(kv / config.cluster.capacity_tokens),
        "slowdown": float(((requests.end - requests.arrival) / requests.output).mean()),
        "longest_wait": float(np.nanmax(requests.start - requests.arrival)),
    }


def best(runs: Runs, use: Use, figure: str) -> str:
    """Return the arm without forecasts that the others are compared with."""
    without = [arm for arm in runs if arm.startswith(use.base) and ", " not in arm]
    choose = max if figure == "throughput" else min
    return choose(without, key=lambda arm: mean(runs[arm], figure))


def mean(rounds: Rounds, figure: str) -> float:
    return float(np.mean([figures[figure] for figures in rounds.values()]))


def gains(runs: Runs, use: Use, figure: str) -> dict[str, Estimate]:
    """Return what each forecast gains over the best without, in percent."""
    base = runs[best(runs, use, figure)]
    return {
        forecast: gain(rounds, base, figure, more_is_better=figure == "throughput")
        for arm, rounds in runs.items()
        if (forecast := arm.rpartition(", ")[2]) in FORECASTS
    }


def room_table(title: str, runs: Runs, found: Mapping[str, Estimate]) -> str:
    rows = []
    for arm, rounds in runs.items():
        gained = found.get(arm.rpartition(", ")[2])
        shown = f"{gained.mean:+.1f} ± {gained.half:.1f}%" if gained else ""
        rows.append([arm, *(f"{mean(rounds, name):.4g}" for name in MEANS), shown])
    heads = ["policy", *MEANS, "gain over the best reserve"]
    return "\n".join([f"### {title}", *markdown_table(heads, rows)])


def order_table(title: str, runs: Mapping[str, Rounds]) -> str:
    rows = [
        [arm, *relative_cells(runs, arm, "fcfs", CHANGES), f"{mean(rounds, 'preemptions'):.0f}"]
        for arm, rounds in runs.items()
    ]
    heads = ["order", "latency", "P50", "P99", "TTFT", "slowdown", "longest wait", "preemptions"]
    return "\n".join([f"### {title}, times in seconds", *markdown_table(heads, rows)])


def order_figures(name: str, runs: Mapping[str, Rounds]) -> dict[str, float]:
    return {
        f"{figure}_{name}_{arm}": change(rounds, runs["fcfs"], figure).mean
        for arm, rounds in runs.items()
        if arm != "fcfs"
        for figure in ("latency", "latency_p99", "ttft")
    }


def value_cells(runs: Runs, use: Use, figure: str, found: Mapping[str, Estimate]) -> list[str]:
    base = best(runs, use, figure)
    gained = [found.get(forecast) for forecast in FORECASTS]
    shown = [f"{one.mean:+.1f} ± {one.half:.1f}%" if one else "" for one in gained]
    return [f"{base}: {mean(runs[base], figure):.4g}", *shown]


if __name__ == "__main__":
    main()
