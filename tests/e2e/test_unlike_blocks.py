"""An engine that is asked directly to read a KV cache of another layout computes it again."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from moving import GREEDY, PATIENCE, Engine, Generation, copied_ahead, engines_of, moved
from msgspec.structs import replace
from running_deployment import ENGINE, complete

from rescheduler.engines.launch_engines import Launched, launched
from rescheduler.engines.launch_local import local_deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LARGER_BLOCKS = ["--block-size", "64"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A prefill and two decode engines, one of them with larger blocks."""
    described = local_deployment("smollm2", replace(ENGINE, checkpoint=None))
    prefill, first, second = described.instances
    instances = [prefill, first, replace(second, arguments=LARGER_BLOCKS)]
    described = replace(described, instances=instances)
    with launched(described, tmp_path_factory.mktemp("unlike")) as launch:
        yield launch


@pytest.fixture
async def engines(running: Launched) -> AsyncIterator[list[Engine]]:
    async with engines_of(running.deployment.decode) as connected:
        yield connected


def log_of(running: Launched) -> str:
    return (running.logs / "decode-1.log").read_text()


async def failed_loads(engine: Engine) -> int:
    return (await engine.control.state(PATIENCE)).failed_loads


async def test_a_running_request_is_computed_again(
    running: Launched, engines: list[Engine]
) -> None:
    body = GREEDY | {"max_tokens": 200}
    stays, goes = [await moved(engines, body, cuts) for cuts in ([], [90])]
    assert goes.hops == 1, "moved before its end"
    assert goes.tokens == stays.tokens
    assert await failed_loads(engines[1]) == 1
    assert "computed again, since its KV cache has block_size 32 and not 64" in log_of(running)


async def test_a_copy_is_computed_again(engines: list[Engine]) -> None:
    before = await failed_loads(engines[1])
    made = await copied_ahead(engines[0], engines[1], GREEDY | {"max_tokens": 200}, cut=90)
    assert made.before.get("external_kv_transfer", 0) == 0
    assert await failed_loads(engines[1]) == before + 1


async def test_a_prefill_is_computed_again(running: Launched, engines: list[Engine]) -> None:
    (prefill,) = running.deployment.prefill

    async def answer(engine: Engine, params: dict[str, Any]) -> Generation:
        generation = Generation()
        sent = {**body, "model": "smollm2", "stream": True, "return_token_ids": True}
        async for chunk in engine.stream("/v1/completions", sent | {"kv_transfer_params": params}):
            generation.take(chunk)
        return generation

    body = GREEDY | {"prompt": "The sea was calm. " * 40}

    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    sent = {**body, "max_tokens": 1, "kv_transfer_params": asked}
    params = (await asyncio.to_thread(complete, prefill, **sent))["kv_transfer_params"]
    counts = [await failed_loads(engine) for engine in engines]
    answers = [await answer(engine, params) for engine in reversed(engines)]
    assert answers[0].tokens == answers[1].tokens
    assert [await failed_loads(engine) for engine in engines] == [counts[0], counts[1] + 1]
    given = await engines[0].prompt_tokens()
    assert given.get("external_kv_transfer", 0) > 0, "an engine like it reads it"
