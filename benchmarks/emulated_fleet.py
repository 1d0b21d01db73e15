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

import asyncio
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.deployments import engines, patient, proxy, until_idle
from benchmarks.support.emulated_load import PromptLengths, drawn_load, steady_rate
from benchmarks.support.emulated_runs import EXACT, PATIENCE, RECORDED, keep_valid, valid
from benchmarks.support.report import (
    Cells,
    arguments,
    change,
    relative_cells,
    resumable,
    rotated,
    write_report,
)
from rescheduler.demo.demo_load import metric_total, preemptions
from rescheduler.demo.scripted_load import (
    EmulatedAnswer,
    answer_figures,
    changed_answers,
    serve_load,
    step_sums,
)
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.results.report import markdown_table

PROFILE, REPLICAS, KV_TOKENS, BLOCK = "h100-llama-8b", 4, 60_000, 32
LAW = AnswerLengths(median=300, sigma=1.0, longest=8_000)
PROMPTS = PromptLengths(1_000, 8_000)
BASE = "jsq_load"
SCRATCH = Path("runs/emulated_fleet")
"""Logs, and what the engines' steps were."""
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

    They know lengths exactly or not, and keep a share of their KV cache free before they begin a
    request (vLLM's ``--watermark``).
    """

    routing: dict[str, Any]
    order: str = "fcfs"
    migration: dict[str, Any] | None = None
    exact: bool = False
    watermark: float = 0.0

    @property
    def engines(self) -> tuple[bool, float]:
        """Return what engines are started for."""
        return self.exact, self.watermark


SURVIVAL = {"name": "survival", "interval_seconds": 1.0}
STAR = {"name": "star", "interval_seconds": 1.0}
JSQ, BOOST = {"name": "jsq_load"}, "boost"
HEADROOM = {"name": "headroom", "starvation": 4_000}
FITS = {"name": "max_capacity"}
"""As `JSQ`, requests wait in the proxy until they fit; here none passes one that does not."""
ARMS = {
    "jsq_load": Arm(JSQ),
    "vllm": Arm({"name": "vllm"}),
    "watermark": Arm(JSQ, watermark=0.05),
    "max_capacity": Arm(FITS),
    "reserve": Arm(FITS | {"reserve": 0.1}),
    "headroom": Arm(HEADROOM),
    "headroom_1000": Arm(HEADROOM | {"starvation": 1_000}),
    "boost": Arm(JSQ, BOOST),
    "survival": Arm(JSQ, migration=SURVIVAL),
    "star": Arm(JSQ, migration=STAR),
    "together": Arm(HEADROOM, BOOST, SURVIVAL),
    "headroom_exact": Arm(HEADROOM, exact=True),
    "boost_exact": Arm(JSQ, BOOST, exact=True),
    "survival_exact": Arm(JSQ, migration=SURVIVAL, exact=True),
    "together_exact": Arm(HEADROOM, BOOST, SURVIVAL, exact=True),
}


class Run(NamedTuple):
    load: float
    round: int
    arm: str


class Plan(NamedTuple):
    """What is the same for all runs; capacity is in requests a second of the emulated engines."""

    out: Path
    requests: int
    dilation: float
    capacity: float = 0.0

    def emulate(self, exact: bool) -> EmulateOptions:
        quality = EXACT if exact else RECORDED
        return EmulateOptions(
            profile=PROFILE,
            kv_tokens=KV_TOKENS,
            dilation=self.dilation,
            lengths=LAW,
            forecast=quality,
            prompt_forecast=quality,
            logs=str((SCRATCH / "steps").absolute()),
        )

    def settings(self, run: Run) -> dict[str, Any]:
        """Return what a result depends on, beside the code."""
        return {
            "emulate": emulated(self.emulate(ARMS[run.arm].exact)),
            "replicas": REPLICAS,
            "arm": ARMS[run.arm]._asdict(),
            "prompts": PROMPTS,
            "requests": self.requests,
            "rate": round(run.load * self.capacity, 4),
        }

    def cells(self, run: Run) -> Cells:
        return Cells(self.out / f"{100 * run.load:.0f}" / f"round-{run.round}", self.settings(run))


def main() -> None:
    parser = arguments("what forecasts are worth on an emulated fleet")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--loads", nargs="+", type=float, default=[1.05, 0.9])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--requests", type=int, default=1_500, help="of a run (1500)")
    parser.add_argument("--dilation", type=float, default=2.0, help="of all times (2)")
    parser.add_argument("--report", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--figure", type=Path, metavar="OUT", help="draw the changes here")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/emulated_fleet"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.loads = 1, 200, [1.05]
        options.out = Path("runs/emulated_fleet_quick")
    for folder in (options.out, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(options.out, options.requests, options.dilation)
    needed = {*options.arms, BASE}
    arms = [name for name in ARMS if name in needed]
    rounds = 0 if options.report else options.rounds
    with resumable():
        plan = run_missing(plan, options.loads, rounds, arms)
    figures, tables = {"capacity": plan.capacity}, []
    found = {load: valid_runs(plan, load, options.rounds, arms) for load in options.loads}
    for load, runs in found.items():
        tables.append(table(load, runs))
        figures |= figures_of(load, runs)
    prefix = f"{100 * options.loads[0]:.0f}_"
    named = {name: f"{figure}_gain_{arm}" for name, (figure, arm) in USES.items()}
    named |= {f"{name}_half_interval": f"{of}_half_interval" for name, of in named.items()}
    named["excess_step_time"] = "excess_step_time"
    figures |= {name: figures.get(prefix + of, float("nan")) for name, of in named.items()}
    if options.figure is not None:
        draw(found, options.figure)
    print("\n\n".join(tables))
    write_report("emulated_fleet", figures, options.json, tables=tables)


def run_missing(plan: Plan, loads: Sequence[float], rounds: int, arms: Sequence[str]) -> Plan:
    """Run what the folder does not have with these settings; each result is kept at once."""
    settings = {"emulate": emulated(plan.emulate(False)), "prompts": PROMPTS}
    kept = Cells(plan.out, settings)
    if kept.read("capacity") is not None:
        plan = plan._replace(capacity=float(kept.read("capacity")))
    for number in range(rounds):
        for exact, watermark in sorted({ARMS[name].engines for name in arms}):
            alike = [name for name in arms if ARMS[name].engines == (exact, watermark)]
            runs = [Run(load, number, arm) for load in loads for arm in rotated(alike, number)]
            if plan.capacity and all(valid(plan.cells(run), run.arm) is not None for run in runs):
                continue
            deployment = fleet(plan, exact, watermark)
            with engines(deployment, SCRATCH / "logs"):
                if not plan.capacity:
                    plan = plan._replace(capacity=asyncio.run(measured_capacity(plan, deployment)))
                    kept.write("capacity", plan.capacity)
                for run in runs:
                    if valid(plan.cells(run), run.arm) is None:
                        run_one(plan, deployment, run)
    return plan


def emulated(options: EmulateOptions) -> dict[str, Any]:
    """Return what of the options changes results."""
    return {k: v for k, v in to_builtins(options).items() if k not in ("logs", "barrier")}


def fleet(plan: Plan, exact: bool, watermark: float = 0.0) -> Deployment:
    engine = EngineOptions(
        max_num_seqs=128,
        block_size=BLOCK,
        max_model_len=16_384,
        emulate=plan.emulate(exact),
        arguments=[
            *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
            *("--watermark", f"{watermark}"),
        ],
    )
    return patient(local_deployment("smollm2", engine, decode=REPLICAS, prefill=0))


async def measured_capacity(plan: Plan, deployment: Deployment) -> float:
    """Return the requests a second of a load at once, in its steady part."""
    load = drawn_load(1_000_003, max(200, plan.requests // 2), inf, PROMPTS, LAW)
    serving = replace(deployment, routing=JSQ)
    with proxy(serving, SCRATCH):
        answers = await serve_load(
            serving.proxy_url, serving.served_name, load, plan.dilation, 1_000_003
        )
    capacity = steady_rate(one.last / plan.dilation for one in answers)
    print(f"capacity: {capacity:.2f} requests a second", file=sys.stderr, flush=True)
    return capacity


def run_one(plan: Plan, deployment: Deployment, run: Run) -> None:
    def serve(number: int) -> dict[str, float]:
        return asyncio.run(served(plan, deployment, run, number))

    keep_valid(plan.cells(run), run.arm, f"{run}", serve)


async def served(plan: Plan, deployment: Deployment, run: Run, number: int) -> dict[str, float]:
    arm = ARMS[run.arm]
    serving = replace(
        deployment, routing=arm.routing, order={"name": arm.order}, migration=arm.migration
    )
    load = drawn_load(run.round, plan.requests, run.load * plan.capacity, PROMPTS, LAW)
    await until_idle(deployment, PATIENCE)
    before = await asyncio.to_thread(preemptions, deployment)
    began, since = time.monotonic(), time.perf_counter()
    salt = zlib.crc32(f"{run} {number}".encode())
    with proxy(serving, SCRATCH):
        answers: list[EmulatedAnswer] = await serve_load(
            serving.proxy_url, serving.served_name, load, plan.dilation, salt
        )
        metrics = f"{serving.proxy_url}/metrics"
        name = "headway_proxy_migrations_total"
        moves = await asyncio.to_thread(metric_total, metrics, name, outcome="moved")
    await until_idle(deployment, PATIENCE)
    logs = [SCRATCH / "steps" / f"{instance.name}.csv" for instance in deployment.instances]
    sums = step_sums(logs, since)
    return answer_figures(answers, plan.dilation) | {
        "preemptions": await asyncio.to_thread(preemptions, deployment) - before,
        "moves": moves,
        "changed": float(changed_answers(answers, Path(model_to_load(deployment)))),
        "excess": sums.excess,
        "jitter": sums.jitter,
        "steps": float(sums.steps),
        "wall": time.monotonic() - began,
    }


Arms = dict[str, dict[int, dict[str, float]]]
"""Arm → round → figures."""


def valid_runs(plan: Plan, load: float, rounds: int, arms: Sequence[str]) -> Arms:
    found = {
        arm: {number: valid(plan.cells(Run(load, number, arm)), arm) for number in range(rounds)}
        for arm in arms
    }
    return {
        arm: {number: one for number, one in by_round.items() if one is not None}
        for arm, by_round in found.items()
    }


def table(load: float, runs: Arms) -> str:
    rows = []
    for arm, by_round in runs.items():
        if by_round:
            counts = [
                f"{np.mean([one[key] for one in by_round.values()]):.0f}"
                for key in ("preemptions", "moves", "changed")
            ]
            cells = relative_cells(runs, arm, BASE, FIGURES)
            rows.append([arm, f"{len(by_round)}", *cells, *counts])
    heads = ["arm", "rounds", *FIGURES, "preemptions", "moves", "changed"]
    return "\n".join([f"### {100 * load:.0f}% of the capacity", *markdown_table(heads, rows)])


def figures_of(load: float, runs: Arms) -> dict[str, float]:
    prefix, found = f"{100 * load:.0f}_", {}
    for arm, by_round in runs.items():
        found[f"{prefix}rounds_{arm}"] = float(len(by_round))
        if arm == BASE or not by_round:
            continue
        for figure in FIGURES:
            estimate = change(by_round, runs[BASE], figure)
            sign = 1 if figure == "goodput" else -1
            found[f"{prefix}{figure}_gain_{arm}"] = sign * estimate.mean
            found[f"{prefix}{figure}_gain_{arm}_half_interval"] = estimate.half
    every = [one for by_round in runs.values() for one in by_round.values()]
    if every:
        found[f"{prefix}excess_step_time"] = float(np.mean([one["excess"] for one in every]))
        found[f"{prefix}answers_changed"] = float(sum(one["changed"] for one in every))
        found[f"{prefix}requests_failed"] = float(sum(one["failed"] for one in every))
    return found


def draw(found: Mapping[float, Arms], path: Path) -> None:
    """Draw by how much each arm changes latencies, a panel for each load and latency.

    Arms of one round, which have no interval, are hollow.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = {"latency": "mean latency", "ttft": "time to first token", "gap_p99": "P99 of pauses"}
    size = (3 * len(shown), 2.4 * len(found))
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
