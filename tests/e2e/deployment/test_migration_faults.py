"""What happens to a moved request when an engine is full, dies or hangs in the middle."""

import asyncio
import signal
from typing import Any

import pytest
from moving import (
    GREEDY,
    PATIENCE,
    STORY,
    Engine,
    Generation,
    finish,
    idle_state,
    moved,
    place,
    until_frozen,
)
from running_deployment import RunningDeployment

BODY = GREEDY | {"prompt": f"Again. {STORY * 8}", "temperature": 1.0, "seed": 17}  # 8 blocks
SOURCE = "decode-0"


async def hangs(
    engine: Engine, generation: Generation, params: dict[str, Any], seconds: float = 3.0
) -> bool:
    """Hand a request over, and give it up if no token comes."""
    path, sent = place(BODY, generation, params, 1, False)
    try:
        async with asyncio.timeout(seconds):
            async for _ in engine.stream(path, sent):
                return False
    except TimeoutError:
        return True
    raise AssertionError("the stream ended without a token")


@pytest.mark.slow
async def test_a_full_target_is_given_up_and_the_source_goes_on(engines: list[Engine]) -> None:
    """The request would wait there, and its heartbeats keep the source's blocks."""
    source, target = engines
    body = BODY | {"prompt": "Full. " + STORY * 26}  # 13 blocks, none of them cached
    plain = await moved(engines, body, [])
    blocks = (await target.control.state(PATIENCE)).num_blocks
    words = "one two " * ((blocks // 3 - 3) * 16)  # three blocks remain for each answer
    # Three fill it; three more come before the request and fill it once again, for as long
    # as it may take to get there.
    fillers = [GREEDY | {"prompt": f"{n} {words}", "max_tokens": 90} for n in range(6)]
    filling = [asyncio.create_task(moved([target], filler, [])) for filler in fillers]
    while (await target.control.state(PATIENCE)).free_blocks > 11:
        assert not any(filler.done() for filler in filling), "never full"
        await asyncio.sleep(0.01)
    frozen = await until_frozen(source, body)
    assert await hangs(target, frozen, frozen.params, 1.5)
    state = await idle_state(source)  # given up at the target, it is free here
    assert state.free_blocks == state.num_blocks
    await finish(source, body, frozen, {}, 2)
    assert frozen.tokens == plain.tokens
    await asyncio.gather(*filling)


async def test_a_source_that_hangs_is_given_up(
    engines: list[Engine], deployment: RunningDeployment
) -> None:
    """The target waits for blocks that do not come; asked again without them, it computes."""
    source, target = engines
    plain = await moved(engines, BODY, [])
    frozen = await until_frozen(source, BODY)
    deployment.launched.signal(SOURCE, signal.SIGSTOP)
    try:
        assert await hangs(target, frozen, frozen.params)
        await finish(target, BODY, frozen, {}, 2)
    finally:
        deployment.launched.signal(SOURCE, signal.SIGCONT)
    assert frozen.tokens == plain.tokens


@pytest.mark.slow
async def test_an_engine_that_dies_costs_a_computation_at_most(
    engines: list[Engine], deployment: RunningDeployment
) -> None:
    """The source of a request that another engine goes on with, and the target of another one."""
    survivor, dying = engines
    plain = await moved(engines, BODY, [])
    from_it, to_it = await until_frozen(dying, BODY), await until_frozen(survivor, BODY)
    await asyncio.to_thread(deployment.launched.kill, "decode-1")
    with pytest.raises(OSError):
        await finish(dying, BODY, to_it, to_it.params, 1)
    before = await survivor.prompt_tokens()
    await finish(survivor, BODY, from_it, from_it.params, 1)
    after = await survivor.prompt_tokens()
    assert from_it.tokens == plain.tokens
    assert after["local_compute"] - before.get("local_compute", 0) > 1
    await finish(survivor, BODY, to_it, {}, 2)
    assert to_it.tokens == plain.tokens
    await survivor.control.release(to_it.id, 0, PATIENCE)  # unless it has expired
    await asyncio.to_thread(deployment.launched.restart, "decode-1")
