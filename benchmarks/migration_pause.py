"""How long a stream pauses when its request moves, with and without a copy beforehand.

    python -m benchmarks.migration_pause [--quick] --json OUT

Two decode instances of SmolLM2 in float32 run 64 greedy requests whose contexts have 256 to about
2,000 tokens, slices of this project's own documentation. Each request moves once, to the instance
with fewer, and its client measures how long the next token takes. That is divided by the time of a
decode step: the median gap of the same stream just before and after. Requests move in three ways:

- pre-copy: what `headway serve` does. The target copies the blocks while the request decodes.
- stop and copy: the request is frozen first, and the target then pulls all of its blocks.
- recompute: the target gets the tokens alone, as from a source that has died.

``tokens_changed``: streams in which a token differs from one way to another, each of which moves
the request after another token. A prefix cache never helps: each way has a ``cache_salt``.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmarks.support.report import arguments, report
from rescheduler.demo.demo import proxy_running
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.openai.event_stream import read_events
from rescheduler.placement.cluster_state import running_requests
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.serve import load_tokenizer
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import Frozen, NotFrozenError, Snapshot

_DOCS = Path(__file__).parents[1] / "docs"
_SHORTEST, _LONGEST = 256, 1_900  # prompts; the context grows until the move
_MOST_TOKENS = 600
_PREFILLS = 4  # at a time
_MOVES = 2  # at a time
_NEIGHBOURS = 8
"""Gaps on each side of a move whose median is the time of a step."""
_WAYS = ("pre_copy", "stop_and_copy", "recompute")


class _StopsAndCopies(ControlClient):
    """Gives no snapshots, so that nothing is copied before the freeze."""

    async def snapshot(self, id: str, timeout: float) -> Snapshot:
        raise NotFrozenError("not in this benchmark")


class _Recomputes(_StopsAndCopies):
    """Gives no KV cache away either."""

    async def freeze(self, id: str, hop: int, timeout: float) -> Frozen:
        frozen = await super().freeze(id, hop, timeout)
        await self.release(id, hop, timeout)
        return msgspec.structs.replace(frozen, params={})


@dataclass
class _Stream:
    """What a client read, and when."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    moved_at: int | None = None

    def has_enough(self) -> bool:
        """Whether it went on for as long as a step is measured."""
        after_move = 0 if self.moved_at is None else self.moved_at + _NEIGHBOURS
        return len(self.tokens) > min(_MOST_TOKENS - 1, after_move)

    def pause(self) -> tuple[float, float] | None:
        """Seconds of the pause at the move, and of a step; None if it did not move."""
        at = self.moved_at
        if at is None or at < 2 or at + 1 >= len(self.times):
            return None
        gaps = np.diff(self.times)  # gap i is before token i + 1
        before, after = gaps[max(0, at - 1 - _NEIGHBOURS) : at - 1], gaps[at : at + _NEIGHBOURS]
        return float(gaps[at - 1]), float(np.median(np.concatenate([before, after])))


def main() -> None:
    """Measure and print."""
    options = arguments("the pause of a moved stream").parse_args()
    requests, rounds = (12, 1) if options.quick else (64, 1)
    engine = EngineOptions(
        dtype="float32",
        max_model_len=2_560,
        max_num_seqs=requests,
        kv_cache_gb=3,
        enforce_eager=True,
    )
    deployment = local_deployment("smollm2", engine, prefill=0)
    # While prompts are prefilled on two cores, nobody gets a token or an answer.
    patient = msgspec.structs.replace(
        deployment.proxy,
        first_token_seconds=1800,
        token_seconds=1800,
        freeze_seconds=120,
        control_seconds=120,
        moved_token_seconds=120,
    )
    deployment = msgspec.structs.replace(deployment, proxy=patient)
    with tempfile.TemporaryDirectory() as logs, launched(deployment, Path(logs)):
        report("migration_pause", asyncio.run(_measure(deployment, requests, rounds)), options.json)


async def _measure(deployment: Deployment, requests: int, rounds: int) -> dict[str, float]:
    pauses: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
    outcomes: dict[str, int] = {}
    changed = 0
    generator = random.Random(1)
    for number in range(rounds):
        prompts = _prompts(deployment, requests, generator)
        moved: list[list[_Stream]] = []
        for way in _WAYS:
            moved.append(await _round(deployment, prompts, f"{number} {way}", way, outcomes))
            pauses[way] += filter(None, (stream.pause() for stream in moved[-1]))
            steps = [seconds / step for seconds, step in pauses[way]]
            print(
                f"round {number + 1} of {rounds}, {way}: {len(steps)} moves, "
                f"pause {np.median(steps):.2f} steps in the median, {max(steps):.2f} at most",
                flush=True,
            )
        for streams in zip(*moved, strict=True):
            shortest = min(len(stream.tokens) for stream in streams)
            changed += len({tuple(stream.tokens[:shortest]) for stream in streams}) > 1
    figures: dict[str, float] = {"running": requests, "tokens_changed": changed}
    for way in _WAYS:
        suffix = "" if way == "pre_copy" else f"_{way}"
        seconds, step = np.array(pauses[way]).T
        figures[f"moves{suffix}"] = len(seconds)
        figures[f"step_ms{suffix}"] = 1e3 * float(np.median(step))
        for share in (50, 99):
            figures[f"pause_steps_p{share}{suffix}"] = float(np.percentile(seconds / step, share))
            figures[f"pause_ms_p{share}{suffix}"] = 1e3 * float(np.percentile(seconds, share))
    return figures | {f"outcome_{name}": count for name, count in sorted(outcomes.items())}


