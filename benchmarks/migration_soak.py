"""Many requests, moved at random, some abandoned, one instance killed: is every token right?

    python -m benchmarks.migration_soak [--quick] --json OUT

One prefill and two decode instances of SmolLM2 in float32, and the proxy. The requests differ in
sampling (greedy, seeded, penalties, grammar, chat) and length. Each is generated once in peace,
then again while random requests are moved to the other instance all the time, one in ten clients
leaves in the middle, and half-way one decode instance is killed and started again.

``lost``: requests without their end. ``changed``: those with a token other than in peace; what an
abandoned one got must be the beginning. ``leaked_blocks``: KV blocks that nothing holds and that
are not free at the end. All three must be 0.
"""

import asyncio
import random
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.support.report import arguments, report
from rescheduler.demo.demo_proxy import proxy_running
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_engines import Launched, launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.openai.event_stream import read_events
from rescheduler.placement.cluster_state import running_requests
from rescheduler.proxy.proxy import Proxy
from rescheduler.transfer.control_messages import ControlError

__all__ = ["Soaked", "soak"]

_ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=8,
    kv_blocks=192,
    enforce_eager=True,
)
_AT_ONCE = 6
_IDLE_SECONDS = 30.0
_TEXTS = (
    "Once upon a time, in a small village by the sea, there lived a",
    "The three most important inventions of the last century are",
    "A short history of the bicycle begins in",
    "Dear Sir or Madam, I am writing to you because",
)
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": 30},
    {"temperature": 1.0, "structured_outputs": {"regex": "([a-z]{2,9} ){30}[a-z]{2,9}"}},
)


@dataclass
class Soaked:
    """What came of a soak.

    Attributes:
        requests: asked for.
        moves: that ended at their target, by how the others ended.
        abandoned: clients that left.
        kills: instances killed.
        lost: requests without their end.
        changed: requests with another token than in peace.
        leaked_blocks: not free on idle instances at the end.
        seconds: with moves, without the reference.
    """

    requests: int
    moves: dict[str, int] = field(default_factory=dict)
    abandoned: int = 0
    kills: int = 0
    lost: int = 0
    changed: int = 0
    leaked_blocks: int = 0
    seconds: float = 0.0


def main() -> None:
    """Soak, and print."""
    options = arguments("moves at random, and what they change").parse_args()
    deployment = local_deployment("smollm2", _ENGINE)
    with (
        tempfile.TemporaryDirectory() as logs,
        launched(deployment, Path(logs)) as engines,
    ):
        result = asyncio.run(soak(engines, deployment, 20 if options.quick else 200))
    moved = {f"moves_{outcome}": count for outcome, count in sorted(result.moves.items())}
    figures = {name: value for name, value in vars(result).items() if name != "moves"}
    report("migration_soak", figures | moved, options.json)


async def soak(
    engines: Launched,
    deployment: Deployment,
    requests: int,
    seed: int = 1,
    seconds_between_moves: float = 0.25,
) -> Soaked:
    """Generate in peace, then among moves, and compare.

    Args:
        engines: of the deployment, running.
        deployment: without a planner: moves are made here.
        requests: how many.
        seed: of everything that is drawn.
        seconds_between_moves: a tenth of what a request takes, or less.
    """
    bodies = [_body(number) for number in range(requests)]
    generator = random.Random(seed)
    leaves = [generator.random() < 0.1 for _ in bodies]
    result = Soaked(requests, abandoned=sum(leaves))
    async with proxy_running(deployment) as proxy:
        expected = await _generate_all(deployment, bodies, [False] * requests, lambda done: None)
        killing: list[asyncio.Task[None]] = []

        def half_way(done: int) -> None:
            if done == requests // 2:
                result.kills += 1
                killing.append(asyncio.create_task(_kill_and_restart(engines)))

        started = time.monotonic()
        moving = asyncio.create_task(
            _move_at_random(proxy, result.moves, generator, seconds_between_moves)
        )
        answers = await _generate_all(deployment, bodies, leaves, half_way)
        result.seconds = time.monotonic() - started
        moving.cancel()
        await asyncio.gather(*killing)
        for answer, whole, left in zip(answers, expected, leaves, strict=True):
            result.lost += not (answer.ended or left) or not whole.ended
            given = whole.tokens[: len(answer.tokens)] if left else whole.tokens
            result.changed += answer.tokens != given
        result.leaked_blocks = await _leaked(proxy)
    return result


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


def _body(number: int) -> dict[str, Any]:
    """Return a request; its number decides all of it."""
    text = f"{number}. {_TEXTS[number % len(_TEXTS)]}"
    body = _SAMPLING[number % len(_SAMPLING)] | {
        "model": "smollm2",
        "max_tokens": 40 + number * 37 % 110,
        "seed": number,
        "stream": True,
        "return_token_ids": True,
    }
    if number % 4 == 3:
        return body | {"messages": [{"role": "user", "content": text}]}
    return body | {"prompt": text}


async def _generate_all(
    deployment: Deployment,
    bodies: list[dict[str, Any]],
    leaves: list[bool],
    ended: Any,
) -> list[_Answer]:
    """Generate all, a few at a time, in order."""
    at_a_time, done = asyncio.Semaphore(_AT_ONCE), 0

    async def one(session: aiohttp.ClientSession, body: dict[str, Any], leave: bool) -> _Answer:
        nonlocal done
        async with at_a_time:
            answer = _Answer()
            with suppress(aiohttp.ClientError):  # then it has no end, and counts as lost
                await _generate(session, deployment.proxy_url, body, leave, answer)
        done += 1
        ended(done)
        return answer

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        return await asyncio.gather(
            *(one(session, body, leave) for body, leave in zip(bodies, leaves, strict=True))
        )


async def _generate(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], leave: bool, answer: _Answer
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with session.post(url + path, json=body) as response:
        async for chunk in read_events(response.content):
            for choice in chunk.get("choices", []):
                answer.tokens += choice.get("token_ids") or []
                answer.ended |= choice.get("finish_reason") in ("stop", "length")
            if leave and len(answer.tokens) > body["max_tokens"] // 3:
                return


async def _move_at_random(
    proxy: Proxy, moves: dict[str, int], generator: random.Random, seconds: float
) -> None:
    """Move one running request after the other to another instance, forever."""
    decodes = [state for state in proxy.instances.values() if state.instance.role == "decode"]

    async def move() -> None:
        movable = [
            request for request in running_requests(proxy.placements, decodes) if request.can_move
        ]
        if not movable:
            return
        request = generator.choice(movable)
        targets = [one for one in decodes if one.available and one is not request.instance]
        if targets:
            outcome = await proxy.migrator.move(request, generator.choice(targets), "soak")
            moves[outcome] = moves.get(outcome, 0) + 1

    while True:
        await asyncio.sleep(seconds)
        proxy.background(move())


async def _kill_and_restart(engines: Launched) -> None:
    """Kill a decode instance, and start it again."""
    await asyncio.to_thread(engines.kill, "decode-1")
    await asyncio.sleep(2)
    await asyncio.to_thread(engines.restart, "decode-1")


async def _leaked(proxy: Proxy) -> int:
    """Return how many blocks are not free once leases have ended; all where none answers."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while True:
        leaked = 0
        for state in proxy.instances.values():
            if state.control is not None:
                blocks = state.engine.num_blocks if state.engine is not None else 1
                try:
                    engine = await state.control.state(5)
                    leaked += engine.num_blocks - engine.free_blocks
                except ControlError:
                    leaked += blocks
        if leaked == 0 or time.monotonic() > deadline:
            return leaked
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    main()
