"""What a batch costs the online traffic beside it, with emulated engines: vLLM without its model.

    python -m benchmarks.batch [--quick] [--rounds N] [--load X] [--arms NAME ...] [--requests N]
        [--dilation D] [--report] [--kill] [--out FOLDER] [--json OUT]

Two replicas of an emulated H100 that serves an 8B model. Online requests come at a share of the
capacity, which is measured first; in a round every arm gets the same ones at the same times:

- ``alone``: nothing else.
- ``flex``: beside a batch that is longer than they are, with ``service_tier: flex``.
- ``eager``: the same, where background requests may use larger shares of an instance.
- ``ranked``: the same, on engines with ``--scheduling-policy priority``.
- ``ordinary``: the same batch as ordinary requests.

Prints latencies of the online requests, relative to ``alone``, in percent with half a 95% interval
over rounds; the tokens a second that the batch got meanwhile; and their share of what the online
requests leave of the capacity. A run whose steps took over 0.7% longer than asked is repeated. What
is finished is kept in the folder and not run again while its settings stay the same.

With ``--kill`` the proxy, an engine, and the batch itself are killed in the middle of a batch of
1,000 requests, and it says how many answers are lost, repeated or changed.
"""

import asyncio
import sys
import time
import zlib
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.batch_runs import (
    answered_tokens,
    batch_process,
    killed_batch,
    write_batch,
)
from benchmarks.support.deployments import engines, patient, proxy, until_idle
from benchmarks.support.emulated_load import PromptLengths, drawn_load, steady_rate
from benchmarks.support.emulated_runs import PATIENCE, RECORDED, keep_valid, valid
from benchmarks.support.report import (
    Cells,
    arguments,
    change,
    mean_of,
    relative_cells,
    resumable,
    rotated,
    write_report,
)
from rescheduler.demo.demo_load import metric_total, preemptions
from rescheduler.demo.scripted_load import answer_figures, changed_answers, serve_load, step_sums
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import BackgroundOptions, Deployment, EngineOptions
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.results.report import markdown_table

PROFILE, REPLICAS, SLOTS, KV_TOKENS, BLOCK = "h100-llama-8b", 2, 32, 60_000, 32
LAW = AnswerLengths(median=150, sigma=0.8, longest=1_000)
PROMPTS = PromptLengths(200, 2_000)
BASE, BATCHED = "alone", 20_000
CONCURRENCY = 96
MOST_EXCESS = 0.007
SCRATCH = Path("runs/batch")
FIGURES = ("ttft_p99", "ttft", "tpot", "tpot_p99", "latency", "latency_p99")


class Arm(NamedTuple):
    """Whether a batch runs beside, as what, with which shares, and on engines that rank."""

    tier: str | None = None
    ranked: bool = False
    shares: BackgroundOptions = BackgroundOptions()


ARMS = {
    BASE: Arm(),
    "flex": Arm("flex"),
    "eager": Arm("flex", shares=BackgroundOptions(slots=0.75, kv=0.75, prefill=1.0)),
    "ranked": Arm("flex", ranked=True),
    "ordinary": Arm("default"),
}


class Run(NamedTuple):
    load: float
    round: int
    arm: str


class Capacity(NamedTuple):
    """Of the fleet: requests and tokens a second of the emulated engines."""

    requests: float = 0.0
    tokens: float = 0.0


class Plan(NamedTuple):
    """What is the same for all runs."""

    out: Path
    requests: int
    dilation: float
    capacity: Capacity = Capacity()

    @property
    def emulate(self) -> EmulateOptions:
        return EmulateOptions(
            profile=PROFILE,
            kv_tokens=KV_TOKENS,
            dilation=self.dilation,
            lengths=LAW,
            forecast=RECORDED,
            prompt_forecast=RECORDED,
            logs=str((SCRATCH / "steps").absolute()),
        )

    def settings(self) -> dict[str, Any]:
        """Return what a result depends on, beside the code."""
        emulate = to_builtins(self.emulate)
        del emulate["logs"]
        return {
            "emulate": emulate,
            "replicas": REPLICAS,
            "slots": SLOTS,
            "prompts": PROMPTS,
            "requests": self.requests,
            "concurrency": CONCURRENCY,
        }

    def cells(self, run: Run) -> Cells:
        arm = {"arm": to_builtins(ARMS[run.arm])}
        rate = {"rate": round(run.load * self.capacity.requests, 4)}
        folder = self.out / f"{100 * run.load:.0f}" / f"round-{run.round}"
        return Cells(folder, self.settings() | arm | rate)


