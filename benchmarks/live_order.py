"""What the order of service is worth on real engines, paired by round.

    python -m benchmarks.live_order [--quick] [--rounds N] [--loads X ...] [--arms NAME ...]
        [--requests N] [--out FOLDER] [--json OUT]

A prefill and a decode engine on this machine's CPU, a core each, behind `headway serve`; eight
requests are decoded at a time. In a round every arm gets the same requests at the same times with
the same seeds, so that every arm generates the same tokens; each round draws requests of its own,
and begins with the next arm. Lengths are the model's own, up to a cap. A load is a share of the
capacity, measured first in its steady part, or ``burst``: all requests at once.

Arms: ``fcfs``; ``shortest`` and ``boost`` with forecasts from hidden states once a request is
prefilled, and the recent mean length before; ``boost_prompts``, with forecasts from prompts before;
``prompt``, shortest prompt first; ``exact``,
shortest first with lengths known from the same round's ``fcfs`` (each request's cap is its own
length, and nothing else is forecast).

Prints latency and time to first token relative to ``fcfs`` in percent, with half a 95% interval
over rounds. What is finished is kept in the folder and not run again while its settings stay the
same; on another machine give another folder.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import replace as changed
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.deployments import engines, patient
from benchmarks.support.live_runs import round_load, run_load, served_rate
from benchmarks.support.report import (
    Cells,
    arguments,
    by_round,
    change,
    gain,
    mean_of,
    resumable,
    rotated,
    write_report,
)
from rescheduler.demo.load import LoadRequest
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.engine_command import IN_PROCESS
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.results.report import markdown_table

ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=640,
    max_num_seqs=8,
    kv_blocks=240,
    enforce_eager=True,
    checkpoint="checkpoints/smollm2-135m-instruct",
    k=10,
    # What launched CPU engines have anyway: named, so that results of others are run again.
    arguments=["--distributed-executor-backend", IN_PROCESS],
)
DECODE = 1  # with more, engines wait for cores, not requests for places
BURST = "burst"
BASE = "fcfs"
ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {"name": "fcfs"},
    "shortest": {"name": "shortest"},
    "boost": {"name": "boost"},
    "boost_prompts": {"name": "boost"},
    "prompt": {"name": "shortest", "by": "prompt"},
    "exact": {"name": "shortest"},
}
PROMPT_CHECKPOINTS = {"boost_prompts": "checkpoints/smollm2-135m-instruct-prompt"}
REQUESTS = {True: 60, False: 300}
"""Of a round, for a burst and for a steady load: a queue takes some hundred to build up."""
MAX_TOKENS, PATIENCE = 300, 600.0
MEASURED, MEASURED_ROUND = 80, 1_000_003
"""Requests that the capacity is measured with, of a round whose requests no other has."""
RESERVE = {"name": "max_capacity", "reserve": 0.1}
FIGURES = ("latency", "latency_p50", "latency_p99", "ttft", "ttft_p99", "slowdown", "seconds")


class Run(NamedTuple):
    load: str
    round: int
    arm: str

    def cells(self, out: Path, settings: dict[str, Any]) -> Cells:
        return Cells(out / self.load / f"round-{self.round}", settings)


class Plan(NamedTuple):
    out: Path
    requests: int | None
    """Of a round; None is what suits the load."""
    capacity: float | None
    """Requests a second; None where all loads are bursts."""

    def requests_of(self, run: Run) -> list[LoadRequest]:
        rate = inf if run.load == BURST else float(run.load) * (self.capacity or inf)
        requests = self.requests or REQUESTS[run.load == BURST]
        load = round_load(run.round, requests, rate, MAX_TOKENS)
        if run.arm != "exact":
            return load
        base = run._replace(arm=BASE)
        kept = base.cells(self.out, self.settings(base)).read(BASE)
        tokens = {one["name"]: max(1, one["tokens"]) for one in kept["requests"]}
        return [changed(one, max_tokens=tokens[one.name]) for one in load]

    def settings(self, run: Run) -> dict[str, Any]:
        """Return what a result depends on, beside the code."""
        asked = json.dumps([asdict(one) for one in self.requests_of(run)])
        checkpoint = PROMPT_CHECKPOINTS.get(run.arm)
        return ({} if checkpoint is None else {"prompt_checkpoint": checkpoint}) | {
            "engine": to_builtins(ENGINE),
            "order": ORDERS[run.arm],
            "requests": sha256(asked.encode()).hexdigest()[:16],
        }

    def result(self, run: Run) -> Any:
        if run.arm == "exact" and self.result(run._replace(arm=BASE)) is None:
            return None
        return run.cells(self.out, self.settings(run)).read(run.arm)


def main() -> None:
    parser = arguments("what the order of service is worth on real engines")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--loads", nargs="+", type=share_or_burst, default=[BURST, "0.8", "1.0", "1.3"]
    )
    parser.add_argument("--arms", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    parser.add_argument(
        "--requests", type=int, help=f"of a round ({REQUESTS[True]} in a burst, {REQUESTS[False]})"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/live_order"))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
        options.requests = 24
        options.loads = [BURST]
        options.out /= "quick"
    options.out.mkdir(parents=True, exist_ok=True)
    arms = [BASE, *(arm for arm in options.arms if arm != BASE)]
    runs = [
        Run(load, number, arm)
        for number in range(options.rounds)
        for load in options.loads
        for arm in exact_last(rotated(arms, number))
    ]
    with resumable():
        plan = run_missing(options.out, options.requests, runs)
    figures: dict[str, float] = {}
    tables = []
    for load in options.loads:
        prefix = f"{load}_" if load == BURST else f"{100 * float(load):.0f}_"
        results = {
            arm: {number: plan.result(Run(load, number, arm)) for number in range(options.rounds)}
            for arm in arms
        }
        tables.append(table(load, results))
        figures |= {prefix + name: value for name, value in figures_of(results).items()}
    print("\n\n".join(tables))
    write_report("live_order", figures, options.json, tables=tables)


def share_or_burst(value: str) -> str:
    """Return a load as it was given: a share of the capacity, or a burst."""
    if value != BURST and not 0 < float(value) < inf:
        raise ValueError(f"{value} is no load")
    return value


def exact_last(arms: Sequence[str]) -> list[str]:
    """Return the arms with ``exact`` at the end: it knows what came out of another."""
    return [arm for arm in arms if arm != "exact"] + [arm for arm in arms if arm == "exact"]


def run_missing(out: Path, requests: int | None, runs: Sequence[Run]) -> Plan:
    """Run what the folder does not have with these settings; each result is kept at once."""
    steady = any(run.load != BURST for run in runs)
    kept = Cells(out, {"engine": to_builtins(ENGINE), "requests": MEASURED})
    plan = Plan(out, requests, kept.read("capacity") if steady else None)
    if (plan.capacity or not steady) and all(plan.result(run) is not None for run in runs):
        return plan
    deployment = patient(local_deployment("smollm2", ENGINE, decode=DECODE))
    with engines(deployment, out):
        if steady and plan.capacity is None:
            plan = plan._replace(capacity=capacity(deployment, out))
            kept.write("capacity", plan.capacity)
        for number, run in enumerate(runs):
            if plan.result(run) is None:
                shown = run_one(plan, deployment, run)
                print(f"{number + 1}/{len(runs)} {run}: {shown}", file=sys.stderr, flush=True)
    return plan


def capacity(deployment: Deployment, out: Path) -> float:
    """Return the requests a second of a load at once, with a tenth of each KV cache kept free."""
    load = round_load(MEASURED_ROUND, MEASURED, inf, MAX_TOKENS)
    serving = replace(deployment, routing=RESERVE, migration=None)
    return served_rate(asyncio.run(run_load(serving, out, load, "capacity", PATIENCE))[1])


def run_one(plan: Plan, deployment: Deployment, run: Run) -> dict[str, float]:
    instances = deployment.instances
    if run.arm == "exact":  # forecasts of the model would be cut at the known lengths only
        instances = [replace(one, telemetry=None) for one in instances]
    serving = replace(
        deployment,
        order=ORDERS[run.arm],
        prompt_checkpoint=PROMPT_CHECKPOINTS.get(run.arm),
        instances=instances,
    )
    load = plan.requests_of(run)
    salt = f"{run.load}-{run.round}-{run.arm}"
    result, _ = asyncio.run(run_load(serving, plan.out, load, salt, PATIENCE))
    run.cells(plan.out, plan.settings(run)).write(run.arm, result)
    found = measured(result)
    return {name: round(found[name], 2) for name in ("latency", "ttft", "seconds", "failed")}


def measured(result: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one run, times in seconds."""
    requests = result["requests"]
    latency = np.array([one["ended"] - one["arrives"] for one in requests])
    ttft = np.array([one["ttft"] if one["ttft"] is not None else inf for one in requests])
    tokens = np.array([one["tokens"] for one in requests])
    return {
        "latency": float(latency.mean()),
        "latency_p50": float(np.median(latency)),
        "latency_p99": float(np.quantile(latency, 0.99)),
        "ttft": float(ttft.mean()),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "slowdown": float((latency / np.maximum(tokens, 1)).mean()),
        "seconds": float(result["seconds"]),
        "failed": float(result["failed"]),
        "preemptions": float(result["preemptions"]),
    }


