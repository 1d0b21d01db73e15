"""Requests move between two real decode engines, and no token of theirs changes."""

import asyncio
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from move_cases import CASES, Compared, assert_unchanged, there_and_back
from moving import (
    GREEDY,
    PATIENCE,
    STORY,
    Engine,
    Generation,
    copied_ahead,
    finish,
    idle_state,
    moved,
    place,
    runner_on,
    until_frozen,
)
from running_deployment import RunningDeployment

from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import ControlError, NotFrozenError


@pytest.fixture(scope="module")
def compared(deployment: RunningDeployment) -> Compared:
    return runner_on(deployment.deployment.decode)(there_and_back)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_a_request_goes_there_and_back_unchanged(compared: Compared, name: str) -> None:
    assert_unchanged(compared, name, CASES[name])


@pytest.mark.slow
async def test_a_cut_may_fall_anywhere_in_a_block(engines: list[Engine]) -> None:
    """Most offsets of the cut in a block of 32 tokens, both sides of its end among them."""

    async def cut(engines: list[Engine], length: int) -> list[Generation]:
        body = GREEDY | {"prompt": STORY + " very" * length, "max_tokens": 80}
        moves = (moved(engines, body, range(start, 72, 6)) for start in (1, 3, 5))
        return await asyncio.gather(moved(engines, body, []), *moves)

    offsets: set[int] = set()
    for length in range(1, 41, 2):
        both = (cut(engines, length), cut(engines, length + 1))
        for plain, *others in await asyncio.gather(*both):
            for generation in others:
                assert generation.tokens == plain.tokens
                offsets |= {(len(plain.prompt) + at) % 32 for at in generation.cut_at}
        if len(offsets) >= 24 and {31, 0, 1} <= offsets:
            return
    raise AssertionError(f"offsets never met: {sorted(set(range(32)) - offsets)}")


async def test_the_target_computes_one_token_and_pulls_the_others(engines: list[Engine]) -> None:
    before = await engines[1].prompt_tokens()
    body = GREEDY | {"prompt": STORY * 6 + " fox", "max_tokens": 150}  # moved before its end
    generation = await moved(engines, body, [20])
    after = await engines[1].prompt_tokens()
    given = {source: after[source] - before.get(source, 0) for source in after}
    context = len(generation.prompt) + generation.cut_at[0]
    assert given["local_compute"] == 1
    assert sum(given.values()) == context
    assert given["external_kv_transfer"] > 0


async def test_a_copy_leaves_only_the_tail_to_compute(engines: list[Engine]) -> None:
    # The source has more to generate than it can while the target warms up.
    body = GREEDY | {"prompt": STORY * 9 + " snapshot", "max_tokens": 700}
    source, target = engines
    body, generation, copied, frozen, before = await copied_ahead(source, target, body)
    assert copied % 32 == 0 and copied >= len(generation.prompt) - 31
    tail = len(generation.prompt) + len(generation.tokens) - copied
    body["max_tokens"] = len(generation.tokens) + 12
    await finish(target, body, generation, frozen.params, 1)
    after = await target.prompt_tokens()
    plain = await moved(engines, body, [])
    assert generation.tokens == plain.tokens
    pulled = after["external_kv_transfer"] - before["external_kv_transfer"]
    assert pulled <= (tail if tail > 64 else 0)  # below, it is sooner computed
    assert after["local_cache_hit"] - before.get("local_cache_hit", 0) == copied


async def test_a_snapshot_that_nobody_reads_is_freed(engines: list[Engine]) -> None:
    generation = Generation()
    path, sent = place(GREEDY | {"prompt": STORY * 4}, generation, {}, 0, False)
    asked = False
    async for chunk in engines[0].stream(path, sent):
        generation.take(chunk)
        if generation.tokens and not asked:
            asked = True
            await engines[0].control.snapshot(generation.id, PATIENCE)
    assert len(generation.tokens) == 48


async def test_recomputing_elsewhere_gives_the_same_tokens(engines: list[Engine]) -> None:
    """What happens when the source has died: the target gets the tokens and no KV cache."""
    body = GREEDY | {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5}
    plain = await moved(engines, body, [])
    generation = Generation()
    path, sent = place(body, generation, {}, 0, False)
    async for chunk in engines[0].stream(path, sent):
        generation.take(chunk)
        if len(generation.tokens) >= 13:
            break
    await finish(engines[1], body, generation, {}, 1)
    assert generation.tokens == plain.tokens


