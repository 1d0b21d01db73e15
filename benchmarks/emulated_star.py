"""STAR's own setting on vLLM's own scheduler: reasoning answers, and moves between three instances.

    python -m benchmarks.emulated_star [--quick] [--rounds N] [--arms NAME ...] [--report]
        [--out FOLDER] [--json OUT]

One prefill and three decode engines, emulated RTX 4090Ds that serve DeepSeek-R1-Distill-Qwen-7B,
get requests with the lengths of STAR's Table 2 (Wang et al. 2026) for 2,000 seconds at its 0.17
requests a second. Answers, prompts and KV caches have a quarter of the tokens, each of which takes
four times as long to read: steps take as long, all else a quarter of the time, and the memory is as
full. Requests go to the instance with the fewest KV tokens, as in the paper.

An arm is a planner of moves, and whom an engine suspends when its cache is full.

Prints, with half a 95% interval over rounds, the variance of the instances' step times, the P99 of
TPOT, goodput (TTFT within 1 s, TPOT within 25 ms), preemptions, moves, the P99 of TTFT and the mean
latency of the requests that ended in time, the longest gap within an answer, and how many ended,
beside the paper's; and what the simulator says of the same requests. What is finished is
kept in the folder, and not run again while its settings stay the same.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.emulator_check import simulation, step_time_of, trace_of
from benchmarks.support.deployments import proxy, until_idle
from benchmarks.support.experiment import (
    PATIENCE,
    Arms,
    Experiment,
    Run,
    check_schedulers,
    emulated_replicas,
    excess_of,
    of_results,
    step_logs,
)
from benchmarks.support.report import Rounds, by_round, mean_of
from rescheduler.demo.load import (
    EmulatedAnswer,
    EmulatedRequest,
    answer_figures,
    changed_answers,
    moves,
    preemptions,
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
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.ordering.expected_rest import Victim
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
BALANCES = {"tolerance": 1.0, "crowded": 100.0}
"""Moves whatever that does to the memory of the whole cluster."""
STAR = {"name": "star", "interval_seconds": 0.1, **BALANCES}
UNAWARE = STAR | {"prediction": False}
DEFAULT = {"name": "survival", "interval_seconds": 0.1}
SURVIVAL = DEFAULT | {"tolerance": 1.0, "crowded": 1.0}
COMPARED = ("variance", "tpot_p99", "goodput", "preemptions", "moves")
"""What the simulator has as well."""
FIGURES = (*COMPARED, "ttft_p99", "latency", "longest_gap", "ended")


class Arm(NamedTuple):
    """A planner, a victim, whether lengths are known; the paper's variance and P99 of TPOT."""

    migration: dict[str, Any] | None
    victim: Victim = "newest"
    exact: bool = False
    paper: str = ""


ARMS = {
    "none_newest": Arm(None, paper="96.3 ms"),
    "none_forecast": Arm(None, "rest"),
    "survival_newest": Arm(SURVIVAL),
    "survival_context": Arm(SURVIVAL, "context"),
    "survival_age": Arm(SURVIVAL, "age"),
    "survival_forecast": Arm(SURVIVAL, "rest"),
    "default_newest": Arm(DEFAULT),
    "default_forecast": Arm(DEFAULT, "rest"),
    "star_unaware_newest": Arm(UNAWARE, paper="28.3 ms"),
    "star_newest": Arm(STAR, paper="0.78 ms², 24.3 ms"),
    "star_exact_newest": Arm(STAR, exact=True),
}
SIMULATED: dict[str, str | dict[str, Any]] = {
    "none_newest": "none",
    "star_unaware_newest": {
        "name": "star",
        "prediction": False,
        **BALANCES,
    },
}
"""Planners that need no forecast: what differs is the simulator's idea of vLLM and of a move."""