def main() -> None:
    parser = arguments("what a batch costs the online traffic beside it")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--load", type=float, default=0.5, help="of the capacity, online (0.5)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--requests", type=int, default=1_000, help="online, of a run (1000)")
    parser.add_argument("--dilation", type=float, default=8.0, help="of all times (8)")
    parser.add_argument("--report", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--kill", action="store_true", help="only kill in the middle of a batch")
    parser.add_argument("--out", type=Path, default=SCRATCH / "results")
    options = parser.parse_args()
    killed = 1_000
    if options.quick:
        options.rounds, options.requests, killed = 1, 60, 60
        options.out = SCRATCH / "quick"
    for folder in (options.out, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(options.out, options.requests, options.dilation)
    arms = [name for name in ARMS if name in {*options.arms, BASE}]
    with resumable():
        if options.kill:
            run_killed(plan, killed)
        rounds = 0 if options.report or options.kill else options.rounds
        plan = run_missing(plan, options.load, rounds, arms)
    runs = valid_runs(plan, options.load, options.rounds, arms)
    figures = {"load": options.load, **figures_of(plan, runs), **killed_figures(plan)}
    shown = table(plan, options.load, runs)
    print(shown)
    for name, value in figures.items():
        print(f"{name}: {value:.5g}")
    write_report("batch", figures, options.json, tables=[shown])


def run_missing(plan: Plan, load: float, rounds: int, arms: Sequence[str]) -> Plan:
    """Run what the folder does not have with these settings; each result is kept at once."""
    kept = Cells(plan.out, plan.settings())
    if kept.read("capacity") is not None:
        plan = plan._replace(capacity=Capacity(*kept.read("capacity")))
    for number in range(rounds):
        for ranked in (False, True):
            named = [name for name in arms if ARMS[name].ranked == ranked]
            runs = [Run(load, number, arm) for arm in rotated(named, number)]
            known = plan.capacity.tokens > 0
            if not runs or (
                known
                and all(valid(plan.cells(run), run.arm, MOST_EXCESS) is not None for run in runs)
            ):
                continue
            deployment = fleet(plan, ranked)
            with engines(deployment, SCRATCH / "logs"):
                if not plan.capacity.tokens:
                    capacity = asyncio.run(measured_capacity(plan, deployment))
                    kept.write("capacity", capacity)
                    plan = plan._replace(capacity=capacity)
                for run in runs:
                    if valid(plan.cells(run), run.arm, MOST_EXCESS) is None:
                        run_one(plan, deployment, run)
    return plan


def fleet(plan: Plan, ranked: bool) -> Deployment:
    flags = ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    engine = EngineOptions(
        max_num_seqs=SLOTS,
        block_size=BLOCK,
        max_model_len=16_384,
        emulate=plan.emulate,
        arguments=flags + (["--scheduling-policy", "priority"] if ranked else []),
    )
    return patient(local_deployment("smollm2", engine, decode=REPLICAS, prefill=0))


async def measured_capacity(plan: Plan, deployment: Deployment) -> Capacity:
    """Return what a load that comes at once gets, in its steady part."""
    load = drawn_load(1_000_003, max(200, plan.requests // 2), inf, PROMPTS, LAW)
    with proxy(deployment, SCRATCH):
        url, name = deployment.proxy_url, deployment.served_name
        answers = await serve_load(url, name, load, plan.dilation, 1_000_003)
    requests = steady_rate(one.last / plan.dilation for one in answers)
    capacity = Capacity(requests, requests * float(np.mean([one.tokens for one in answers])))
    print(f"capacity: {capacity}", file=sys.stderr, flush=True)
    return capacity


def run_one(plan: Plan, deployment: Deployment, run: Run) -> None:
    def serve(number: int) -> dict[str, float]:
        return asyncio.run(served(plan, deployment, run, number))

    keep_valid(plan.cells(run), run.arm, f"{run}", serve, MOST_EXCESS)


async def served(plan: Plan, deployment: Deployment, run: Run, number: int) -> dict[str, float]:
    arm, salt = ARMS[run.arm], zlib.crc32(f"{run} {number}".encode())
    rate = run.load * plan.capacity.requests
    load = drawn_load(run.round, plan.requests, rate, PROMPTS, LAW)
    await until_idle(deployment, PATIENCE)
    before = await asyncio.to_thread(preemptions, deployment)
    began = time.monotonic()
    serving = replace(deployment, proxy=replace(deployment.proxy, background=arm.shares))
    with proxy(serving, SCRATCH):
        url, name = deployment.proxy_url, deployment.served_name
        if arm.tier is None:
            since = time.perf_counter()
            answers = await serve_load(url, name, load, plan.dilation, salt)
            batched = 0
        else:
            file, out = SCRATCH / "asked.jsonl", SCRATCH / "answers.jsonl"
            for old in (out, SCRATCH / "answers.errors.jsonl"):
                old.unlink(missing_ok=True)
            asked = drawn_load(1_000 + run.round, BATCHED, inf, PROMPTS, LAW)
            write_batch(file, name, asked, salt, service_tier=arm.tier)
            with batch_process(file, out, url, CONCURRENCY):
                while len(answered_tokens(out)) < CONCURRENCY:  # so that lengths are mixed
                    await asyncio.sleep(1.0)
                earlier, since = sum(answered_tokens(out)), time.perf_counter()
                answers = await serve_load(url, name, load, plan.dilation, salt)
                batched = sum(answered_tokens(out)) - earlier
        seconds = (time.perf_counter() - since) / plan.dilation
        name = "headway_proxy_background_requests_that_gave_way_total"
        gave_way = await asyncio.to_thread(metric_total, f"{url}/metrics", name)
    logs = [SCRATCH / "steps" / f"{instance.name}.csv" for instance in deployment.instances]
    sums = step_sums(logs, since)
    return answer_figures(answers, plan.dilation) | {
        "batch_tokens_per_s": batched / seconds,
        "gave_way": gave_way,
        "preemptions": await asyncio.to_thread(preemptions, deployment) - before,
        "changed": float(changed_answers(answers, Path(model_to_load(deployment)))),
        "excess": sums.excess,
        "steps": float(sums.steps),
        "wall": time.monotonic() - began,
    }


def run_killed(plan: Plan, requests: int) -> None:
    kept = Cells(plan.out, plan.settings())
    if kept.read("killed") is not None:
        return
    deployment, folder = fleet(plan, ranked=True), SCRATCH / "killed"
    folder.mkdir(exist_ok=True)
    for old in [*folder.iterdir()]:
        old.unlink()
    load = drawn_load(2_003, requests, inf, PROMPTS, LAW)
    with engines(deployment, SCRATCH / "logs") as launched:
        found = killed_batch(deployment, launched, load, folder, CONCURRENCY)
    kept.write("killed", found._asdict())


def killed_figures(plan: Plan) -> dict[str, float]:
    found = Cells(plan.out, plan.settings()).read("killed") or {}
    return {f"killed_{name}": float(value) for name, value in found.items()}


Arms = dict[str, dict[int, dict[str, float]]]
"""Arm → round → figures."""


def valid_runs(plan: Plan, load: float, rounds: int, arms: Sequence[str]) -> Arms:
    found: Arms = {}
    for arm in arms:
        results = {
            number: valid(plan.cells(Run(load, number, arm)), arm, MOST_EXCESS)
            for number in range(rounds)
        }
        found[arm] = {number: one for number, one in results.items() if one is not None}
    return found


def leftover_share(plan: Plan, runs: Arms, arm: str) -> dict[int, float]:
    """Return what a batch got of the tokens that online requests leave, by round."""
    return {
        number: one["batch_tokens_per_s"]
        / (plan.capacity.tokens - runs[BASE][number]["tokens_per_s"])
        for number, one in runs[arm].items()
        if number in runs[BASE]
    }


def table(plan: Plan, load: float, runs: Arms) -> str:
    rows = []
    for arm, by_round in runs.items():
        if not by_round or not runs[BASE]:
            continue
        cells = relative_cells(runs, arm, BASE, FIGURES)
        batched = np.mean([one["batch_tokens_per_s"] for one in by_round.values()])
        share = mean_of(leftover_share(plan, runs, arm)).mean
        counts = [
            f"{np.mean([one[key] for one in by_round.values()]):.0f}"
            for key in ("gave_way", "preemptions")
        ]
        rows.append([arm, f"{len(by_round)}", *cells, f"{batched:.0f}", f"{share:.0%}", *counts])
    heads = ["arm", "rounds", *FIGURES, "batch tokens/s", "of the leftover", "gave way"]
    title = f"### Online at {100 * load:.0f}% of the capacity"
    return "\n".join([title, *markdown_table([*heads, "preemptions"], rows)])


def figures_of(plan: Plan, runs: Arms) -> dict[str, float]:
    found = {"capacity_tokens_per_s": plan.capacity.tokens}
    for arm, by_round in runs.items():
        found[f"rounds_{arm}"] = float(len(by_round))
        if arm == BASE or not by_round or not runs[BASE]:
            continue
        for figure in FIGURES:
            estimate = change(by_round, runs[BASE], figure)
            found[f"{figure}_change_{arm}"] = estimate.mean
            found[f"{figure}_change_{arm}_half_interval"] = estimate.half
        rates = {number: one["batch_tokens_per_s"] for number, one in by_round.items()}
        found[f"batch_tokens_per_s_{arm}"] = mean_of(rates).mean
        found[f"leftover_share_{arm}"] = mean_of(leftover_share(plan, runs, arm)).mean
    every = [one for by_round in runs.values() for one in by_round.values()]
    if every:
        found["excess_step_time"] = float(np.mean([one["excess"] for one in every]))
        found["answers_changed"] = float(sum(one["changed"] for one in every))
        found["requests_failed"] = float(sum(one["failed"] for one in every))
    return found


if __name__ == "__main__":
    main()