async def test_an_unfrozen_request_goes_on_where_it_is(engines: list[Engine]) -> None:
    plain = await moved(engines, GREEDY, [])
    generation, freezing, undone = Generation(), None, False
    path, sent = place(GREEDY, generation, {}, 0, False)
    async for chunk in engines[0].stream(path, sent):
        generation.take(chunk)
        if len(generation.tokens) >= 5 and freezing is None:
            freezing = asyncio.create_task(engines[0].control.freeze(generation.id, 0, PATIENCE))
            await asyncio.sleep(0)
            undone = await engines[0].control.unfreeze(generation.id, PATIENCE)
    assert freezing is not None
    try:
        frozen = await freezing
    except NotFrozenError as error:
        assert undone == ("unfrozen" in str(error))
    else:  # its last token came first
        assert not undone
        await finish(engines[0], GREEDY, generation, frozen.params, 1)
    assert generation.tokens == plain.tokens


async def test_what_is_kept_is_released_on_demand(engines: list[Engine]) -> None:
    generation = await until_frozen(engines[0])
    state = await engines[0].control.state(PATIENCE)
    assert state.frozen == [generation.id] and state.free_blocks < state.num_blocks
    assert await engines[0].control.release(generation.id, 0, PATIENCE) is True
    assert (await idle_state(engines[0])).free_blocks == state.num_blocks
    assert await engines[0].control.release(generation.id, 0, PATIENCE) is False


