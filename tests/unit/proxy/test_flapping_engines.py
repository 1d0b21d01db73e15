"""Engines that come and go, hundreds of times, while they are asked."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from scripted_cluster import PROMPT, Cluster, cluster, tokens_of, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

FLAPS = 200
RESTARTS = 10
TOKENS = 12
KINDS: tuple[dict[str, Any], ...] = ({"stream": True}, {}, {"n": 2}, {"n": 2, "stream": True})
UNUSED_SECONDS = 4.0  # for longer than connections are kept
HONEST = (200, 429, 502, 503)


def held() -> tuple[int, int]:
    """Tasks and open files."""
    return len(asyncio.all_tasks()), len(list(Path("/proc/self/fd").iterdir()))


async def asked(it: Cluster, session: aiohttp.ClientSession, kind: dict[str, Any]) -> str:
    """Ask once; return how that ended."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "return_token_ids": True, **kind}
    async with session.post(it.url + "/v1/completions", json=body) as response:
        told = await response.read()  # raises if it is cut
    if response.status != 200:
        assert response.status in HONEST, told
        assert "error" in json.loads(told)
        return "refused"
    if not kind.get("stream"):
        choices = json.loads(told)["choices"]
        assert len(choices) == kind.get("n", 1)
        if "n" not in kind:
            assert choices[0]["token_ids"] == it.expected(TOKENS)
        return "ok"
    assert told.endswith(b"data: [DONE]\n\n"), told[-200:]
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: {")]
    failed = any("error" in one for one in events)
    tokens = tokens_of(events)
    if "n" not in kind:
        assert tokens == it.expected(TOKENS)[: len(tokens)]
        assert failed or len(tokens) == TOKENS
    return "failed" if failed else "ok"


async def flapped(engine: ScriptedEngine, generator: random.Random) -> None:
    """Vanish from HTTP for a moment, and come back."""
    await engine.stop_http()
    await asyncio.sleep(generator.uniform(0.0, 0.02))
    await engine.start_http()
    await asyncio.sleep(generator.uniform(0.0, 0.04))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
async def test_requests_end_well_or_honestly_and_nothing_is_left(
    tokenizer: Tokenizer, whole: bool
) -> None:
    """Either their HTTP comes and goes, or the engines do, control sockets and all."""
    generator, outcomes, flapping = random.Random(0), Counter[str](), True
    async with cluster(
        tokenizer,
        prefix_caching=False,
        control_seconds=1.0,
        probe_seconds=10.0,  # else probes keep connections in use
    ) as it:

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                while flapping:
                    outcomes[await asked(it, session, generator.choice(KINDS))] += 1

        for kind in KINDS:
            assert await asked(it, it.session, kind) == "ok"
        await asyncio.sleep(UNUSED_SECONDS)
        before = held()
        asking = [asyncio.create_task(ask()) for _ in range(6)]
        for _ in range(RESTARTS if whole else FLAPS):
            engine = generator.choice(list(it.engines.values()))
            if whole:
                await engine.stop()
                await asyncio.sleep(generator.uniform(0.0, 0.1))
                await engine.start()
                await asyncio.sleep(generator.uniform(0.0, 0.3))
            else:
                await flapped(engine, generator)
            for task in asking:
                if task.done():
                    task.result()
        flapping = False
        await asyncio.gather(*asking)
        for engine in it.engines.values():  # what it kept died with it, or is released by now
            engine.kept.clear()
        await it.idle()
        await until(lambda: all(one.breaker.closed for one in it.proxy.cluster.all))
        assert outcomes["ok"] > 0
        for kind in KINDS:
            assert await asked(it, it.session, kind) == "ok"
        assert not any(one.control and one.control._asked for one in it.proxy.cluster.all)
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
