"""What a live measurement finds out about its machine first, and goes by from then on."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.support.deployments import proxy
from benchmarks.support.live_runs import completed, round_load, run_load
from data_collection.atomic_file import write_text_atomically
from rescheduler.demo.demo_load import LoadRequest, LoadRun, ServedRequest
from rescheduler.engines.deployment import Deployment

_FILE = "machine.json"
_MEASURED_ROUND = 1_000_003  # whose requests no round has
_SHORT = "Write a story about a lighthouse keeper."
_LONG = _SHORT + " and then" * 180  # some 400 tokens
_RESERVE = {"name": "max_capacity", "reserve": 0.1}
_MOVING = {"name": "star", "prediction": False}


@dataclass(frozen=True)
class Machine:
    """How fast the deployment is on this machine; times are seconds."""

    alone_ttft: float  # of a request that is alone
    alone_tpot: float
    prefill_cost: float  # time of a prompt's token, as a part of a further token's
    capacity: float  # requests a second of a load at once, a tenth of each KV cache kept free
    step_seconds: float  # mean time between two tokens of a request meanwhile
    pause: float  # mean time that a moved request's stream pauses under such a load
    copying: float  # mean time of the copy made before, while the request goes on

    @property
    def patience(self) -> float:
        """Seconds without any token after which something hangs."""
        return 100 * self.alone_ttft + 1_000 * self.alone_tpot


def read_machine(folder: Path) -> Machine | None:
    kept = folder / _FILE
    if not kept.is_file():
        return None
    try:
        return msgspec.json.decode(kept.read_bytes(), type=Machine)
    except msgspec.DecodeError as error:
        raise ValueError(f"{kept}: damaged, remove it to measure anew: {error}") from error


def measure_machine(
    deployment: Deployment, folder: Path, requests: int, max_tokens: int
) -> Machine:
    machine = asyncio.run(_measure(deployment, folder, requests, max_tokens))
    write_text_atomically(folder / _FILE, json.dumps(asdict(machine), indent=1) + "\n")
    print(f"measured: {machine}", file=sys.stderr, flush=True)
    return machine


def served_rate(served: Sequence[ServedRequest]) -> float:
    r"""Return the requests a second that a saturated deployment serves.

    .. math:: \frac{0.6 \sum_i o_i}{t_{0.8} - t_{0.2}} \Big/ \frac1n \sum_i o_i

    with o tokens of a request and t the times by which a fifth and four fifths of all tokens had
    come: neither the beginning, when caches fill, nor the end, when they empty, counts.
    """
    times = []
    for one in served:
        before = 0
        for piece in one.chunks:
            times += [piece.time] * (piece.tokens - before)
            before = piece.tokens
    begin, end = np.quantile(times, [0.2, 0.8])
    return float(0.6 * len(served) / (end - begin))


async def _measure(deployment: Deployment, folder: Path, requests: int, max_tokens: int) -> Machine:
    alone = await _alone(deployment, folder, _SHORT)
    ttft = float(np.mean([one.ttft for one in alone]))
    tpot = float(np.mean([one.tpot for one in alone]))
    prefilled = await _alone(deployment, folder, _LONG)
    longer = prefilled[0].prompt_tokens - alone[0].prompt_tokens
    prefill_cost = (float(np.mean([one.ttft for one in prefilled])) - ttft) / longer / tpot
    patience = Machine(ttft, tpot, 0.0, 0.0, 0.0, 0.0, 0.0).patience
    reserved = replace(deployment, routing=_RESERVE, migration=None)
    at_once = round_load(_MEASURED_ROUND, requests, inf, max_tokens)
    overload = await run_load(reserved, folder, at_once, "capacity", patience)
    capacity = served_rate(overload.served)
    steps = [one.tpot for one in overload.served if one.tpot is not None]
    moving = replace(deployment, routing={"name": "round_robin"}, migration=_MOVING)
    load = round_load(_MEASURED_ROUND, requests, 0.8 * capacity, max_tokens)
    moved = await run_load(moving, folder, load, "moves", patience)
    return Machine(
        ttft,
        tpot,
        max(prefill_cost, 1e-4),
        capacity,
        float(np.median(steps)),
        moved.pause,
        moved.copying,
    )


async def _alone(deployment: Deployment, folder: Path, text: str) -> list[ServedRequest]:
    """Return requests that had the engines to themselves, one after the other."""
    served: list[ServedRequest] = []
    with proxy(replace(deployment, migration=None), folder) as server:
        for i in range(6):
            load = [LoadRequest(f"alone-{i}", text, 60, i, 0.0)]
            salt = f"alone-{len(text)}-{i}"  # a prompt in the prefix cache takes no time
            run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt=salt)
            served += await completed(run, inf, server)
    return served[2:]  # the first two shake hands with the prefill engine
