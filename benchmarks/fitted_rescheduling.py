"""Does the simulator rank planners as real engines do?

    python -m benchmarks.fitted_rescheduling [--live FOLDER] [--arms NAME ...] [--check]
        [--json OUT]

Takes what `benchmarks.live_rescheduling` has kept, and simulates every load, round and arm of it:
the same requests at the same times with the lengths that the engines generated, the forecasts that
they published, prefills as long as a lone request's, and steps and pauses as long as they took
there. Then the differences between arms, paired by round, are held against the live ones. Where a
live difference is certain, its interval excluding 0, the simulated one should have its sign;
``--check`` ends with status 1 where it has not.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.live_rescheduling import ARMS
from benchmarks.support.live_fit import StepFit, fitted_steps, step_samples
from benchmarks.support.live_machine import Machine, read_machine
from benchmarks.support.paired_rounds import Estimate, paired_difference
from benchmarks.support.report import arguments, write_report
from benchmarks.support.rescheduling_figures import PAIRS, TPOT_TIMES, TTFT_TIMES
from rescheduler.migration import create_migration_policy
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    MigrationConfig,
    PoolConfig,
    SimulationConfig,
    TransferConfig,
)
from rescheduler.simulator.engine.step_metrics import power_model
from rescheduler.simulator.forecasts.forecast_sources import Replay
from rescheduler.simulator.results.run_result import RunResult
from rescheduler.simulator.run_setup import RunSetup
from rescheduler.simulator.simulation import run
from rescheduler.simulator.workloads.trace import TraceBlock
from rescheduler.step_time.step_time import batch_step_time

RESERVES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
COMPARED = ("goodput", "ttft_p99", "tpot_p99", "preemptions")
_WAITING = 10_000
_NO_TIME = 1e6  # gigabits per second: what a move takes is its pause


@dataclass(frozen=True)
class LiveRequests:
    """The requests of a live round, as they come from their prefills.

    A request takes whole blocks of the KV cache, half a block more than its tokens on average.

    Attributes:
        requests: of a result.
        prefill_seconds: of each.
        block_size: tokens of a block.
    """

    name: ClassVar[str] = "live"
    has_arrivals: ClassVar[bool] = True

    requests: Sequence[dict[str, Any]]
    prefill_seconds: float
    block_size: int

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield them."""
        prompt = np.array([one["prompt"] for one in self.requests]) + self.block_size // 2
        yield TraceBlock(
            arrival=np.array([one["arrives"] for one in self.requests]) + self.prefill_seconds,
            prompt=prompt.astype(np.int64),
            output=np.array([one["tokens"] for one in self.requests], dtype=np.int64),
            template=np.arange(len(self.requests)),
        )


class LiveRound(NamedTuple):
    """What a folder has of one round under one load: results and settings by arm."""

    load: float
    number: int
    folder: Path
    results: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]


