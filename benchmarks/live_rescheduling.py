"""What placing and moving requests is worth on real engines, paired by round.

    python -m benchmarks.live_rescheduling [--quick] [--rounds N] [--loads X ...] [--arms NAME ...]
        [--reserve X] [--out FOLDER] [--json OUT] [--png OUT]

One prefill and two decode engines on this machine's CPU, with KV caches that hold a handful of
requests, behind `headway serve`. In a round every arm gets the same requests at the same times,
with the same seeds, so that every arm generates the same tokens; each round draws requests of its
own, and begins with the next arm. Lengths are the model's own, up to a cap.

First the machine is measured: what a request takes that is alone, of which the objectives of
goodput are multiples; how many requests a second the deployment serves when overloaded, of which
the loads are shares; and how long a move takes, which the planners are told. Nothing has
a limit in seconds: a run fails only if no token comes for as long as a lone request takes to
generate over a thousand of them.

What is finished is kept in the folder, one file a load, round and arm, and not run again while
its settings stay the same. So a long measurement can be made in pieces; on another machine give
another folder. Differences are of the rounds that both arms have.

The reserve of the arm of that name is to be tuned for the machine (``--reserve``).
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.deployments import engines, patient
from benchmarks.support.live_machine import Machine, measure_machine, read_machine
from benchmarks.support.live_runs import round_load, run_load
from benchmarks.support.report import Cells, arguments, write_report
from benchmarks.support.rescheduling_figures import Rounds, draw, print_tables, summarised
from rescheduler.demo.demo_load import LoadRequest
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.engine_command import IN_PROCESS
from rescheduler.engines.launch_local import local_deployment

ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=640,
    max_num_seqs=16,
    kv_blocks=28,
    enforce_eager=True,
    checkpoint="checkpoints/smollm2-135m-instruct",
    k=10,
    # What launched CPU engines have anyway: named, so that results of others are run again.
    arguments=["--distributed-executor-backend", IN_PROCESS],
)
KV_BYTES_PER_TOKEN = 46_080  # 30 layers, 3 heads of 64, keys and values, float32
REQUESTS, MAX_TOKENS = 36, 300
LOADS = (0.8, 1.0, 1.2)
RESERVE = 0.1
_RESUMED = "The same command goes on with what is missing."
ARMS = (
    "jsq_load",
    "reserve",
    "headroom",
    "star_no_prediction",
    "star",
    "survival",
    "headroom_survival",
)


class Arm(NamedTuple):
    routing: dict[str, Any]
    migration: dict[str, Any] | None


class Run(NamedTuple):
    load: float
    round: int
    arm: str

    def cells(self, out: Path, settings: dict[str, Any]) -> Cells:
        return Cells(out / f"load-{100 * self.load:g}" / f"round-{self.round}", settings)


def main() -> None:
    parser = arguments("what placing and moving requests is worth on real engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--reserve", type=float, default=RESERVE, help="share kept free")
    parser.add_argument("--out", type=Path, default=Path("runs/live_rescheduling"))
    parser.add_argument("--png", type=Path, help="draw KV usage of the first round here")
    options = parser.parse_args()
    requests = 12 if options.quick else REQUESTS
    if options.quick:
        options.rounds, options.loads = 1, options.loads[:1]
        options.out /= "quick"  # fewer requests say less of the capacity
    options.out.mkdir(parents=True, exist_ok=True)
    runs = [
        Run(load, number, arm)
        for number in range(options.rounds)
        for load in options.loads
        for arm in rotated(options.arms, number)
    ]
    try:
        machine = run_missing(options.out, runs, requests, options.reserve)
    except RuntimeError as error:
        sys.exit(f"{error}\n{_RESUMED}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted\n{_RESUMED}")
    except ValueError as error:
        sys.exit(str(error))
    rounds = {
        load: finished(options.out, load, options.arms, options.rounds) for load in options.loads
    }
    if options.png is not None:
        draw(rounds[options.loads[len(options.loads) // 2]], options.png)
    figures, estimates = summarised(rounds, machine)
    print_tables(estimates, options.arms)
    write_report("live_rescheduling", figures, options.json, machine_measured=asdict(machine))


def rotated(arms: Sequence[str], number: int) -> list[str]:
    """Return the arms in a round's order: each round begins with another."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def finished(out: Path, load: float, arms: Sequence[str], rounds: int) -> Rounds:
    found: Rounds = {arm: {} for arm in arms}
    for arm in arms:
        for number in range(rounds):
            file = Run(load, number, arm).cells(out, {}).file(arm)
            if file.is_file():
                found[arm][number] = json.loads(file.read_text())["result"]
    return found


