"""STAR's own setting on vLLM's own scheduler: reasoning answers, and moves between three instances.

    python -m benchmarks.emulated_star [--quick] [--rounds N] [--arms NAME ...] [--report]
        [--out FOLDER] [--json OUT]

One prefill and three decode engines, emulated RTX 4090Ds that serve DeepSeek-R1-Distill-Qwen-7B,
get requests with the lengths of STAR's Table 2 (Wang et al. 2026) for 2,000 seconds at its 0.17
requests a second. Answers, prompts and KV caches have a quarter of the tokens, each of which takes
four times as long to read: steps take as long, all else a quarter of the time, and the memory is as
full. Requests go to the instance with the fewest KV tokens, as in the paper.

Prints, with half a 95% interval over rounds, the variance of the instances' step times, the P99 of
TPOT, goodput (TTFT within 1 s, TPOT within 25 ms), preemptions and moves of the requests that ended
in time, beside the paper's; and what the simulator says of the same requests. What is finished is
kept in the folder, and not run again while its settings stay the same.
"""

import asyncio
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.emulated_fleet import emulated
from benchmarks.emulator_check import write_trace
from benchmarks.support.deployments import patient, proxy, until_idle
from benchmarks.support.emulated_runs import EXACT, PATIENCE, RECORDED, kept_rounds, run_missing
from benchmarks.support.report import Cells, arguments, mean_of, resumable, write_report
from rescheduler.demo.demo_load import metric_total, preemptions
from rescheduler.demo.scripted_load import (
    EmulatedRequest,
    answer_figures,
    changed_answers,
    serve_load,
    step_rows,
    step_sums,
)
from rescheduler.emulation.emulate_options import (
    AnswerLengths,
    EmulateOptions,
    StepSeconds,
    read_machine,
)
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    MigrationConfig,
    SimulationConfig,
    SLOConfig,
    TransferConfig,
)
from rescheduler.simulator.results.metrics import run_metrics
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.simulation import create_candidates, run, run_setup
from rescheduler.simulator.workloads.length_generators import StarLengths

