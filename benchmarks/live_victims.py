"""Whom engines suspend when their KV caches are full, on real engines, with moves and without.

    python -m benchmarks.live_victims [--quick] [--rounds N] [--arms NAME ...] [--report]
        [--out FOLDER] [--json OUT]

A prefill and two decode engines serve SmolLM2 on this machine's CPU behind `headway serve`. Each
decode engine has sixteen places and a KV cache for some seven long answers, and a round's sixty
requests come at once, half of them with long answers: memory runs out again and again. Every arm
gets the same requests with the same seeds. An arm is a planner of moves, and a victim.

Prints, relative to no moves and vLLM's own choice, in percent with half a 95% interval over
rounds: the P99 of TPOT, the mean of the longest pause in each answer and the longest of all, mean
latency, the P99 of TTFT, preemptions, moves. Engines share two cores, so that all are slower where
several compute. What is finished is kept in the folder, and not run again.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.deployments import patient
from benchmarks.support.experiment import PATIENCE, QUIET, Experiment, Run
from benchmarks.support.live_runs import TimedAnswer, round_load, run_load
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_local import local_deployment
from rescheduler.ordering.expected_rest import Victim

ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=640,
    max_num_seqs=16,
    kv_blocks=76,
    enforce_eager=True,
    checkpoint="checkpoints/smollm2-135m-instruct",
    k=10,
    arguments=[*QUIET],
)
REQUESTS, MAX_TOKENS = 60, 300
SURVIVAL = {"name": "survival", "interval_seconds": 0.5}


class Arm(NamedTuple):
    migration: dict[str, Any] | None
    victim: Victim


class LiveVictims(Experiment):
    """Two decode engines whose caches overflow, and one that prefills."""

    name = "live_victims"
    arms: ClassVar = {
        f"{planner}_{victim}": Arm(migration, victim)
        for planner, migration in (("none", None), ("survival", SURVIVAL))
        for victim in ("newest", "age", "rest")
    }
    base = "none_newest"
    figures = ("tpot_p99", "mean_pause", "longest_pause", "latency", "ttft_p99")
    counts = ("preemptions", "moves", "failed")
    most_excess = inf
    has_loads = False

    def engines_of(self, arm: str) -> Victim:
        victim: Victim = self.arms[arm].victim
        return victim

    def deployment(self, key: Victim) -> Deployment:
        return patient(local_deployment("smollm2", replace(ENGINE, victim=key), decode=2))

    def settings(self, run: Run | None) -> dict[str, Any]:
        arm = {} if run is None else self.arms[run.arm]._asdict()
        return {"engine": to_builtins(ENGINE), "requests": self.options.requests} | arm

    async def serve(self, deployment: Deployment, run: Run, salt: int) -> Mapping[str, float]:
        load = round_load(run.round, self.options.requests, inf, MAX_TOKENS)
        migration = self.arms[run.arm].migration
        serving = replace(deployment, routing={"name": "jsq_load"}, migration=migration)
        result, answers = await run_load(serving, self.scratch, load, f"{salt}", PATIENCE)
        measured = {name: float(result[name]) for name in ("preemptions", "moves", "failed")}
        return measured | figures_of(answers) | {"excess": 0.0}


def figures_of(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Return figures of all answers that began, times in seconds."""
    answers = [one for one in answers if one.first < inf]
    return {
        "tpot_p99": float(np.quantile([one.tpot for one in answers], 0.99)),
        "mean_pause": float(np.mean([one.longest_gap for one in answers])),
        "longest_pause": max(one.longest_gap for one in answers),
        "latency": float(np.mean([one.last - one.sent for one in answers])),
        "ttft_p99": float(np.quantile([one.first - one.sent for one in answers], 0.99)),
    }


def main() -> None:
    parser = LiveVictims.parser("whom real engines suspend when memory runs out", rounds=3)
    parser.set_defaults(requests=REQUESTS)
    experiment = LiveVictims(parser.parse_args())
    experiment.capacity = 1.0
    experiment.main({"arms": ["none_newest", "survival_age"], "requests": 16})


if __name__ == "__main__":
    main()