def arm_of(name: str, machine: Machine, reserve: float) -> Arm:
    headroom = {"name": "headroom", "prefill_cost": round(machine.prefill_cost, 4)}
    placed: dict[str, dict[str, Any]] = {
        "reserve": {"name": "max_capacity", "reserve": reserve},
        "headroom": headroom,
        "headroom_survival": headroom,
    }
    planners: dict[str, dict[str, Any]] = {
        "star_no_prediction": {"name": "star", "prediction": False},
        "star": {"name": "star"},
        "survival": {"name": "survival"},
        "headroom_survival": {"name": "survival"},
    }
    costs = {
        "interval_seconds": 1.0,
        "handshake_seconds": round(machine.pause, 4),
        "bandwidth": 1e12,  # the copy is made while a request goes on; the pause is the same
        "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
        "horizon": MAX_TOKENS,
    }
    routing = placed.get(name, {"name": "jsq_load"})
    return Arm(routing, planners[name] | costs if name in planners else None)


def settings_of(arm: Arm, load: Sequence[LoadRequest]) -> dict[str, Any]:
    """Return what a result depends on, beside the code."""
    asked = json.dumps([asdict(request) for request in load])
    return {
        "engine": to_builtins(ENGINE),
        "routing": arm.routing,
        "migration": arm.migration,
        "requests": sha256(asked.encode()).hexdigest()[:16],
    }


def run_missing(out: Path, runs: Sequence[Run], requests: int, reserve: float) -> Machine:
    """Run what the folder does not have with these settings; each result is kept at once."""
    machine = read_machine(out)
    if machine is not None and not missing_of(out, runs, requests, reserve, machine):
        return machine
    deployment = patient(local_deployment("smollm2", ENGINE))
    with engines(deployment, out):
        if machine is None:
            machine = measure_machine(deployment, out, requests, MAX_TOKENS)
        missing = missing_of(out, runs, requests, reserve, machine)
        for number, run in enumerate(missing):
            shown = run_one(deployment, out, run, requests, reserve, machine)
            print(f"{number + 1}/{len(missing)} {run}: {shown}", file=sys.stderr, flush=True)
    return machine


def missing_of(
    out: Path, runs: Sequence[Run], requests: int, reserve: float, machine: Machine
) -> list[Run]:
    missing = []
    for run in runs:
        arm, load = arm_of(run.arm, machine, reserve), load_of(run, requests, machine)
        if run.cells(out, settings_of(arm, load)).read(run.arm) is None:
            missing.append(run)
    return missing


def load_of(run: Run, requests: int, machine: Machine) -> list[LoadRequest]:
    return round_load(run.round, requests, run.load * machine.capacity, MAX_TOKENS)


def run_one(
    deployment: Deployment, out: Path, run: Run, requests: int, reserve: float, machine: Machine
) -> dict[str, float]:
    arm, load = arm_of(run.arm, machine, reserve), load_of(run, requests, machine)
    serving = replace(deployment, routing=arm.routing, migration=arm.migration)
    salt = f"{run.load}-{run.round}-{run.arm}"
    result = asyncio.run(run_load(serving, out, load, salt, machine.patience)).result
    run.cells(out, settings_of(arm, load)).write(run.arm, result)
    names = ("seconds", "throughput", "tpot_p99", "ttft_p99", "gap_p99", "kv_use", "migrations")
    return {name: round(result[name], 3) for name in (*names, "preemptions", "failed")}


if __name__ == "__main__":
    main()
