"""What forecasts are worth, wherever Headway uses them: routing, room, moving.

    python -m benchmarks.forecast_value [--quick] [--traces DIR] --json OUT

One table: for each use and trace, the best policy that needs no forecast, chosen afterwards, and
what the policy with forecasts gains over it with exact, recorded and Kaplan-Meier forecasts, paired
by seed, with half a 95% confidence interval.

- **Routing** behind a barrier, overloaded: `bfio` against `bfio` with present loads, `jsq_load` and
  `jsq`; tokens a second.
- **Room**: `headroom` against six reserves of `max_capacity` and `jsq_load`, in the setting of
  `benchmarks.room`; mean latency.
- **Moving**, with requests placed at once by `jsq_load` in the same setting: `survival` against
  `star` without forecasts and no moves; mean latency, and the 99th percentile of TPOT.

Traces are those of `benchmarks.room`. ``USE_TRACE_FORECAST`` in the file is a gain in percent.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from benchmarks.room import (
    NONE,
    RESERVES,
    Case,
    at_rate,
    capacity,
    cases,
    headroom,
    reserved,
)
from benchmarks.support.report import arguments, write_report
from rescheduler.migration import create_migration_policy
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.results.metrics import half_interval, run_metrics
from rescheduler.simulator.run_setup import RunSetup, run_setup
from rescheduler.simulator.simulation import run

FORECASTS = ("oracle", "replay", "kaplan_meier")

Options = dict[str, Any]
Seeds = npt.NDArray[np.float64]


class Arm(NamedTuple):
    """A policy, a planner or none, and the cluster that they run."""

    label: str
    setup: RunSetup
    policy: Options
    planner: Options | None = None
    slo: SLOConfig | None = None


class Use(NamedTuple):
    """One use of forecasts.

    Attributes:
        name: of it.
        metrics: figures that it is judged by → whether more is better.
        arms: of a case: those without forecasts, and the one with each forecast.
    """

    name: str
    metrics: dict[str, bool]
    arms: Callable[[Case], tuple[list[Arm], dict[str, Arm]]]


def main() -> None:
    """Simulate all, and print the table."""
    parser = arguments("what forecasts are worth, wherever they are used")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="more traces, *.csv.gz")
    parser.add_argument("--uses", nargs="+", choices=sorted(USES), default=sorted(USES))
    options = parser.parse_args()
    found = cases(options.traces, 10 if options.quick else 1)
    seeds = 2 if options.quick else 4
    uses = [USES[name] for name in options.uses]
    figures: dict[str, float] = {}
    lines = [
        "| use | trace | figure | best without forecasts | exact | recorded | Kaplan–Meier |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    with Progress() as progress:
        task = progress.add_task("simulating", total=len(uses) * len(found))
        for use in uses:
            for case in found:
                for line, gains in rows(use, case, seeds):
                    lines.append(line)
                    figures |= gains
                progress.advance(task)
    print("\n".join(lines))
    write_report("forecast_value", figures, options.json, table=lines)


def rows(use: Use, case: Case, seeds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield a line of the table and its gains for each figure of a use."""
    without, by_forecast = use.arms(case)
    blind = {arm.label: figures_of(arm, seeds) for arm in without}
    informed = {name: figures_of(arm, seeds) for name, arm in by_forecast.items()}
    for metric, more_is_better in use.metrics.items():
        best = (max if more_is_better else min)(
            blind, key=lambda label: float(np.mean(blind[label][metric]))
        )
        gains, shown = {}, []
        for name in FORECASTS:
            if name not in informed:
                shown.append("")
                continue
            ratio = informed[name][metric] / blind[best][metric]
            gain = 100 * (ratio - 1 if more_is_better else 1 - ratio)
            shown.append(f"{gain.mean():+.1f} ± {half_interval(gain):.1f}%")
            gains[f"{use.name}_{case.name}_{metric}_{name}"] = float(gain.mean())
        value = f"{best}: {np.mean(blind[best][metric]):.4g}"
        yield f"| {use.name} | {case.name} | {metric} | {value} | {' | '.join(shown)} |", gains


def figures_of(arm: Arm, seeds: int) -> dict[str, Seeds]:
    """Return an arm's figures by seed, each [seeds]."""
    planner = None if arm.planner is None else create_migration_policy(**arm.planner)
    runs = [
        run_metrics(run(arm.setup, create_policy(**arm.policy), seed, planner=planner), arm.slo)
        for seed in range(seeds)
    ]
    return {name: np.array([figures[name] for figures in runs]) for name in runs[0]}


def routing(case: Case) -> tuple[list[Arm], dict[str, Arm]]:
    """Behind a barrier, with a pool that is always full."""

    def setup(forecast: Options) -> RunSetup:
        return run_setup(
            SimulationConfig(
                cluster=ClusterConfig(16, slots=72),
                trace=case.config.trace | {"requests": 4 * case.config.trace["requests"]},
                arrivals=ArrivalsConfig("revelation", target=64),
                forecast=forecast,
                max_steps=3000,
            )
        )

    blind = setup(NONE)
    without: list[Options] = [{"name": "jsq"}, {"name": "jsq_load"}, {"name": "bfio", "horizon": 0}]
    return (
        [Arm(shown(policy), blind, policy) for policy in without],
        {f["name"]: Arm("bfio", setup(f), {"name": "bfio"}) for f in case.forecasts},
    )


def room(case: Case) -> tuple[list[Arm], dict[str, Arm]]:
    """With a pool, at the load that a tenth kept free serves at most."""
    rate = capacity(case)
    blind = at_rate(case, rate, NONE)
    without: list[Options] = [{"name": "jsq_load"}]
    without += [reserved(share) for share in RESERVES]
    return (
        [Arm(shown(policy), blind, policy) for policy in without],
        {
            f["name"]: Arm("headroom", at_rate(case, rate, f), headroom(case))
            for f in case.forecasts
        },
    )


def moving(case: Case) -> tuple[list[Arm], dict[str, Arm]]:
    """Placed as they arrive, at nine tenths of that load."""
    rate = 0.9 * capacity(case)
    blind, policy = at_rate(case, rate, NONE, "instant"), {"name": "jsq_load"}
    return (
        [
            Arm("no moves", blind, policy),
            Arm("star", blind, policy, {"name": "star", "prediction": False}),
        ],
        {
            f["name"]: Arm(
                "survival", at_rate(case, rate, f, "instant"), policy, {"name": "survival"}
            )
            for f in case.forecasts
        },
    )


def shown(policy: Options) -> str:
    """Return a policy and its option in words."""
    return " ".join(str(value) for value in policy.values())


USES = {
    use.name: use
    for use in (
        Use("routing", {"throughput": True}, routing),
        Use("room", {"latency": False}, room),
        Use("moving", {"latency": False, "tpot_p99": False}, moving),
    )
}


if __name__ == "__main__":
    main()
