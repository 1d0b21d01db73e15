"""What fairness between clients costs the others, and what it is worth to whom a flood keeps out.

    python -m benchmarks.fairness_cost [--quick] [--seeds N] [--traces DIR] [--out DIR] --json OUT

The settings of `benchmarks.worth order`, whose traces do not say who sent a request: each is given
to a client at random, whatever its lengths. *zipf*: 20 clients, the k-th of which sends a share in
proportion to 1/k. *flood*: the same 20 send half of the requests, and one more client the other
half. The pool takes all that wait, for what it keeps out is not shared. Forecasts are noisy
(σ = 0.8), and recorded for SmolLM2's requests behind prefill instances.

Prints how much a fairness of 0.02 (49 requests ahead), 0.25 (3), 0.5 (1) and 1 changes each order,
paired by seed, with half a 95% interval: the mean latency of all and its P99, the mean latency of
the light clients (in *zipf* those with less than an even share, in the flood the 20), and that of
the heaviest client. Summaries are medians over the settings, with the least and the greatest
change; ``total_…`` in the file is such a median. The runs of a trace and load are kept in the
folder as they finish, and not run again while their settings stay the same.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from benchmarks.support.report import (
    Cells,
    Rounds,
    arguments,
    change,
    relative_cells,
    write_report,
)
from benchmarks.worth import Case, capacity, cases
from rescheduler.ordering import create_order
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import PoolConfig
from rescheduler.simulator.results.metrics import RequestRecords
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.simulation import run, run_setup
from rescheduler.simulator.workloads.trace import Trace, TraceBlock

LOADS = (1.2, 1.0)
ORDERS = ("fcfs", "boost")
FAIRNESS = (0.0, 0.02, 0.25, 0.5, 1.0)
POOL = PoolConfig(1024)
NOISY = {"name": "noisy", "sigma": 0.8}
TENTH_FREE: dict[str, Any] = {"name": "max_capacity", "reserve": 0.1}
FIGURES = ("latency", "latency_p99", "light", "heaviest")

Runs = dict[str, list[dict[str, float]]]
"""Arm → the figures of each seed."""


class Clients(NamedTuple):
    """Who sends requests: the heaviest client is the first.

    Attributes:
        name: in tables and figures.
        shares: of the requests, by client.
        light: number of the first light client; so are all after it.
    """

    name: str
    shares: tuple[float, ...]
    light: int


def zipf(n: int) -> tuple[float, ...]:
    weights = 1 / np.arange(1, n + 1)
    return tuple((weights / weights.sum()).tolist())


CLIENTS = (
    Clients("zipf", zipf(20), light=5),  # those with less than an even share
    Clients("flood", (0.5, *(share / 2 for share in zipf(20))), light=1),
)


@dataclass(frozen=True)
class SentByClients:
    """A trace whose requests are given to clients at random; all else of it stays as it is."""

    trace: Trace
    shares: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.trace.name

    @property
    def has_arrivals(self) -> bool:
        return self.trace.has_arrivals

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        (draws,) = generator.spawn(1)
        for block in self.trace.blocks(generator):
            client = draws.choice(len(self.shares), len(block.prompt), p=self.shares)
            yield block._replace(client=client)


def main() -> None:
    parser = arguments("what fairness between clients costs, and whom it helps")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="more traces, *.csv.gz")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/fairness_cost"), metavar="FOLDER")
    options = parser.parse_args()
    seeds = 2 if options.quick else options.seeds
    kept = Cells(options.out)
    found = cases(options.traces, 10 if options.quick else 1, staged=True)
    cells = list(product(LOADS, CLIENTS, found))
    with suppress(KeyboardInterrupt), Progress() as progress:
        for load, clients, case in progress.track(cells, description="simulating"):
            name = name_of(case, load, clients, seeds)
            if kept.read(name) is None:
                kept.write(name, simulated(case, load, clients, seeds))
    figures: dict[str, float] = {}
    tables, summaries = [], []
    for load, clients in product(LOADS, CLIENTS):
        changes: dict[str, list[float]] = defaultdict(list)
        for case in found:
            runs = kept.read(name_of(case, load, clients, seeds))
            if runs is None:
                continue
            arms = {label: dict(enumerate(by_seed)) for label, by_seed in runs.items()}
            tables.append(table(f"{case.name}, {load:.0%} load, {clients.name}", arms))
            for key, value in changes_of(arms).items():
                figures[f"{key}_{case.name}_{100 * load:.0f}_{clients.name}"] = value
                changes[key].append(value)
        if changes:
            title = f"{load:.0%} load, {clients.name}"
            summaries.append(summary(title, changes))
            for key, values in changes.items():
                figures[f"total_{key}_{100 * load:.0f}_{clients.name}"] = float(np.median(values))
    print("\n\n".join([*tables, *summaries]))
    write_report("fairness_cost", figures, options.json, tables=[*tables, *summaries])


def name_of(case: Case, load: float, clients: Clients, seeds: int) -> str:
    """Return what a trace's runs are kept as, otherwise for other settings."""
    text = repr((case, forecast_of(case), TENTH_FREE, clients, ORDERS, FAIRNESS, POOL, seeds))
    return f"{case.name}-{load}-{clients.name}-{sha256(text.encode()).hexdigest()[:8]}"


