"""What it is worth to forecast how much room an instance must keep free.

    python -m benchmarks.room [--quick] [--seeds N] [--traces DIR] [--out FOLDER] --json OUT

Instances whose KV caches fill, with preemption and prefix caching as in vLLM: `headroom` with
exact, recorded and Kaplan-Meier forecasts against shares of the cache kept free (`max_capacity`
with ``reserve``), of which the best is chosen afterwards for each trace and load, against
`jsq_load` and BF-IO without lookahead, all with a pool; and against `jsq_load` and vLLM's own rule
with instant dispatch. Traces are the requests that SmolLM2 served, with what a predictor forecast
of them; five tasks; the settings of two papers; and the CSV files of a folder. The load is a share
of what ``max_capacity`` with a tenth kept free serves when overloaded.

Prints means, and the gain of `headroom` in latency over the best reserve, paired by seed, with half
a 95% confidence interval; ``gain_TRACE_LOAD_FORECAST`` in the file is that gain in percent.
*Goodput* counts the requests per second whose TTFT is at most 20 times, and whose TPOT at most 4
times, what it is on an empty cluster. *KV* is the share of the caches in use until the last
request has arrived.

The runs of a trace and load are kept in the folder as they finish, and not run again while their
settings and policy stay the same; the report has those that are there when the program ends, or is
interrupted.
"""

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml
from rich.progress import Progress

from benchmarks.support.report import Cells, Estimate, arguments, percent_change, write_report
from rescheduler.routing import Headroom, create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    MigrationConfig,
    PrefillConfig,
    SimulationConfig,
    SLOConfig,
    read_config,
)
from rescheduler.simulator.results.metrics import run_metrics
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.run_setup import RunSetup, run_setup
from rescheduler.simulator.simulation import run

RECORDING = "recordings/smollm2-135m-instruct.parquet"
RESERVES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
LOADS = (1.0, 1.2, 0.8)
TTFT_TIMES, TPOT_TIMES = 20.0, 4.0
SHOWN = (
    *("latency", "latency_p99", "ttft", "tpot", "tpot_p99"),
    *("goodput", "throughput", "kv", "preemptions"),
)
NONE, EXACT, BY_AGE = {"name": "none"}, {"name": "oracle"}, {"name": "kaplan_meier"}
RECORDED = {"name": "replay", "recording": RECORDING}


class Case(NamedTuple):
    name: str
    config: SimulationConfig
    forecasts: tuple[dict[str, Any], ...]


def main() -> None:
    parser = arguments("room by probability against shares of the KV cache kept free")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="more traces, *.csv.gz")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each arm (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("runs/room"), metavar="FOLDER")
    options = parser.parse_args()
    found = cases(options.traces, 10 if options.quick else 1)
    seeds = 2 if options.quick else options.seeds
    kept = Cells(options.out)
    cells = [(case, load) for load in LOADS for case in found]
    with suppress(KeyboardInterrupt), Progress() as progress:
        for case, load in progress.track(cells, description="simulating"):
            name = name_of(case, load, seeds)
            if kept.read(name) is None:
                kept.write(name, simulated(case, load, seeds))
    figures: dict[str, float] = {}
    tables = []
    for case, load in sorted(cells, key=lambda cell: (found.index(cell[0]), cell[1])):
        runs = kept.read(name_of(case, load, seeds))
        if runs is not None:
            gains = over_best_reserve(runs)
            tables.append(table(f"{case.name}, {load:.0%} load", runs, gains))
            for forecast, gain in gains.items():
                figures[f"gain_{case.name}_{load}_{forecast}"] = gain.mean
    print("\n\n".join(tables))
    write_report("room", figures, options.json, tables=tables)


def name_of(case: Case, load: float, seeds: int) -> str:
    """Return what a trace's runs at a load are kept as, otherwise for other settings."""
    settings = repr((case, arms(case), TTFT_TIMES, TPOT_TIMES, seeds))
    return f"{case.name}-{load}-{sha256(settings.encode()).hexdigest()[:8]}"