def main() -> None:
    """Simulate what the folder has, and print both beside each other."""
    parser = arguments("does the simulator rank planners as real engines do?", quick=False)
    parser.add_argument("--live", type=Path, default=Path("runs/live_rescheduling"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--check", action="store_true", help="fail where signs differ")
    options = parser.parse_args()
    try:
        machine = read_machine(options.live)
        if machine is None:
            raise ValueError(
                f"{options.live}: no live measurement; run `python -m benchmarks.live_rescheduling`"
            )
        rounds = read_rounds(options.live, options.arms)
        runs = [one for found in rounds for one in found.results.values()]
        fit = fitted_steps(np.concatenate([step_samples(one) for one in runs]))
    except ValueError as error:
        sys.exit(str(error))
    print(f"steps: {fit}\nmoves: a pause of {machine.pause:.3f} s")
    latency = reserve_latencies(rounds, machine, fit)
    best = min(latency, key=latency.__getitem__)
    print(f"reserve: {best:g} has the least simulated latency, of {latency}")
    live, simulated = values_of(rounds, machine, fit)
    figures, wrong = compared(live, simulated)
    figures |= fit._asdict() | {"best_reserve": best}
    write_report("fitted_rescheduling", figures, options.json)
    if wrong:
        print("\nof the other sign than live:\n" + "\n".join(wrong))
    if options.check and wrong:
        sys.exit(1)


def read_rounds(folder: Path, arms: Sequence[str]) -> list[LiveRound]:
    """Return all rounds of a live measurement, those with a recording of forecasts.

    Raises:
        ValueError: there are none, or arms of a round cannot be compared.
    """
    rounds = []
    for path in sorted(folder.glob("load-*/round-*")):
        files = {arm: path / f"{arm}.json" for arm in arms}
        kept = {arm: json.loads(file.read_text()) for arm, file in files.items() if file.is_file()}
        served = [(one["settings"]["requests"], one["settings"]["engine"]) for one in kept.values()]
        if any(one != served[0] for one in served):
            raise ValueError(
                f"{path}: its arms served other requests, or other engines; "
                "`python -m benchmarks.live_rescheduling` runs those again that are out of date"
            )
        if kept and (path / "forecasts.parquet").is_file():
            rounds.append(
                LiveRound(
                    float(path.parent.name.partition("-")[2]) / 100,
                    int(path.name.partition("-")[2]),
                    path,
                    {arm: one["result"] for arm, one in kept.items()},
                    {arm: one["settings"] for arm, one in kept.items()},
                )
            )
    if not rounds:
        raise ValueError(f"{folder}: no finished round")
    return rounds


Values = dict[tuple[float, str, str], dict[int, float]]
"""By load, arm and figure, then by round."""


def values_of(rounds: Sequence[LiveRound], machine: Machine, fit: StepFit) -> tuple[Values, Values]:
    """Return the figures of both, live and simulated."""
    live: Values = defaultdict(dict)
    simulated: Values = defaultdict(dict)
    for found in rounds:
        for arm, result in found.results.items():
            both = (
                (live, live_figures(result, machine)),
                (simulated, simulated_figures(found, arm, machine, fit)),
            )
            for values, figures in both:
                for name, value in figures.items():
                    values[found.load, arm, name][found.number] = value
    return live, simulated


def live_figures(result: dict[str, Any], machine: Machine) -> dict[str, float]:
    """Return a live run's figures."""
    requests = result["requests"]
    late = [one["error"] or one["ttft"] is None for one in requests]
    ttft = np.array([inf if no else one["ttft"] for no, one in zip(late, requests, strict=True)])
    tpot = np.array([one["tpot"] or 0.0 for one in requests])
    return {
        "goodput": _in_time(ttft, tpot, machine) / result["seconds"],
        "ttft_p99": result["ttft_p99"],
        "tpot_p99": result["tpot_p99"],
        "preemptions": result["preemptions"],
        "migrations": result["migrations"],
    }


def simulated_figures(
    found: LiveRound, arm: str, machine: Machine, fit: StepFit
) -> dict[str, float]:
    """Return the figures of an arm as simulated on a round's requests."""
    result = simulate(found, arm, machine, fit)
    requests = result.requests
    # A live client sees its first token once its decode instance has begun.
    ttft = requests.start - requests.arrival + machine.alone_ttft
    tpot = (requests.end - requests.start) / requests.output
    return {
        "goodput": _in_time(ttft, tpot, machine) / result.seconds,
        "ttft_p99": float(np.percentile(ttft, 99)),
        "tpot_p99": float(np.percentile(tpot, 99)),
        "preemptions": result.preemptions,
        "migrations": result.migrations,
    }


def reserve_latencies(
    rounds: Sequence[LiveRound], machine: Machine, fit: StepFit
) -> dict[float, float]:
    """Return the mean latency over the rounds, in seconds, by share of the KV cache kept free."""
    found = {}
    for reserve in RESERVES:
        routing = {"name": "max_capacity", "reserve": reserve}
        latencies = []
        for one in rounds:
            arm = next(iter(one.settings))
            settings = one.settings[arm] | {"routing": routing, "migration": None}
            result = simulate(one._replace(settings={arm: settings}), arm, machine, fit)
            latencies.append((result.requests.end - result.requests.arrival).mean())
        found[reserve] = round(float(np.mean(latencies)), 3)
    return found


def simulate(found: LiveRound, arm: str, machine: Machine, fit: StepFit) -> RunResult:
    """Simulate an arm on a round's requests."""
    settings, first = found.settings[arm], next(iter(found.results.values()))
    engine = settings["engine"]
    step = batch_step_time(fit.a, fit.b, fit.c)
    mean_step = machine.step_seconds
    planner, interval = None, 1
    if settings["migration"] is not None:
        options = dict(settings["migration"])
        interval = max(1, round(options.pop("interval_seconds", 1.0) / mean_step))
        planner = create_migration_policy(**options, step_seconds=mean_step)
    config = SimulationConfig(
        cluster=ClusterConfig(
            instances=2,
            slots=engine["max_num_seqs"],
            kv_capacity=(engine["kv_blocks"] - 1) * engine["block_size"],
        ),
        clock="independent",
        pool=PoolConfig(limit=_WAITING),
        transfer=TransferConfig(
            handshake_s=machine.pause,
            gigabits_per_second=_NO_TIME,
            block_tokens=engine["block_size"],
        ),
        migration=MigrationConfig(interval=interval),
        arrivals=ArrivalsConfig(kind="trace"),
    )
    setup = RunSetup(
        config=config,
        trace=LiveRequests(first["requests"], machine.alone_ttft, engine["block_size"]),
        forecast=Replay(recording=found.folder / "forecasts.parquet"),
        step_time=step,
        power=power_model(config.power),
    )
    return run(setup, create_policy(**settings["routing"]), 0, arm, planner)


def _in_time(ttft: np.ndarray, tpot: np.ndarray, machine: Machine) -> int:
    longest = TTFT_TIMES * machine.alone_ttft, TPOT_TIMES * machine.alone_tpot
    return int(((ttft <= longest[0]) & (tpot <= longest[1])).sum())


def compared(live: Values, simulated: Values) -> tuple[dict[str, float], list[str]]:
    """Print both, and return all figures, and what is of the other sign."""
    figures: dict[str, float] = {}
    wrong = []
    loads = sorted({load for load, _, _ in live})
    for load in loads:
        arms = list(dict.fromkeys(arm for at, arm, _ in live if at == load))
        print(f"\nload {load:.0%}: live | simulated")
        print(f"| | {' | '.join(COMPARED)} | migrations |\n|---|{'---:|' * (len(COMPARED) + 1)}")
        for arm in arms:
            cells = []
            for name in (*COMPARED, "migrations"):
                pair = [np.mean([*one[load, arm, name].values()]) for one in (live, simulated)]
                cells.append(f"{pair[0]:.3g}, {pair[1]:.3g}")
                for kind, value in zip(("live", "simulated"), pair, strict=True):
                    figures[f"load{100 * load:g}_{arm}_{name}_{kind}"] = float(value)
            print(f"| {arm} | {' | '.join(cells)} |")
        pairs = [(arm, arms[0]) for arm in arms[1:]]
        pairs += [pair for pair in PAIRS if set(pair) <= set(arms) and pair not in pairs]
        for arm, other in pairs:
            for name in COMPARED:
                both = [
                    paired_difference(one[load, arm, name], one[load, other, name])
                    for one in (live, simulated)
                ]
                if both[0].is_certain and not _agree(*both):
                    wrong.append(
                        f"load {load:.0%}, {arm} - {other}, {name}: live {both[0].mean:.3g} ± "
                        f"{both[0].half:.2g}, simulated {both[1].mean:.3g} ± {both[1].half:.2g}"
                    )
    figures["wrong_signs"] = len(wrong)
    return figures, wrong


def _agree(live: Estimate, simulated: Estimate) -> bool:
    """Return whether a certain live difference is simulated with its sign."""
    return live.mean * simulated.mean > 0


if __name__ == "__main__":
    main()