@pytest.mark.parametrize("when", ["kept", "running", "on its way"])
async def test_a_prefill_that_nobody_decodes_is_released(
    deployment: RunningDeployment, when: str
) -> None:
    """As when its client leaves; the next attempt at the same request is spared."""
    (prefill,) = deployment.deployment.prefill

    async def ask(session: aiohttp.ClientSession, id: str, hop: int) -> None:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = GREEDY | {"model": "smollm2", "prompt": f"{id}. " + STORY * 40, "max_tokens": 1}
        body["kv_transfer_params"] = params | {"headway": {"id": id, "hop": hop}}
        async with session.post(prefill.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()

    async def release_while_running(
        session: aiohttp.ClientSession, control: ControlClient, id: str
    ) -> bool:
        """Return whether the request was seen in the batch; a fast engine may be done before."""
        asking = asyncio.create_task(ask(session, id, 0))
        seen = False
        while not asking.done() and not seen:
            seen = bool((await control.state(PATIENCE)).running)
        await control.release(id, 0, PATIENCE)
        await asking
        return seen

    async def left(session: aiohttp.ClientSession, control: ControlClient) -> str:
        """Leave a prefill: its request's id."""
        id = f"left {when}"
        if when == "running":
            for attempt in range(100):
                if await release_while_running(session, control, f"{id} {attempt}"):
                    return f"{id} {attempt}"
                await freed(control)
            raise AssertionError("no prefill was ever seen running")
        if when == "on its way":
            assert await control.release(id, 0, PATIENCE) is False
        await ask(session, id, 0)
        if when == "kept":
            assert (await control.state(PATIENCE)).frozen == [id]
            assert await control.release(id, 0, PATIENCE) is True
        return id

    async def freed(control: ControlClient) -> None:
        async with asyncio.timeout(20):  # a lease takes 30 s
            while (state := await control.state(PATIENCE)).free_blocks < state.num_blocks:
                await asyncio.sleep(0.05)
        assert state.frozen == []

    with closing(ControlClient(str(prefill.control))) as control:
        async with aiohttp.ClientSession() as session:
            id = await left(session, control)
            await freed(control)
            await ask(session, id, 1)
            assert (await control.state(PATIENCE)).frozen == [id]
            assert await control.release(id, 1, PATIENCE) is True
            await freed(control)


@pytest.mark.slow
async def test_what_is_kept_expires_and_is_not_read_then(engines: list[Engine]) -> None:
    """Clients that left after the freeze, and a target that comes too late.

    Blocks past their time may hold another request: the target computes them anew.
    """
    plain = await moved(engines, GREEDY, [])
    left, late = await asyncio.gather(until_frozen(engines[0]), until_frozen(engines[0]))
    frozen = (await engines[0].control.state(PATIENCE)).frozen
    assert set(frozen) == {left.id, late.id}
    await asyncio.sleep(11)  # reads stop 5 s before the 15 s are over
    before = await engines[1].prompt_tokens()
    await finish(engines[1], GREEDY, late, late.params, 1)
    after = await engines[1].prompt_tokens()
    assert late.tokens == plain.tokens
    assert after["local_compute"] - before.get("local_compute", 0) > 1
    state = await idle_state(engines[0])
    assert state.free_blocks == state.num_blocks


@pytest.mark.parametrize(
    "ending", [{"max_tokens": 10}, {"stop": [" village"]}, {"prompt": "Yes or no? Answer:"}]
)
async def test_a_freeze_that_meets_the_end_moves_nothing_or_all(
    engines: list[Engine], ending: dict[str, Any]
) -> None:
    """By max_tokens, by a stop string, by EOS: at each distance from the end."""
    body = GREEDY | {"ignore_eos": False, "max_tokens": 40} | ending
    plain = await moved(engines, body, [])
    cuts = [max(1, len(plain.tokens) - early) for early in range(5)]
    for generation in await asyncio.gather(*(moved(engines, body, [cut]) for cut in cuts)):
        assert generation.tokens == plain.tokens
        assert generation.finish_reason == plain.finish_reason


async def test_a_client_that_leaves_during_a_freeze_frees_everything(engines: list[Engine]) -> None:
    for delay in (0, 0.02, 0.1):
        generation = Generation()
        path, sent = place(GREEDY, generation, {}, 0, False)
        freezing = None
        async for chunk in engines[0].stream(path, sent):
            generation.take(chunk)
            if len(generation.tokens) >= 4:
                freezing = asyncio.create_task(
                    engines[0].control.freeze(generation.id, 0, PATIENCE)
                )
                await asyncio.sleep(delay)
                break
        assert freezing is not None
        try:
            await freezing
        except NotFrozenError:
            continue
        assert await engines[0].control.release(generation.id, 0, PATIENCE)


@pytest.mark.slow
async def test_a_preempted_request_can_be_frozen_or_says_why_not(engines: list[Engine]) -> None:
    """More contexts than the cache holds: some are preempted while others are being frozen."""
    blocks = (await engines[0].control.state(PATIENCE)).num_blocks
    at_once = max(3, blocks // 28)  # whose prompts fit, but not what they generate
    words = blocks * 32 // at_once // 2 - 30
    bodies = [
        GREEDY | {"prompt": f"{n} " + "one two " * words, "max_tokens": 100} for n in range(at_once)
    ]
    plain = [await moved(engines, body, []) for body in bodies]
    before = await engines[0].preemptions()
    generations = await asyncio.gather(
        # None leaves before the cache has overflowed.
        *(moved(engines, body, [75 + 4 * n]) for n, body in enumerate(bodies))
    )
    assert await engines[0].preemptions() > before
    for generation, expected in zip(generations, plain, strict=True):
        assert generation.tokens == expected.tokens


async def test_unknown_and_outdated_ids_are_refused(engines: list[Engine]) -> None:
    control = engines[0].control
    with pytest.raises(NotFrozenError, match="no request nobody runs here"):
        await control.freeze("nobody", 0, PATIENCE)
    with pytest.raises(NotFrozenError, match="no request nobody"):
        await control.snapshot("nobody", PATIENCE)
    assert await control.unfreeze("nobody", PATIENCE) is False
    assert await control.release("nobody", 0, PATIENCE) is False
    generation, asked = Generation(), False
    path, sent = place(GREEDY, generation, {}, 3, False)
    async for chunk in engines[0].stream(path, sent):
        generation.take(chunk)
        if not asked:
            asked = True
            with pytest.raises(NotFrozenError, match="this is hop 3 of it, not 0"):
                await control.freeze(generation.id, 0, PATIENCE)
    assert len(generation.tokens) == 48


async def test_a_request_without_migration_parameters_runs_as_ever(engines: list[Engine]) -> None:
    for params in ({}, {"kv_transfer_params": {"headway": {"id": 7}}}):
        generation = Generation()
        body = GREEDY | {"model": "smollm2", "stream": True, "return_token_ids": True}
        async for chunk in engines[0].stream("/v1/completions", body | params):
            generation.take(chunk)
        assert len(generation.tokens) == 48
        with pytest.raises(ControlError):
            await engines[0].control.freeze("7", 0, PATIENCE)