def cases(folder: Path | None, few: int) -> list[Case]:
    replay = {"name": "replay", "recording": RECORDING, "requests": 3000 // few}
    five_tasks = {"name": "five_tasks", "requests": 3000 // few}
    all_cases = [
        Case("smollm2", filled(replay, 10_240), (EXACT, RECORDED, BY_AGE)),
        Case("five_tasks", filled(five_tasks, 10_240), (EXACT, BY_AGE)),
    ]
    for path in sorted(folder.glob("*.csv.gz")) if folder else ():
        trace = {"path": str(path), "requests": 1500 // few, "skip_empty": True}
        config = filled(trace, tokens(path))
        all_cases.append(Case(path.name.split(".")[0], config, (EXACT, BY_AGE)))
    for name, requests in (("mixed_workloads", 3000), ("star_trace", 800)):
        config = of_paper(name, requests // few)
        all_cases.append(Case(name, config, (EXACT, BY_AGE)))
    return all_cases


def tokens(path: Path) -> int:
    """Return a KV cache that holds some 32 requests of a trace, and the longest one."""
    table = np.genfromtxt(path, delimiter=",", names=True)
    inputs, outputs = table["input_tokens"], table["output_tokens"]
    mean = (outputs * (inputs + outputs / 2)).sum() / outputs.sum()
    return int(max(32 * mean, (inputs + outputs).max() + 200))


def filled(trace: dict[str, Any], kv_capacity: int) -> SimulationConfig:
    return SimulationConfig(
        cluster=ClusterConfig(4, slots=128, kv_capacity=kv_capacity, prefix_caching=True),
        clock="independent",
        prefill=PrefillConfig("chunked", max_batched_tokens=4096),
        step_time={"name": "batch", "a": 0.02, "b": 3.2e-4, "c": 0.0},
        trace=trace,
    )


def of_paper(name: str, requests: int) -> SimulationConfig:
    """Return a paper's setting, from `configs/papers`, with a pool and nothing that moves."""
    values = yaml.safe_load(Path(f"configs/papers/{name}.yaml").read_text(encoding="utf-8"))
    for varied in ("vary", "cases", "seeds"):
        values.pop(varied, None)
    values["trace"]["requests"] = requests
    values["cluster"]["prefix_caching"] = True  # as vLLM does by default
    return replace(read_config(values), migration=MigrationConfig(), max_seconds=None)


def at_rate(
    case: Case, rate: float, forecast: dict[str, Any], dispatch: Literal["pool", "instant"] = "pool"
) -> RunSetup:
    arrivals = ArrivalsConfig("poisson", rate=rate)
    return run_setup(replace(case.config, arrivals=arrivals, forecast=forecast, dispatch=dispatch))


def capacity(case: Case) -> float:
    """Return the requests per second that a tenth kept free serves of far too many.

    Counted from the first fifth of them to the last third, so that neither filling nor draining
    the instances counts.
    """
    result = run(at_rate(case, 1000.0, NONE), create_policy("max_capacity", reserve=0.1), 0)
    first, last = np.nanquantile(result.requests.end, [0.2, 2 / 3])
    return float((2 / 3 - 0.2) * len(result.requests.end) / (last - first))


def objectives(case: Case, served: float) -> SLOConfig:
    """Return multiples of what requests take at a hundredth of the capacity."""
    result = run(at_rate(case, served / 100, NONE), create_policy("jsq_load"), 0)
    alone = run_metrics(result)
    return SLOConfig(ttft_s=TTFT_TIMES * alone["ttft"], tpot_s=TPOT_TIMES * alone["tpot"])


Runs = dict[str, list[dict[str, float]]]
"""Policy → the figures of each seed."""


def headroom(case: Case) -> dict[str, Any]:
    step = case.config.step_time
    return {"name": "headroom", "prefill_cost": step["b"] / step["a"]}


def reserved(share: float) -> dict[str, Any]:
    """Return the policy that keeps a share free, and lets requests pass as `headroom` does."""
    return {"name": "max_capacity", "reserve": share, "starvation": Headroom.starvation}


class Arm(NamedTuple):
    options: dict[str, Any]
    forecast: dict[str, Any] = NONE
    dispatch: Literal["pool", "instant"] = "pool"


def arms(case: Case) -> dict[str, Arm]:
    return {
        "vllm, instant": Arm({"name": "vllm"}, dispatch="instant"),
        "jsq_load, instant": Arm({"name": "jsq_load"}, dispatch="instant"),
        "jsq_load": Arm({"name": "jsq_load"}),
        "bfio, H = 0": Arm({"name": "bfio", "horizon": 0}),
        **{f"reserve {share:.0%}": Arm(reserved(share)) for share in RESERVES},
        **{f"headroom, {f['name']}": Arm(headroom(case), f) for f in case.forecasts},
    }


def simulated(case: Case, load: float, seeds: int) -> Runs:
    served = capacity(case)
    slo = objectives(case, served)
    runs: Runs = defaultdict(list)
    for seed in range(seeds):
        for label, arm in arms(case).items():
            setup = at_rate(case, load * served, arm.forecast, arm.dispatch)
            result = run(setup, create_policy(**arm.options), seed)
            arriving = result.series.time <= result.requests.arrival.max()
            kv = result.series.load[arriving].mean() / case.config.cluster.capacity_tokens
            runs[label].append(run_metrics(result, slo) | {"kv": float(kv)})
    return runs


def over_best_reserve(runs: Runs) -> dict[str, Estimate]:
    """Return the gain in latency in percent, by forecast."""
    latency = {label: [one["latency"] for one in seeds] for label, seeds in runs.items()}
    reserves = [values for label, values in latency.items() if label.startswith("reserve")]
    best = min(reserves, key=lambda values: float(np.mean(values)))
    gains = {}
    for label, values in latency.items():
        if label.startswith("headroom, "):
            less = percent_change(dict(enumerate(values)), dict(enumerate(best)))
            gains[label.removeprefix("headroom, ")] = less._replace(mean=-less.mean)
    return gains


def table(title: str, runs: Runs, gains: dict[str, Estimate]) -> str:
    rows = []
    for label, seeds in runs.items():
        means = [f"{np.mean([figures[name] for figures in seeds]):.4g}" for name in SHOWN]
        gain = gains.get(label.removeprefix("headroom, "))
        rows.append([label, *means, f"{gain.mean:+.1f} ± {gain.half:.1f}%" if gain else ""])
    heads = ["policy", *SHOWN, "gain over the best reserve"]
    return "\n".join([f"### {title}", *markdown_table(heads, rows)])


if __name__ == "__main__":
    main()