SCALE, DECODE, SLOTS, BLOCK = 4, 3, 64, 32
MACHINE = read_machine("rtx4090d-qwen-7b")
STEP = StepSeconds(
    constant=MACHINE.step_time.constant,
    per_new=MACHINE.step_time.per_new,
    per_context=SCALE * MACHINE.step_time.per_context,
)
KV_TOKENS = (MACHINE.kv_tokens or 0) // SCALE
RATE, SECONDS = 0.17 * SCALE, 2_000 / SCALE
EVERY = 20 // SCALE
"""Steps between two plans, as many tokens of an answer as the paper's 20."""
LAW = AnswerLengths(median=2_400 / SCALE, sigma=1.4, longest=32_768 // SCALE)
"""What forecasters know of the lengths: the log-normal law with the moments of their logarithm."""
TTFT_S, TPOT_S = 1.0, 0.025
SCRATCH = Path("runs/emulated_star")
STAR = {"name": "star", "interval_seconds": 0.1}
UNAWARE = STAR | {"prediction": False}
FIGURES = ("variance", "tpot_p99", "goodput", "preemptions", "moves")


class Arm(NamedTuple):
    """How requests move, whether lengths are known, and the paper's variance and P99 of TPOT."""

    migration: dict[str, Any] | None
    exact: bool = False
    paper: str = ""


ARMS = {
    "none": Arm(None, paper="96.3 ms"),
    "star_unaware": Arm(UNAWARE, paper="28.3 ms"),
    "star": Arm(STAR, paper="0.78 ms², 24.3 ms"),
    "survival": Arm({"name": "survival", "interval_seconds": 0.1}),
    "star_exact": Arm(STAR, exact=True),
}
SIMULATED: dict[str, str | dict[str, Any]] = {
    "none": "none",
    "star_unaware": {"name": "star", "prediction": False},
}
"""Planners that need no forecast: what differs is the simulator's idea of vLLM and of a move."""


class Plan(NamedTuple):
    """What is the same for all runs."""

    out: Path
    seconds: float

    def deployment(self, exact: bool) -> Deployment:
        emulate = EmulateOptions(
            step_time=STEP,
            kv_tokens=KV_TOKENS,
            max_num_batched_tokens=MACHINE.max_num_batched_tokens,
            transfer=MACHINE.transfer,
            lengths=LAW,
            forecast=EXACT if exact else RECORDED,
            prompt_forecast=EXACT if exact else RECORDED,
            logs=str((SCRATCH / "steps").absolute()),
        )
        engine = EngineOptions(
            max_num_seqs=SLOTS,
            block_size=BLOCK,
            max_model_len=8_320,
            emulate=emulate,
            arguments=["--no-enable-log-requests", "--disable-uvicorn-access-log"],
        )
        return patient(local_deployment("smollm2", engine, decode=DECODE, prefill=1))

    def cells(self, number: int, arm: str) -> Cells:
        emulate = self.deployment(ARMS[arm].exact).engine.emulate
        assert emulate is not None
        settings = {
            "emulate": emulated(emulate),
            "decode": DECODE,
            "migration": ARMS[arm].migration,
            "rate": RATE,
            "seconds": self.seconds,
        }
        return Cells(self.out / f"round-{number}", settings)


def main() -> None:
    parser = arguments("STAR's own setting on emulated engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[:4])
    parser.add_argument("--report", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/emulated_star"))
    options = parser.parse_args()
    plan = Plan(options.out, SECONDS)
    if options.quick:
        options.rounds, options.arms = 1, ["none", "star_unaware"]
        plan = Plan(Path("runs/emulated_star_quick"), 30.0)
    for folder in (plan.out, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    if not options.report:
        with resumable():
            serve = partial(served, plan)
            exact = {name: ARMS[name].exact for name in options.arms}
            run_missing(plan, options.rounds, exact, serve, SCRATCH / "logs")
    found = kept_rounds(plan, options.rounds, options.arms)
    simulations = {
        f"{arm}, simulated": {number: simulated(plan, number, arm) for number in found[arm]}
        for arm in SIMULATED
        if arm in found
    }
    table = "\n".join(report(found | simulations))
    print(table)
    write_report("emulated_star", figures_of(found | simulations), options.json, tables=[table])


def drawn(number: int, seconds: float) -> list[EmulatedRequest]:
    """Return a round's requests: STAR's lengths, a Poisson process of STAR's rate, both scaled."""
    generator = np.random.default_rng(number)
    most = int(2 * RATE * seconds) + 20
    arrives = np.cumsum(generator.exponential(1 / RATE, most))
    prompt, output = (np.ceil(n / SCALE).astype(int) for n in StarLengths().draw(generator, most))
    rows = zip(prompt.tolist(), np.maximum(2, output).tolist(), arrives.tolist(), strict=True)
    load = [EmulatedRequest(number * 1_000_000 + i, *row) for i, row in enumerate(rows)]
    return [one for one in load if one.arrives < seconds]


async def served(
    plan: Plan, deployment: Deployment, number: int, name: str, attempt: int
) -> Mapping[str, float]:
    serving = replace(deployment, routing={"name": "jsq_load"}, migration=ARMS[name].migration)
    load = drawn(number, plan.seconds)
    await until_idle(deployment, PATIENCE)
    before = await asyncio.to_thread(preemptions, deployment)
    since = time.perf_counter()
    salt = zlib.crc32(f"{number} {name} {attempt}".encode())
    url, model = serving.proxy_url, serving.served_name
    with proxy(serving, SCRATCH):
        answers = await serve_load(url, model, load, 1.0, salt, until=plan.seconds)
        until = time.perf_counter()
        preempted = await asyncio.to_thread(preemptions, deployment) - before
        counter = "headway_proxy_migrations_total"
        moves = await asyncio.to_thread(metric_total, f"{url}/metrics", counter, outcome="moved")
    await until_idle(deployment, PATIENCE)
    ended = [one for one in answers if one.error or one.tokens]
    figures = answer_figures(ended, 1.0, TTFT_S, TPOT_S)
    logs = [SCRATCH / "steps" / f"{one.name}.csv" for one in deployment.decode]
    return {
        "variance": step_variance(logs, since, until),
        "tpot_p99": 1e3 * figures["tpot_p99"],
        "goodput": figures["met"] * len(ended) / plan.seconds,
        "preemptions": preempted,
        "moves": moves,
        "ended": figures["requests"],
        "failed": figures["failed"],
        "changed": float(changed_answers(ended, Path(model_to_load(deployment)))),
        "excess": step_sums(logs, since).excess,
    }


def step_variance(logs: Sequence[Path], since: float, until: float) -> float:
    """Return the mean, over a time, of the variance of the engines' step times in ms²."""
    at = np.arange(since, until, 0.1)
    times = []
    for log in logs:
        rows = step_rows(log)
        i = np.minimum(np.searchsorted(rows["end"], at), len(rows) - 1)
        now = (rows["end"][i] - rows["seconds"][i] <= at) & (at <= rows["end"][i])
        own = STEP.per_new * rows["requests"][i] + STEP.per_context * rows["context_tokens"][i]
        times.append(np.where(now, own, 0.0))
    return 1e6 * float(np.var(times, axis=0).mean())


def simulated(plan: Plan, number: int, arm: str) -> Mapping[str, float]:
    """Return what the simulator says of a round's requests."""
    load = drawn(number, plan.seconds)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        write_trace(load, trace)
        transfer = MACHINE.transfer
        assert transfer is not None
        config = SimulationConfig(
            cluster=ClusterConfig(
                *(DECODE, SLOTS, KV_TOKENS), prefix_caching=True, block_tokens=BLOCK
            ),
            clock="independent",
            step_time={
                "name": "batch",
                "a": STEP.constant,
                "b": STEP.per_new,
                "c": STEP.per_context,
            },
            transfer=TransferConfig(
                transfer.latency_s, 8 * transfer.gigabytes_per_second, transfer.bytes_per_token
            ),
            trace={"path": str(trace), "requests": len(load)},
            arrivals=ArrivalsConfig("trace"),
            forecast={"name": "none"},
            policies="jsq_load",
            migration=MigrationConfig(EVERY, [SIMULATED[arm]]),
            max_seconds=plan.seconds,
        )
        (found,) = create_candidates(run_setup(config)).values()
        result = run(found.setup, found.policy, 0, planner=found.planner)
        figures = run_metrics(result, SLOConfig(ttft_s=TTFT_S, tpot_s=TPOT_S))
    return {
        "variance": 1e6 * figures["execution_variance"],
        "tpot_p99": 1e3 * figures["tpot_p99"],
        "goodput": figures["goodput"],
        "preemptions": figures["preemptions"],
        "moves": figures["migrations"],
    }


def report(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[str]:
    rows = []
    for arm, runs in found.items():
        if not runs:
            continue
        cells = []
        for name in FIGURES:
            estimate = mean_of({number: one[name] for number, one in runs.items()})
            half = "" if np.isnan(estimate.half) else f" ± {estimate.half:.2g}"
            cells.append(f"{estimate.mean:.3g}{half}")
        paper = ARMS[arm].paper if arm in ARMS else ""
        rows.append([arm, f"{len(runs)}", *cells, paper])
    heads = ["variance, ms²", "TPOT P99, ms", "goodput, /s", "preemptions", "moves"]
    return markdown_table(["arm", "rounds", *heads, "paper"], rows)


def figures_of(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for arm, runs in found.items():
        if not runs:
            continue
        label = arm.replace(", ", "_")
        for name in FIGURES:
            estimate = mean_of({number: one[name] for number, one in runs.items()})
            figures[f"{name}_{label}"] = estimate.mean
            figures[f"{name}_{label}_half_interval"] = estimate.half
    every = [one["excess"] for runs in found.values() for one in runs.values() if "excess" in one]
    return figures | {"excess_step_time": float(np.mean(every))} if every else figures


if __name__ == "__main__":
    main()