Results = dict[str, dict[int, Any]]
"""Arm → round → result."""


def measured_rounds(results: Results) -> dict[str, dict[int, dict[str, float]]]:
    """Return the figures of each arm's rounds that were run."""
    return {
        arm: {number: measured(one) for number, one in rounds.items() if one is not None}
        for arm, rounds in results.items()
    }


def figures_of(results: Results) -> dict[str, float]:
    found, rounds = {}, measured_rounds(results)
    for arm in results:
        if arm == BASE:
            continue
        for figure in ("latency", "ttft"):
            estimate = gain(rounds[arm], rounds[BASE], figure, more_is_better=False)
            found[f"{figure}_gain_{arm}"] = estimate.mean
            found[f"{figure}_gain_half_interval_{arm}"] = estimate.half
        found[f"tokens_changed_{arm}"] = float(tokens_changed(results, arm))
    exact = found.get("latency_gain_exact")
    if exact:
        for arm in results:
            if f"latency_gain_{arm}" in found:
                found[f"kept_of_exact_{arm}"] = found[f"latency_gain_{arm}"] / exact
    return found


def tokens_changed(results: Results, arm: str) -> int:
    """Return how many answers differ from those in order of arrival."""
    return sum(
        one["text"] != other["text"]
        for number, result in results[arm].items()
        if result is not None and results[BASE].get(number) is not None
        for one, other in zip(result["requests"], results[BASE][number]["requests"], strict=True)
    )


def table(load: str, results: Results) -> str:
    rows = []
    every = measured_rounds(results)
    for arm, runs in every.items():
        if not runs:
            continue
        if arm == BASE:
            cells = [f"{mean_of(by_round(runs, figure)).mean:.3g} s" for figure in FIGURES]
        else:
            estimates = [change(runs, every[BASE], figure) for figure in FIGURES]
            cells = [f"{one.mean:+.0f} ± {one.half:.0f}%" for one in estimates]
        changed_answers = 0 if arm == BASE else tokens_changed(results, arm)
        rows.append([arm, f"{len(runs)}", *cells, f"{changed_answers}"])
    heads = ["order", "rounds", *FIGURES, "answers changed"]
    return "\n".join([f"### {load}", *markdown_table(heads, rows)])


if __name__ == "__main__":
    main()
