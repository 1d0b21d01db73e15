"""How long a stream pauses when its request moves, with and without a copy beforehand.

    python -m benchmarks.migration_pause [--quick] [--emulate MACHINE] --json OUT

Two decode instances of SmolLM2 in float32 run 64 greedy requests whose contexts have 256 to about
2,000 tokens, slices of this project's own documentation. Each request moves once, to the instance
with fewer, and its client measures how long the next token takes. That is divided by the time of a
decode step: the median gap of the same stream just before and after. Requests move in three ways:

- pre-copy: what `headway serve` does. The target copies the blocks while the request decodes.
- stop and copy: the request is frozen first, and the target then pulls all of its blocks.
- recompute: the target gets the tokens alone, as from a source that has died.

With ``--emulate`` the engines are emulated ones, whose steps do not slow down for a move as those
of two cores do.

``tokens_changed``: streams in which a token differs from one way to another, each of which moves
the request after another token. A prefix cache never helps: each way has a ``cache_salt``.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmarks.support.deployments import engines, patient, until_idle
from benchmarks.support.report import arguments, report
from benchmarks.support.stream_client import PATH, session
from rescheduler.emulation.emulate_options import EmulateOptions
from rescheduler.emulation.scripted_answers import LENGTH, SEED
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_local import local_deployment
from rescheduler.openai.openai_stream import read_events
from rescheduler.placement.guarded_policy import running_requests
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.serve import load_tokenizer, proxy_running
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
    """An answer as it came: the monotonic seconds of each token, and its ids."""

    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    moved_at: int | None = None

    def has_enough(self) -> bool:
        """Whether it went on for as long as a step is measured."""
        after_move = 0 if self.moved_at is None else self.moved_at + _NEIGHBOURS
        return len(self.times) > min(_MOST_TOKENS - 1, after_move)

    def pause(self) -> tuple[float, float] | None:
        """Seconds of the pause at the move, and of a step; None if it did not move."""
        at = self.moved_at
        if at is None or at < 2 or at + 1 >= len(self.times):
            return None
        gaps = np.diff(self.times)  # gap i is before token i + 1
        before, after = gaps[max(0, at - 1 - _NEIGHBOURS) : at - 1], gaps[at : at + _NEIGHBOURS]
        return float(gaps[at - 1]), float(np.median(np.concatenate([before, after])))


def main() -> None:
    parser = arguments("the pause of a moved stream")
    parser.add_argument("--emulate", metavar="MACHINE", help="such as h100-llama-8b")
    parser.add_argument("--dilation", type=float, default=4.0, help="of emulated times (4)")
    options = parser.parse_args()
    requests = 12 if options.quick else 64
    engine = EngineOptions(
        dtype="float32",
        max_model_len=2_560,
        max_num_seqs=requests,
        kv_cache_gb=3,
        enforce_eager=True,
        emulate=options.emulate
        and EmulateOptions(profile=options.emulate, dilation=options.dilation),
    )
    # While prompts are prefilled on two cores, nobody gets a token or an answer.
    deployment = patient(local_deployment("smollm2", engine, prefill=0))
    with tempfile.TemporaryDirectory() as logs, engines(deployment, Path(logs)):
        report("migration_pause", asyncio.run(_measure(deployment, requests)), options.json)


async def _measure(deployment: Deployment, requests: int) -> dict[str, float]:
    prompts = _prompts(deployment, requests)
    figures: dict[str, float] = {"running": requests, "tokens_changed": 0}
    outcomes: Counter[str] = Counter()
    moved: list[list[_Stream]] = []
    for way in _WAYS:
        moved.append(await _round(deployment, prompts, way, outcomes))
        seconds, step = np.array([*filter(None, (one.pause() for one in moved[-1]))]).T
        suffix = "" if way == "pre_copy" else f"_{way}"
        figures[f"moves{suffix}"] = len(seconds)
        figures[f"step_ms{suffix}"] = 1e3 * float(np.median(step))
        for share in (50, 99):
            figures[f"pause_steps_p{share}{suffix}"] = float(np.percentile(seconds / step, share))
            figures[f"pause_ms_p{share}{suffix}"] = 1e3 * float(np.percentile(seconds, share))
        print(f"{way}: {len(seconds)} moves", flush=True)
    for streams in zip(*moved, strict=True):
        shortest = min(len(stream.ids) for stream in streams)
        figures["tokens_changed"] += len({tuple(one.ids[:shortest]) for one in streams}) > 1
    return figures | {f"outcome_{name}": count for name, count in sorted(outcomes.items())}


def _prompts(deployment: Deployment, count: int) -> list[list[int]]:
    generator = random.Random(1)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(_DOCS.glob("*.md")))
    tokenizer = load_tokenizer(deployment.model)
    assert tokenizer is not None
    ids = tokenizer.encode(pages).ids
    lengths = np.geomspace(_SHORTEST, _LONGEST, count).astype(int).tolist()
    starts = [generator.randrange(len(ids) - length) for length in lengths]
    prompts = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    generator.shuffle(prompts)
    return prompts


async def _round(
    deployment: Deployment, prompts: list[list[int]], way: str, outcomes: Counter[str]
) -> list[_Stream]:
    """Generate all at the same time, move each once, and end when all have moved."""
    streams = [_Stream() for _ in prompts]
    reading: list[asyncio.Task[None]] = []
    async with proxy_running(deployment) as proxy, _moving_by(proxy, way):
        async with session() as client:
            for i, prompt in enumerate(prompts):  # a step with all prompts would take minutes
                fields = {"model": "smollm2", "prompt": prompt, "max_tokens": _MOST_TOKENS}
                fields |= {"return_token_ids": True, "cache_salt": way}
                fields |= {"vllm_xargs": {LENGTH: 2 * _MOST_TOKENS, SEED: i}}  # where emulated
                headers = {"X-Request-Id": str(i)}
                read = _read_stream(client, deployment.proxy_url, fields, streams[i], headers)
                reading.append(asyncio.create_task(read))
                while sum(not stream.times for stream in streams[: i + 1]) >= _PREFILLS:
                    await _unless_ended(reading)
            while not all(len(stream.times) > _NEIGHBOURS for stream in streams):
                await _unless_ended(reading)
            todo = set(map(str, range(len(prompts))))
            await asyncio.gather(*(_move(proxy, streams, todo, outcomes) for _ in range(_MOVES)))
            while not all(stream.has_enough() for stream in streams):
                await _unless_ended(reading)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        await until_idle(deployment, inf)
    return streams


async def _read_stream(
    client: aiohttp.ClientSession,
    url: str,
    fields: dict[str, Any],
    stream: _Stream,
    headers: Mapping[str, str],
) -> None:
    """Have an answer generated to its full length, greedily, and keep it as it comes.

    Raises:
        RuntimeError: the server refuses it, or ends it before its last token.
    """
    body = {"ignore_eos": True, "temperature": 0, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    try:
        async with client.post(url + PATH, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise RuntimeError(f"{url}: HTTP {response.status}: {text}")
            async for chunk in read_events(response.content):
                if "error" in chunk:
                    raise RuntimeError(f"{url}: {chunk['error']}")
                tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
                stream.times += [time.monotonic()] * (tokens - len(stream.times))
                for choice in chunk.get("choices", ()):
                    stream.ids += choice.get("token_ids") or ()
    except aiohttp.ClientError as error:
        raise RuntimeError(f"{url}: {type(error).__name__}: {error}; see its log") from error
    if len(stream.times) < fields["max_tokens"]:
        raise RuntimeError(f"{url}: an answer ended after {len(stream.times)} tokens")


async def _unless_ended(reading: list[asyncio.Task[None]]) -> None:
    """Wait a little; raise what ended a stream."""
    await asyncio.sleep(0.1)
    for task in reading:
        if task.done():
            task.result()


@asynccontextmanager
async def _moving_by(proxy: Proxy, way: str) -> AsyncIterator[None]:
    """Let requests move in one of the ways."""
    kinds = {"stop_and_copy": _StopsAndCopies, "recompute": _Recomputes}
    own = {state: state.control for state in proxy.cluster.all}
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
    proxy: Proxy, streams: list[_Stream], todo: set[str], outcomes: Counter[str]
) -> None:
    """Move one after the other from the instance with more requests, until each has moved."""
    instances = list(proxy.cluster.all)
    while todo:
        crowded, free = sorted(instances, key=lambda one: -len(proxy.cluster.placements.on(one)))
        movable = [
            request
            for request in running_requests(proxy.cluster.placements, instances)
            if request.name in todo and request.can_move
        ]
        if not movable:
            return
        request = next((one for one in movable if one.instance is crowded), movable[0])
        todo.discard(request.name)
        target = free if request.instance is crowded else crowded
        outcome = (await proxy.migrator.move(request, target, "benchmark")).outcome
        outcomes[outcome] += 1
        stream = streams[int(request.name)]
        if outcome == "moved":
            stream.moved_at = request.generated_at_move


if __name__ == "__main__":
    main()