class EmulatedStar(Experiment):
    """STAR's three decode instances, and one that prefills."""

    name = "emulated_star"
    arms = ARMS
    base = "none_newest"
    figures = FIGURES
    has_loads = False

    def engines_of(self, arm: str) -> tuple[bool, Victim]:
        return ARMS[arm].exact, ARMS[arm].victim

    def emulate(self, exact: bool) -> EmulateOptions:
        return self.emulated(
            LAW,
            exact,
            step_time=STEP,
            kv_tokens=KV_TOKENS,
            max_num_batched_tokens=MACHINE.max_num_batched_tokens,
            transfer=MACHINE.transfer,
        )

    def deployment(self, key: tuple[bool, Victim]) -> Deployment:
        exact, victim = key
        emulate = self.emulate(exact)
        engines = emulated_replicas(emulate, DECODE, SLOTS, prefill=1, max_model_len=8_320)
        return replace(engines, engine=replace(engines.engine, victim=victim))

    def settings(self, run: Run | None) -> dict[str, Any]:
        assert run is not None, "the rate is the paper's"
        arm = ARMS[run.arm]
        return {
            "emulate": of_results(self.emulate(arm.exact), "barrier"),
            "decode": DECODE,
            "migration": arm.migration,
            "victim": arm.victim,
            "rate": RATE,
            "seconds": self.options.seconds,
        }

    async def serve(self, deployment: Deployment, run: Run, salt: int) -> dict[str, float]:
        migration, seconds = ARMS[run.arm].migration, self.options.seconds
        serving = replace(deployment, routing={"name": "jsq_load"}, migration=migration)
        load = drawn(run.round, seconds)
        await until_idle(deployment, PATIENCE)
        before = await asyncio.to_thread(preemptions, deployment)
        since = time.perf_counter()
        url, model = serving.proxy_url, serving.served_name
        with proxy(serving, self.scratch):
            answers = await serve_load(url, model, load, 1.0, salt, until=seconds)
            until, given_up = time.perf_counter(), time.monotonic()
            preempted = await asyncio.to_thread(preemptions, deployment) - before
            moved = await asyncio.to_thread(moves, serving)
            await asyncio.to_thread(check_schedulers, serving)
        await until_idle(deployment, PATIENCE)
        ended = [one for one in answers if one.error or one.tokens]
        figures = answer_figures(ended, 1.0, TTFT_S, TPOT_S)
        logs = step_logs(self.scratch, deployment.decode)
        return {
            "variance": step_variance(logs, since, until),
            "tpot_p99": 1e3 * figures["tpot_p99"],
            "goodput": figures["met"] * len(ended) / seconds,
            "preemptions": preempted,
            "moves": moved,
            "ended": figures["requests"],
            "latency": figures["latency"],
            "ttft_p99": figures["ttft_p99"],
            "longest_gap": max(longest_gap(one, given_up) for one in answers),
            "failed": figures["failed"],
            "changed": float(changed_answers(ended, Path(model_to_load(deployment)))),
            "excess": step_sums(logs, since).excess,
        }

    def results(self, load: float, arms: Sequence[str]) -> Arms:
        """Return the valid results, and what the simulator says of the same requests."""
        found = super().results(load, arms)
        seconds = self.options.seconds
        simulations = {
            f"{arm}, simulated": {number: simulated(number, seconds, arm) for number in found[arm]}
            for arm in SIMULATED
            if arm in found
        }
        return {**found, **simulations}

    def tables(self, found: Mapping[float, Arms]) -> list[str]:
        (every,) = found.values()
        rows = []
        for arm, runs in every.items():
            if runs:
                known = {name: having(runs, name) for name in FIGURES}
                cells = [
                    mean_of(by_round(rounds, name)).shown(".3g", ".2g") if rounds else ""
                    for name, rounds in known.items()
                ]
                paper = ARMS[arm].paper if arm in ARMS else ""
                rows.append([arm, f"{len(runs)}", *cells, paper])
        heads = ["variance, ms²", "TPOT P99, ms", "goodput, /s", "preemptions", "moves"]
        heads += ["TTFT P99, s", "latency, s", "longest gap, s", "ended"]
        return ["\n".join(markdown_table(["arm", "rounds", *heads, "paper"], rows))]

    def summary(self, found: Mapping[float, Arms]) -> dict[str, float]:
        (every,) = found.values()
        figures: dict[str, float] = {}
        for arm, runs in every.items():
            for name in FIGURES:
                rounds, label = having(runs, name), arm.replace(", ", "_")
                if rounds:
                    figures |= mean_of(by_round(rounds, name)).figures(f"{name}_{label}")
        none = every.get("none_newest", {})
        for arm in ("survival_newest", "survival_age", "survival_forecast"):
            chosen = every.get(arm, {})
            ratios = [chosen[i]["tpot_p99"] / none[i]["tpot_p99"] for i in chosen if i in none]
            if ratios:
                figures[f"worst_round_{arm}_against_none"] = max(ratios)
        return figures | excess_of(every)