def forecast_of(case: Case) -> dict[str, Any]:
    """Return the forecasts of all runs of a case: recorded ones where they exist in time."""
    return {"name": "replay", "recording": case.config.trace["recording"]} if case.staged else NOISY


def label_of(order: str, fairness: float) -> str:
    return f"{order}, {fairness:g}"


def simulated(case: Case, load: float, clients: Clients, seeds: int) -> Runs:
    rate, forecast = load * capacity(case), forecast_of(case)
    setup = run_setup(case.at(rate, forecast=forecast, dispatch="pool", pool=POOL))
    setup = replace(setup, trace=SentByClients(setup.trace, clients.shares))
    policy = create_policy(**TENTH_FREE)
    runs: Runs = defaultdict(list)
    for seed, name, fairness in product(range(seeds), ORDERS, FAIRNESS):
        result = run(setup, policy, seed, order=create_order(name, fairness=fairness))
        runs[label_of(name, fairness)].append(figures_of(result.requests, clients))
    return runs


def figures_of(requests: RequestRecords, clients: Clients) -> dict[str, float]:
    latency = requests.end - requests.arrival
    return {
        "latency": float(latency.mean()),
        "latency_p99": float(np.quantile(latency, 0.99)),
        "light": float(latency[requests.client >= clients.light].mean()),
        "heaviest": float(latency[requests.client == 0].mean()),
    }


def changes_of(arms: Mapping[str, Rounds]) -> dict[str, float]:
    """Return what each fairness changes, and what a fair boost gains over the order of arrival."""
    found = {}
    for order, fairness, figure in product(ORDERS, FAIRNESS[1:], FIGURES):
        arm, base = arms[label_of(order, fairness)], arms[label_of(order, 0.0)]
        found[f"{figure}_{order}_{fairness:g}"] = change(arm, base, figure).mean
    for fairness, figure in product(FAIRNESS, FIGURES):
        arm, base = arms[label_of("boost", fairness)], arms[label_of("fcfs", 0.0)]
        found[f"{figure}_boost_{fairness:g}_over_fcfs"] = change(arm, base, figure).mean
    return found


HEADS = ("all: mean", "all: P99", "light clients: mean", "heaviest client: mean")


def table(title: str, arms: Mapping[str, Rounds]) -> str:
    """Return seconds without fairness, and what the fairness of each order changes."""
    rows = [
        [
            label_of(order, fairness),
            *relative_cells(arms, label_of(order, fairness), label_of(order, 0.0), FIGURES),
        ]
        for order, fairness in product(ORDERS, FAIRNESS)
    ]
    lines = markdown_table(["order, fairness", *HEADS], rows)
    return "\n".join([f"### {title}, times in seconds", *lines])


def summary(title: str, changes: Mapping[str, list[float]]) -> str:
    """Return the median of each change over the settings, with the least and the greatest."""
    arms = [(label_of(*arm), f"{arm[0]}_{arm[1]:g}") for arm in product(ORDERS, FAIRNESS[1:])]
    for fairness in FAIRNESS:
        arms.append((f"boost, {fairness:g} over fcfs, 0", f"boost_{fairness:g}_over_fcfs"))
    rows = []
    for label, key in arms:
        cells = [changes[f"{figure}_{key}"] for figure in FIGURES]
        rows.append(
            [label, *(f"{np.median(v):+.0f} ({min(v):+.0f} … {max(v):+.0f})%" for v in cells)]
        )
    n = len(next(iter(changes.values())))
    lines = markdown_table(["order, fairness", *HEADS], rows)
    return "\n".join([f"### {title}, median of {n} settings (least … greatest)", *lines])


if __name__ == "__main__":
    main()
