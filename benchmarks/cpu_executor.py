"""What CPU engines gain from running their model in their own process.

    python -m benchmarks.cpu_executor [--quick] [--rounds N] [--json OUT]

Four engines of SmolLM2 on this machine: two with vLLM's multiprocessing executor, which its CPU
platform takes unless told otherwise, and two that run the model in the engine's own process, as
`headway launch` starts them. In each round first one engine of either kind serves a lone request,
and then both engines of a kind serve eight requests each, while the other kind rests: with the
multiprocessing executor an engine spins while its worker computes, on a core that the other
engine's worker needs. The order alternates. Ratios are paired by round, with 95% intervals.
"""

import asyncio
import math
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.support.live_load import round_load
from benchmarks.support.paired_rounds import mean_of, paired_difference
from benchmarks.support.report import arguments, write_report
from rescheduler.demo.demo_load import LoadRun, ServedRequest
from rescheduler.engines.deployment import EngineOptions, Instance
from rescheduler.engines.engine_command import IN_PROCESS
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment

ENGINE = EngineOptions(dtype="float32", max_model_len=640, enforce_eager=True)
EXECUTORS = {"multiprocessing": "mp", "in process": IN_PROCESS}
FIGURES = {"lone TPOT, ms": 1e3, "TPOT, ms": 1e3, "longest pause, s": 1.0, "tokens/s": 1.0}
REQUESTS, MAX_TOKENS = 8, 100

Values = dict[str, dict[str, dict[int, float]]]
"""By executor and figure, then by round."""


def main() -> None:
    """Serve the rounds, and print the table."""
    parser = arguments("what CPU engines gain from running their model in their own process")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: of one round there is no interval")
    deployment = local_deployment("smollm2", ENGINE, decode=4, prefill=0)
    kinds = {name: deployment.instances[2 * i : 2 * i + 2] for i, name in enumerate(EXECUTORS)}
    instances = [
        replace(instance, arguments=["--distributed-executor-backend", EXECUTORS[name]])
        for name, found in kinds.items()
        for instance in found
    ]
    values: Values = {name: defaultdict(dict) for name in kinds}
    with (
        tempfile.TemporaryDirectory() as folder,
        launched(replace(deployment, instances=instances), Path(folder)),
    ):
        for number in range(-1, options.rounds):  # the first one warms up
            for name in list(kinds)[:: 1 if number % 2 else -1]:
                found = asyncio.run(one_round(kinds[name], number))
                print(f"round {number}, {name}: {found}", flush=True)
                for figure, value in found.items():
                    if number >= 0:
                        values[name][figure][number] = value
    write_report("cpu_executor", printed(values), options.json)


async def one_round(instances: list[Instance], number: int) -> dict[str, float]:
    """Return the figures of one kind of engine in one round."""
    alone = await served(instances[:1], number, 1)
    together = await served(instances, number, REQUESTS)
    begin = min(one.sent for one in together)
    end = max(one.chunks[-1].time for one in together)
    return {
        "lone TPOT, ms": mean_tpot(alone),
        "TPOT, ms": mean_tpot(together),
        "longest pause, s": max(one.longest_gap for one in together),
        "tokens/s": sum(one.tokens for one in together) / (end - begin),
    }


async def served(instances: list[Instance], number: int, requests: int) -> list[ServedRequest]:
    """Send each instance its requests at once; return them when all have ended.

    Raises:
        RuntimeError: one failed.
    """
    runs = [
        LoadRun(
            instance.url,
            "smollm2",
            round_load(10 * (number + 1) + i, REQUESTS, math.inf, MAX_TOKENS)[:requests],
            salt=f"{number}-{requests}",
        )
        for i, instance in enumerate(instances)
    ]
    found = [one for run in await asyncio.gather(*(run.run() for run in runs)) for one in run]
    if failed := [one.error for one in found if one.error]:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return found


def mean_tpot(requests: list[ServedRequest]) -> float:
    """Return the mean TPOT, seconds."""
    return float(np.mean([one.tpot for one in requests if one.tpot is not None]))


def printed(values: Values) -> dict[str, float]:
    """Print the table, and return its figures."""
    figures: dict[str, float] = {}
    print(f"\n| | {' | '.join(values)} | ratio |\n|---|{'---:|' * (len(values) + 1)}")
    slow, quick = values.values()
    for name, scale in FIGURES.items():
        logs = [{i: math.log(value) for i, value in one[name].items()} for one in (quick, slow)]
        ratio = paired_difference(*logs)
        low, middle, high = (math.exp(ratio.mean + sign * ratio.half) for sign in (-1.0, 0.0, 1.0))
        means = {kind: mean_of(one[name]).mean for kind, one in values.items()}
        cells = [f"{scale * mean:.3g}" for mean in means.values()]
        print(f"| {name} | {' | '.join(cells)} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
        figures |= {f"{name}, {kind}": scale * mean for kind, mean in means.items()}
        figures |= {f"{name}, ratio": middle, f"{name}, ratio low": low}
        figures |= {f"{name}, ratio high": high}
    return figures


if __name__ == "__main__":
    main()