def main() -> None:
    parser = EmulatedStar.parser("STAR's own setting on emulated engines", rounds=3)
    parser.set_defaults(arms=list(ARMS)[:6], seconds=SECONDS)
    star = EmulatedStar(parser.parse_args())
    star.capacity = RATE
    star.main({"arms": ["none_newest", "star_unaware_newest"], "seconds": 30.0})


def drawn(number: int, seconds: float) -> list[EmulatedRequest]:
    """Return a round's requests: STAR's lengths, a Poisson process of STAR's rate, both scaled."""
    generator = np.random.default_rng(number)
    most = int(2 * RATE * seconds) + 20
    arrives = np.cumsum(generator.exponential(1 / RATE, most))
    prompt, output = (np.ceil(n / SCALE).astype(int) for n in StarLengths().draw(generator, most))
    rows = zip(prompt.tolist(), np.maximum(2, output).tolist(), arrives.tolist(), strict=True)
    load = [EmulatedRequest(number * 1_000_000 + i, *row) for i, row in enumerate(rows)]
    return [one for one in load if one.arrives < seconds]


def having(runs: Rounds, name: str) -> Rounds:
    """Return the rounds that have a figure: the simulator and older ones have not all."""
    return {number: result for number, result in runs.items() if name in result}


def longest_gap(answer: EmulatedAnswer, given_up: float) -> float:
    """Return the longest time that a client waited for a token after the first, to the last."""
    waits = answer.first < np.inf and not answer.tokens
    return max(answer.longest_gap, given_up - answer.last if waits else 0.0)


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


def simulated(number: int, seconds: float, arm: str) -> Mapping[str, float]:
    """Return what the simulator says of a round's requests."""
    transfer = MACHINE.transfer
    assert transfer is not None
    with trace_of(drawn(number, seconds)) as trace:
        config = SimulationConfig(
            cluster=ClusterConfig(
                *(DECODE, SLOTS, KV_TOKENS),
                prefix_caching=True,
                block_tokens=BLOCK,
                victim=ARMS[arm].victim,
            ),
            clock="independent",
            step_time=step_time_of(STEP),
            transfer=TransferConfig(
                transfer.latency_s, 8 * transfer.gigabytes_per_second, transfer.bytes_per_token
            ),
            trace=trace,
            arrivals=ArrivalsConfig("trace"),
            forecast={"name": "none"},
            policies="jsq_load",
            migration=MigrationConfig(EVERY, [SIMULATED[arm]]),
            max_seconds=seconds,
        )
        figures = run_metrics(simulation(config), SLOConfig(TTFT_S, TPOT_S))
    return {
        "variance": 1e6 * figures["execution_variance"],
        "tpot_p99": 1e3 * figures["tpot_p99"],
        "goodput": figures["goodput"],
        "preemptions": figures["preemptions"],
        "moves": figures["migrations"],
    }


if __name__ == "__main__":
    main()
