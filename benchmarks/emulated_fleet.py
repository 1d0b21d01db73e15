"""What forecasts are worth on a fleet of GPUs, with emulated engines: vLLM without its model.

    python -m benchmarks.emulated_fleet [--quick] [--rounds N] [--loads X ...] [--arms NAME ...]
        [--requests N] [--dilation D] [--report] [--out FOLDER] [--json OUT] [--figure OUT]

Four replicas of an emulated H100 that serves an 8B model, whose KV caches hold 60,000 tokens each,
so that memory is what is short. Prompts have 1,000 to 8,000 tokens; answers have a heavy tail, and
nothing that routes or schedules is told their length. In a round every arm gets the same requests
at the same times. A load is a share of the capacity, which is measured first.

Forecasts, of engines and of prompts, are as good as those recorded of SmolLM2 (their rank
correlation with the length at the first token is 0.46), unless an arm ends in ``_exact``.

Prints, relative to ``jsq_load``, latencies in percent with half a 95% interval over rounds; a gap
is the longest pause of a stream, goodput counts answers that began within 2 s. A run whose steps
took over 0.01% longer than asked is repeated. What is finished is kept in the folder and not run
again while its settings stay the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.support.experiment import (
    Arms,
    Experiment,
    PromptLengths,
    Run,
    drawn_load,
    emulated_replicas,
    of_results,
    served,
    steady_capacity,
)
from benchmarks.support.report import change, gain, relative_cells
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import Deployment
from rescheduler.ordering.expected_rest import Victim
from rescheduler.simulator.results.report import markdown_table

PROFILE, REPLICAS, SLOTS, KV_TOKENS = "h100-llama-8b", 4, 128, 60_000
LAW = AnswerLengths(median=300, sigma=1.0, longest=8_000)
PROMPTS = PromptLengths(1_000, 8_000)
BASE = "jsq_load"
USES = {
    "order_latency_gain": ("latency", "boost"),
    "headroom_latency_gain": ("latency", "headroom"),
    "moves_tpot_p99_gain": ("tpot_p99", "survival"),
}
"""What each use of forecasts is summed up by, at the first load: a figure of an arm."""
FIGURES = (
    *("latency", "latency_p50", "latency_p99", "ttft", "ttft_p99", "tpot", "tpot_p99", "gap_p99"),
    "goodput",
)


class Arm(NamedTuple):
    """How requests are ordered, placed and moved, and what the engines are.

    They know lengths exactly or not, keep a share of their KV cache free before they begin a
    request (vLLM's ``--watermark``), and suspend a victim where the cache is full.
    """

    routing: dict[str, Any]
    order: str = "fcfs"
    migration: dict[str, Any] | None = None
    exact: bool = False
    watermark: float = 0.0
    victim: Victim = "newest"


SURVIVAL = {"name": "survival", "interval_seconds": 1.0, "tolerance": 1.0, "crowded": 1.0}
STAR = {"name": "star", "interval_seconds": 1.0, "tolerance": 1.0, "crowded": 100.0}
JSQ, BOOST = {"name": "jsq_load"}, "boost"
HEADROOM = {"name": "headroom", "starvation": 4_000}
FITS = {"name": "max_capacity"}
"""As `JSQ`, requests wait in the proxy until they fit; here none passes one that does not."""
ARMS = {
    "jsq_load": Arm(JSQ),
    "jsq_load_age": Arm(JSQ, victim="age"),
    "vllm": Arm({"name": "vllm"}),
    "watermark": Arm(JSQ, watermark=0.05),
    "max_capacity": Arm(FITS),
    "reserve": Arm(FITS | {"reserve": 0.1}),
    "headroom": Arm(HEADROOM),
    "headroom_age": Arm(HEADROOM, victim="age"),
    "headroom_1000": Arm(HEADROOM | {"starvation": 1_000}),
    "boost": Arm(JSQ, BOOST),
    "survival": Arm(JSQ, migration=SURVIVAL),
    "survival_age": Arm(JSQ, migration=SURVIVAL, victim="age"),
    "star": Arm(JSQ, migration=STAR),
    "together": Arm(HEADROOM, BOOST, SURVIVAL),
    "together_age": Arm(HEADROOM, BOOST, SURVIVAL, victim="age"),
    "headroom_exact": Arm(HEADROOM, exact=True),
    "boost_exact": Arm(JSQ, BOOST, exact=True),
    "survival_exact": Arm(JSQ, migration=SURVIVAL, exact=True),
    "together_exact": Arm(HEADROOM, BOOST, SURVIVAL, exact=True),
}


VICTIMS = {arm: arm.removesuffix("_age") for arm in ARMS if arm.endswith("_age")}
"""Arms that suspend by age, and those that are alike but for that."""


class EmulatedFleet(Experiment):
    """Four emulated replicas whose memory is what is short."""

    name = "emulated_fleet"
    arms = ARMS
    base = BASE
    figures = FIGURES
    counts = ("preemptions", "moves", "changed")

    def emulate(self, exact: bool) -> EmulateOptions:
        dilation = self.options.dilation
        return self.emulated(LAW, exact, profile=PROFILE, kv_tokens=KV_TOKENS, dilation=dilation)

    def settings(self, run: Run | None) -> dict[str, Any]:
        exact = run is not None and ARMS[run.arm].exact
        shared = {"emulate": of_results(self.emulate(exact), "barrier"), "prompts": PROMPTS}
        if run is None:
            return shared
        return shared | {
            "replicas": REPLICAS,
            "arm": ARMS[run.arm]._asdict(),
            "requests": self.options.requests,
            "rate": round(run.load * (self.capacity or 0.0), 4),
        }

    def engines_of(self, arm: str) -> tuple[bool, float, Victim]:
        return ARMS[arm].exact, ARMS[arm].watermark, ARMS[arm].victim

    def deployment(self, key: tuple[bool, float, Victim]) -> Deployment:
        exact, watermark, victim = key
        engines = emulated_replicas(
            self.emulate(exact), REPLICAS, SLOTS, "--watermark", f"{watermark}"
        )
        return replace(engines, engine=replace(engines.engine, victim=victim))

    async def measure(self, deployment: Deployment) -> float:
        serving = replace(deployment, routing=JSQ)
        rate, _ = await steady_capacity(serving, self.options.requests, PROMPTS, self.scratch)
        return rate

    async def serve(self, deployment: Deployment, run: Run, salt: int) -> dict[str, float]:
        arm = ARMS[run.arm]
        serving = replace(
            deployment, routing=arm.routing, order={"name": arm.order}, migration=arm.migration
        )
        rate = run.load * self.capacity
        load = drawn_load(run.round, self.options.requests, rate, PROMPTS, LAW)
        return await served(serving, load, salt, self.scratch)

    def tables(self, found: Mapping[float, Arms]) -> list[str]:
        """Return a table of each load, and one of what suspending by age changes."""
        return [
            *super().tables(found),
            *(_table_of_victims(load, runs) for load, runs in found.items() if _by_age(runs)),
        ]

    def summary(self, found: Mapping[float, Arms]) -> dict[str, float]:
        figures = super().summary(found)
        for load, runs in found.items():
            for arm in _by_age(runs):
                for name in FIGURES:
                    found_gain = gain(runs[arm], runs[VICTIMS[arm]], name, name == "goodput")
                    figures |= found_gain.figures(f"{100 * load:.0f}_{name}_gain_{arm}_by_victim")
        prefix = f"{100 * self.options.loads[0]:.0f}_"
        named = {name: f"{figure}_gain_{arm}" for name, (figure, arm) in USES.items()}
        named |= {f"{name}_half_interval": f"{of}_half_interval" for name, of in named.items()}
        named["excess_step_time"] = "excess_step_time"
        return figures | {k: figures.get(prefix + of, float("nan")) for k, of in named.items()}


def _by_age(runs: Arms) -> list[str]:
    """Return the arms that suspend by age, where there are runs with and without."""
    return [arm for arm, without in VICTIMS.items() if runs.get(arm) and runs.get(without)]


def _table_of_victims(load: float, runs: Arms) -> str:
    rows = []
    for arm in _by_age(runs):
        alike = {arm: runs[arm], VICTIMS[arm]: runs[VICTIMS[arm]]}
        rows.append([VICTIMS[arm], *relative_cells(alike, arm, VICTIMS[arm], FIGURES)])
    heads = ["arm", *FIGURES]
    title = f"### {100 * load:.0f}% of the capacity: by age, relative to the same without"
    return "\n".join([title, *markdown_table(heads, rows)])


def main() -> None:
    parser = EmulatedFleet.parser("what forecasts are worth on an emulated fleet", rounds=6)
    parser.add_argument("--loads", nargs="+", type=float, default=[1.05, 0.9])
    parser.add_argument("--requests", type=int, default=1_500, help="of a run (1500)")
    parser.add_argument("--dilation", type=float, default=2.0, help="of all times (2)")
    parser.add_argument("--figure", type=Path, metavar="OUT", help="draw the changes here")
    options = parser.parse_args()
    found = EmulatedFleet(options).main({"requests": 200, "loads": [1.05]})
    if options.figure is not None:
        draw(found, options.figure)


def draw(found: Mapping[float, Arms], path: Path) -> None:
    """Draw by how much each arm changes latencies, a panel for each load and latency.

    Arms of one round, which have no interval, are hollow.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = {"latency": "mean latency", "ttft": "time to first token", "gap_p99": "P99 of pauses"}
    rows = max(map(len, found.values()))
    size = (3 * len(shown), (0.8 + 0.2 * rows) * len(found))
    figure, axes = plt.subplots(
        len(found), len(shown), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for row, (load, runs) in zip(axes, found.items(), strict=True):
        changed = [arm for arm in runs if arm != BASE and runs[arm]]
        for axis, (name, title) in zip(row, shown.items(), strict=True):
            estimates = {arm: change(runs[arm], runs[BASE], name) for arm in changed}
            places = range(len(estimates))
            means = [one.mean for one in estimates.values()]
            halves = [0.0 if np.isnan(one.half) else one.half for one in estimates.values()]
            axis.errorbar(means, places, xerr=halves, fmt="none", capsize=3)
            faces = ["white" if len(runs[arm]) == 1 else "C0" for arm in estimates]
            axis.scatter(means, places, c=faces, edgecolors="C0", zorder=3)
            axis.axvline(0.0, color="grey", linewidth=0.8)
            axis.set_yticks(places, list(estimates))
            axis.set_title(f"{title}, {100 * load:.0f}%", fontsize=9)
            axis.set_xlabel("against jsq_load, %")
        row[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