def _prompts(deployment: Deployment, count: int, generator: random.Random) -> list[list[int]]:
    """Slices of the documentation, as token ids."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(_DOCS.glob("*.md")))
    ids = load_tokenizer(deployment.model).encode(pages).ids
    lengths = np.geomspace(_SHORTEST, _LONGEST, count).astype(int).tolist()
    starts = [generator.randrange(len(ids) - length) for length in lengths]
    prompts = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    generator.shuffle(prompts)
    return prompts


async def _round(
    deployment: Deployment,
    prompts: list[list[int]],
    salt: str,
    way: str,
    outcomes: dict[str, int],
) -> list[_Stream]:
    """Generate all at the same time, move each once, and end when all have moved."""
    streams = [_Stream() for _ in prompts]
    async with proxy_running(deployment) as proxy, _moving_by(proxy, way):
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            reading: list[asyncio.Task[None]] = []
            for i, prompt in enumerate(prompts):  # a step with all prompts would take minutes
                reading.append(
                    asyncio.create_task(
                        _read(session, deployment, str(i), prompt, salt, streams[i])
                    )
                )
                while sum(not stream.tokens for stream in streams[: i + 1]) >= _PREFILLS:
                    await _unless_ended(reading)
            while not all(len(stream.tokens) > _NEIGHBOURS for stream in streams):
                await _unless_ended(reading)
            todo = set(map(str, range(len(prompts))))
            workers = (_move(proxy, streams, todo, outcomes) for _ in range(_MOVES))
            await asyncio.gather(*workers)
            while not all(stream.has_enough() for stream in streams):
                await _unless_ended(reading)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        await _until_idle(proxy)
    return streams


async def _unless_ended(reading: list[asyncio.Task[None]]) -> None:
    """Wait a little; raise what ended a stream."""
    await asyncio.sleep(0.1)
    for task in reading:
        if task.done():
            task.result()


async def _until_idle(proxy: Proxy) -> None:
    """Wait until the engines have ended what their clients have left."""
    for state in proxy.instances.values():
        assert state.control is not None
        while (engine := await state.control.state(30.0)).free_blocks < engine.num_blocks:
            await asyncio.sleep(0.2)


async def _read(
    session: aiohttp.ClientSession,
    deployment: Deployment,
    name: str,
    prompt: list[int],
    salt: str,
    stream: _Stream,
) -> None:
    body: dict[str, Any] = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": _MOST_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    url, headers = deployment.proxy_url + "/v1/completions", {"X-Request-Id": name}
    async with session.post(url, json=body, headers=headers) as response:
        response.raise_for_status()
        async for chunk in read_events(response.content):
            for choice in chunk.get("choices", []):
                for token in choice.get("token_ids") or []:
                    stream.tokens.append(token)
                    stream.times.append(time.monotonic())


@asynccontextmanager
async def _moving_by(proxy: Proxy, way: str) -> AsyncIterator[None]:
    """Let requests move in one of the ways."""
    kinds = {"stop_and_copy": _StopsAndCopies, "recompute": _Recomputes}
    own = {state: state.control for state in proxy.instances.values()}
    others: list[ControlClient] = []
    try:
        for state in own:
            if way in kinds:
                state.control = kinds[way](str(state.instance.control))
                others.append(state.control)
        yield
    finally:
        for state, control in own.items():
            state.control = control
        for other in others:
            other.close()


async def _move(
    proxy: Proxy, streams: list[_Stream], todo: set[str], outcomes: dict[str, int]
) -> None:
    """Move one after the other from the instance with more requests, until each has moved."""
    instances = list(proxy.instances.values())
    while todo:
        crowded, free = sorted(instances, key=lambda one: -len(proxy.placements.on(one)))
        movable = [
            request
            for request in running_requests(proxy.placements, instances)
            if request.name in todo and request.can_move
        ]
        if not movable:
            return
        request = next((one for one in movable if one.instance is crowded), movable[0])
        todo.discard(request.name)
        target = free if request.instance is crowded else crowded
        outcome = (await proxy.migrator.move(request, target, "benchmark")).outcome
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        stream = streams[int(request.name)]
        if outcome == "moved":
            stream.moved_at = request.generated_at_move


if __name__ == "__main__":
    main()
