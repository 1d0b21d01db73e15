"""What it is worth to forecast how much room an instance must keep free.

    python -m benchmarks.room [--quick] [--traces DIR] --json OUT

Four instances whose KV caches fill, with a pool, chunked prefill and vLLM's preemption: `headroom`
with exact, recorded and Kaplan-Meier forecasts against shares of the cache kept free
(`max_capacity` with ``reserve``), of which the best is chosen afterwards for each trace and load,
and against `jsq_load` and BF-IO without lookahead. Traces are the requests that SmolLM2 served,
with what the shipped predictor forecast of them; five tasks; and the CSV files of a folder. The
load is a share of what ``max_capacity`` with a tenth kept free serves when overloaded.

Prints mean latencies, and the gain of `headroom` over the best reserve, paired by seed, with half
a 95% confidence interval; ``gain_TRACE_LOAD_FORECAST`` in the file is that gain in percent.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress
from scipy.stats import t

from benchmarks.support.report import arguments, write_report
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    PrefillConfig,
    SimulationConfig,
)
from rescheduler.simulator.results.metrics import run_metrics
from rescheduler.simulator.run_setup import RunSetup, run_setup
from rescheduler.simulator.simulation import run

RECORDING = "checkpoints/smollm2-135m-instruct/forecasts.parquet"
RESERVES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
LOADS = (0.8, 1.0, 1.2)
SHOWN = ("latency", "latency_p99", "ttft", "tpot", "tpot_p99", "throughput", "preemptions")


class Case(NamedTuple):
    """A trace, and the capacity of the four KV caches that it fills, in tokens."""

    name: str
    trace: dict[str, Any]
    capacity: int
    forecasts: tuple[dict[str, Any], ...]


def main() -> None:
    """Simulate all, and print the tables."""
    parser = arguments("room by probability against shares of the KV cache kept free")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="more traces, *.csv.gz")
    options = parser.parse_args()
    few = 10 if options.quick else 1
    found = cases(options.traces, few)
    seeds = 2 if options.quick else 8
    figures: dict[str, float] = {}
    tables = []
    with Progress() as progress:
        task = progress.add_task("simulating", total=len(found) * len(LOADS))
        for case in found:
            served = capacity(case)
            for load in LOADS:
                runs = simulated(case, load * served, seeds)
                gains = over_best_reserve(runs)
                title = f"{case.name}, {load:.0%} load"
                tables.append(table(title, runs, gains))
                for forecast, (gain, _) in gains.items():
                    figures[f"gain_{case.name}_{load}_{forecast}"] = gain
                progress.advance(task)
    print("\n\n".join(tables))
    write_report("room", figures, options.json, tables=tables)


def cases(folder: Path | None, few: int) -> list[Case]:
    """Return the traces: the two that come with Headway, and those of a folder."""
    exact, unknown = {"name": "oracle"}, {"name": "kaplan_meier"}
    recorded = {"name": "replay", "recording": RECORDING}
    replay = {"name": "replay", "recording": RECORDING, "requests": 3000 // few}
    five_tasks = {"name": "five_tasks", "requests": 3000 // few}
    all_cases = [
        Case("smollm2", replay, 10_240, (exact, recorded, unknown)),
        Case("five_tasks", five_tasks, 10_240, (exact, unknown)),
    ]
    for path in sorted(folder.glob("*.csv.gz")) if folder else ():
        trace = {"path": str(path), "requests": 1500 // few}
        all_cases.append(Case(path.name.split(".")[0], trace, tokens(path), (exact, unknown)))
    return all_cases


def tokens(path: Path) -> int:
    """Return a KV cache that holds some 32 requests of a trace, and the longest one."""
    table = np.genfromtxt(path, delimiter=",", names=True)
    inputs, outputs = table["input_tokens"], table["output_tokens"]
    mean = (outputs * (inputs + outputs / 2)).sum() / outputs.sum()
    return int(max(32 * mean, (inputs + outputs).max() + 200))


def configuration(case: Case, rate: float, forecast: dict[str, Any]) -> RunSetup:
    """Return the cluster under this trace at so many requests per second."""
    return run_setup(
        SimulationConfig(
            cluster=ClusterConfig(4, slots=128, kv_capacity=case.capacity),
            clock="independent",
            dispatch="pool",
            prefill=PrefillConfig("chunked", max_batched_tokens=4096),
            step_time={"name": "batch", "a": 0.02, "b": 3.2e-4, "c": 0.0},
            trace=case.trace,
            arrivals=ArrivalsConfig("poisson", rate=rate),
            forecast=forecast,
        )
    )


def capacity(case: Case) -> float:
    """Return the requests per second that a tenth kept free serves of far too many.

    Counted from the first fifth of them to the last third, so that neither filling nor draining
    the instances counts.
    """
    setup = configuration(case, 1000.0, {"name": "none"})
    result = run(setup, create_policy("max_capacity", reserve=0.1), 0)
    first, last = np.quantile(result.requests.end, [0.2, 2 / 3])
    return float((2 / 3 - 0.2) * len(result.requests.end) / (last - first))


Runs = dict[str, list[dict[str, float]]]
"""Policy → the figures of each seed."""


def simulated(case: Case, rate: float, seeds: int) -> Runs:
    """Return the figures of all policies, by seed."""
    blind = configuration(case, rate, {"name": "none"})
    arms: list[tuple[str, RunSetup, str, dict[str, float]]] = [
        ("jsq_load", blind, "jsq_load", {}),
        ("bfio, H = 0", blind, "bfio", {"horizon": 0}),
        *((f"reserve {r:.0%}", blind, "max_capacity", {"reserve": r}) for r in RESERVES),
        *(
            (f"headroom, {forecast['name']}", configuration(case, rate, forecast), "headroom", {})
            for forecast in case.forecasts
        ),
    ]
    runs: Runs = defaultdict(list)
    for seed in range(seeds):
        for label, setup, name, options in arms:
            runs[label].append(run_metrics(run(setup, create_policy(name, **options), seed)))
    return dict(runs)


def over_best_reserve(runs: Runs) -> dict[str, tuple[float, float]]:
    """Return by forecast the gain in latency, in percent, and half its 95% interval."""
    reserves = [label for label in runs if label.startswith("reserve")]
    best = min(reserves, key=lambda label: float(np.mean(latencies(runs, label))))
    gains = {}
    for label in runs:
        if label.startswith("headroom, "):
            change = 100 * (1 - latencies(runs, label) / latencies(runs, best))
            half = t.ppf(0.975, len(change) - 1) * change.std(ddof=1) / np.sqrt(len(change))
            gains[label.removeprefix("headroom, ")] = (float(change.mean()), float(half))
    return gains


def latencies(runs: Runs, label: str) -> Any:
    """Return the mean latency of each seed, [seeds]."""
    return np.array([figures["latency"] for figures in runs[label]])


def table(title: str, runs: Runs, gains: dict[str, tuple[float, float]]) -> str:
    """Return means over the seeds as a Markdown table."""
    lines = [
        f"### {title}",
        f"| policy | {' | '.join(SHOWN)} | gain over the best reserve |",
        f"|---|{'---:|' * (len(SHOWN) + 1)}",
    ]
    for label, seeds in runs.items():
        means = [f"{np.mean([figures[name] for figures in seeds]):.4g}" for name in SHOWN]
        gain, half = gains.get(label.removeprefix("headroom, "), (None, None))
        shown = "" if gain is None else f"{gain:+.1f} ± {half:.1f}%"
        lines.append(f"| {label} | {' | '.join(means)} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
