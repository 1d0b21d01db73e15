"""What it is worth to look ahead without a horizon, against the best of several horizons.

    python -m benchmarks.lookahead [--quick] [--traces DIR] --json OUT

Clusters behind a barrier, 72 slots an instance, a pool that is never empty: Table 1 of Chen et
al. 2026 (``configs/papers/bfio_table1.yaml``), BurstGPT's GPT-4 conversations, the requests that
SmolLM2 served, and the CSV files of a folder, drawn anew for each seed in runs of consecutive
requests. BF-IO as published, with H = 0 to 80, and with its default, with exact forecasts, with
Kaplan-Meier's and, where there are, recorded ones. Each run ends while requests still wait.

Prints means, and the imbalance and the throughput of the default over those of the horizon that,
afterwards, has the least imbalance: paired by seed, with half a 95% confidence interval. Then
small pools whose best placement is found by exhaustive search with the future known: the
imbalance of a whole run over the least possible one. Run again, it goes on from the tables that
the file has, of a short run only in a short run.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import track

from benchmarks.support.clairvoyant import least_imbalance, reached_imbalance
from benchmarks.support.report import arguments, write_report
from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.routing import RoutingPolicy, create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    PowerConfig,
    SimulationConfig,
)
from rescheduler.simulator.results.metrics import half_interval, run_metrics
from rescheduler.simulator.run_setup import run_setup
from rescheduler.simulator.simulation import run
from rescheduler.simulator.workloads.trace import ResampledTrace, first_requests
from rescheduler.simulator.workloads.trace_files import read_trace

RECORDING = "recordings/smollm2-135m-instruct.parquet"
HORIZONS = (0, 5, 10, 20, 40, 80)
SHOWN = ("imbalance", "throughput", "energy")
SLOTS = 72
MOST_READ = 200_000
EXACT, AGES = {"name": "oracle"}, {"name": "kaplan_meier"}
RECORDED = {"name": "replay", "recording": RECORDING}


class Case(NamedTuple):
    """A trace, and how much of it is served."""

    name: str
    trace: dict[str, Any]
    instances: int
    steps: int
    forecasts: tuple[dict[str, Any], ...] = (EXACT, AGES)
    drawn: ResampledTrace | None = None


Runs = dict[str, npt.NDArray[np.float64]]
"""Policy → [seeds, figures of `SHOWN`]."""


def main() -> None:
    """Simulate all, and print the tables."""
    parser = arguments("BF-IO without a horizon against the best of several")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="more traces, *.csv.gz")
    options = parser.parse_args()
    few = 10 if options.quick else 1
    figures, tables = kept_in(options.json, options.quick)

    def keep(title: str, make: Callable[[], str]) -> None:
        """Make and print a table unless the file has it, and write all so far."""
        if title not in tables:
            tables[title] = make()
        print(f"### {title}\n{tables[title]}", end="\n\n", flush=True)
        further = {"tables": tables, "quick": options.quick}
        write_report("lookahead", figures, options.json, quiet=True, **further)

    def compared(case: Case, forecast: dict[str, Any], title: str) -> str:
        runs = simulated(case, forecast, 2 if options.quick else 4)
        figures.update({f"{name}, {title}": ratio for name, ratio in against_best(runs).items()})
        return table(runs)

    found = list(cases(options.traces, few))
    for forecast in (EXACT, RECORDED, AGES):
        for case in (case for case in found if forecast in case.forecasts):
            title = f"{case.name}, {forecast['name']}"
            keep(title, partial(compared, case, forecast, title))
        if forecast == EXACT:
            title = "Nine requests, two instances of two slots"
            keep(title, partial(small_pools, 5 if options.quick else 40, figures))


def kept_in(file: Path | None, quick: bool) -> tuple[dict[str, float], dict[str, str]]:
    """Return figures and tables that an earlier run of the same length has left in the file."""
    kept = json.loads(file.read_text()) if file is not None and file.exists() else {}
    if kept.get("quick", False) != quick:
        return {}, {}
    return kept.get("figures", {}), kept.get("tables", {})


def cases(folder: Path | None, few: int) -> Iterator[Case]:
    """Yield the traces: three that come with Headway, and those of a folder."""
    table1 = {"name": "burstgpt_sample", "requests": 100_000 // few}
    yield Case("Table 1", table1, 16, 4650 // few)
    gpt4 = {"name": "burstgpt_like", "subset": "gpt4_conversation", "requests": 25_000 // few}
    yield Case("GPT-4", gpt4, 16, 4000 // few)
    recorded = {"name": "replay", "recording": RECORDING, "requests": 16_000 // few}
    yield Case("SmolLM2", recorded, 8, 3000 // few, (EXACT, AGES, RECORDED))
    for path in sorted(folder.glob("*.csv.gz")) if folder else ():
        file = read_trace(path, skip_empty=True)
        requests = first_requests(file, np.random.default_rng(0), MOST_READ)
        length = float(requests.output.mean())
        steps = max(1000, int(3 * length)) // few
        instances = 16 if length < 1000 else 8
        count = int(1.5 * instances * SLOTS * (steps / length + 1))
        drawn = ResampledTrace(file.name, requests, count)
        yield Case(path.name.split(".")[0], {"path": str(path)}, instances, steps, drawn=drawn)


def simulated(case: Case, forecast: dict[str, Any], seeds: int) -> Runs:
    """Return the figures of all policies, by seed."""
    config = SimulationConfig(
        cluster=ClusterConfig(case.instances, slots=SLOTS),
        clock="barrier",
        dispatch="pool",
        step_time={"name": "bfio"},
        power=PowerConfig(idle=100, max=400, gamma=0.7, mfu_sat=0.45),
        trace=case.trace,
        arrivals=ArrivalsConfig("revelation", target=4 * case.instances),
        forecast=forecast,
        max_steps=case.steps,
    )
    setup = run_setup(config)
    if case.drawn is not None:
        setup = replace(setup, trace=case.drawn)
    policies = {"FCFS": create_policy("fcfs")}
    policies |= {f"H = {h}": create_policy("bfio", horizon=h) for h in HORIZONS}
    policies["default"] = create_policy("bfio")
    runs: dict[str, list[list[float]]] = defaultdict(list)
    for seed in track(range(seeds), f"{case.name}, {forecast['name']}", transient=True):
        for label, policy in policies.items():
            metrics = run_metrics(run(setup, policy, seed))
            runs[label].append([metrics[name] for name in SHOWN])
    return {label: np.array(values) for label, values in runs.items()}


def best_horizon(runs: Runs) -> str:
    """Return the horizon with the least imbalance."""
    return min((f"H = {h}" for h in HORIZONS), key=lambda label: float(runs[label][:, 0].mean()))


def against_best(runs: Runs) -> dict[str, float]:
    """Return the default's figures over those of the best horizon, and over FCFS's."""
    return {
        f"{name} over {base}": float((runs["default"][:, k] / runs[label][:, k]).mean())
        for base, label in (("the best horizon", best_horizon(runs)), ("FCFS", "FCFS"))
        for k, name in enumerate(SHOWN)
    }


def table(runs: Runs) -> str:
    """Return means over the seeds, and how the default compares, as a Markdown table."""
    best = best_horizon(runs)
    lines = [
        "| policy | imbalance, 10³ tokens | throughput, 10³ tokens/s | energy, kJ |"
        " default's imbalance over it | default's throughput over it |",
        f"|---|{'---:|' * 5}",
    ]
    for label, values in runs.items():
        means = " | ".join(f"{mean / 1e3:.4g}" for mean in values.mean(axis=0))
        ratios = runs["default"] / values
        halves = half_interval(ratios)
        shown = f"{ratios[:, 0].mean():.2f} ± {halves[0]:.2f}"
        gained = f"{100 * ratios[:, 1].mean() - 100:+.2f} ± {100 * halves[1]:.2f}%"
        name = f"**{label}**" if label == best else label
        lines.append(f"| {name} | {means} | {shown} | {gained} |")
    return "\n".join(lines)


def small_pools(pools: int, figures: dict[str, float]) -> str:
    """Compare whole runs with the least imbalance that a run can have, the future known."""
    policies = {f"H = {h}": create_policy("bfio", horizon=h) for h in HORIZONS}
    policies |= {
        f"H = {h}, exact": create_policy("bfio", horizon=h, solver="exact") for h in (0, 5)
    }
    policies |= {"default": create_policy("bfio")}
    policies |= {"default, exact": create_policy("bfio", solver="exact")}
    generator = np.random.default_rng(2026)
    over: dict[str, list[float]] = defaultdict(list)
    for _ in track(range(pools), "small pools", transient=True):
        prompts = np.maximum(generator.lognormal(4.0, 0.8, 9), 1).astype(int).tolist()
        outputs = np.minimum(generator.geometric(1 / 4, 9), 12).tolist()
        pool = tuple(zip(prompts, outputs, strict=True))
        least = least_imbalance(2, 2, pool)
        for label, policy in policies.items():
            over[label].append(reached_imbalance(2, 2, pool, partial(chosen, policy)) / least)
    lines = ["| policy | imbalance over the least |", "|---|---:|"]
    for label, values in over.items():
        half = half_interval(np.array(values)[:, None])[0]
        lines.append(f"| {label} | {np.mean(values):.3f} ± {half:.3f} |")
        figures[f"small pools, {label}"] = float(np.mean(values))
    return "\n".join(lines)


def chosen(policy: RoutingPolicy, view: ClusterView) -> npt.NDArray[np.int64]:
    """Return where a policy sends the waiting requests."""
    return policy.assign(view).instance


if __name__ == "__main__":
    main()
