"""Clients beside those that ask for much, for little, or for more than they say."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from virtual_dispatcher import VirtualLoop, World, slots_of


def test_who_waits_for_others_that_were_expected_to_be_longer_keeps_its_share() -> None:
    """What its requests are charged too much is given back, though it could not go elsewhere."""
    crowd: list[tuple[Any, ...]] = [("a", "w", 100, 0.003 * i) for i in range(24)]
    crowd += [("b", "w", 100, 1 + 0.003 * i, 10, 1_000) for i in range(24)]
    crowd += [("c", "m", 60, 2 + 0.003 * i) for i in range(24)]
    found = slots_of(crowd, ["m", "m", "mw"], 32, slots=[4, 4, 8], until=100.0, direct="abc")
    assert found == pytest.approx({"a": 4.0, "b": 4.0, "c": 8.0}, abs=0.3)


def test_three_clients_of_one_token_leave_something_to_others() -> None:
    """The least cost of a place does not fall with the mean, which they bring down themselves."""
    crowd = [("h", "m", 60, 0.003 * i, 500) for i in range(48)]
    crowd += [(f"x{j}", "m", 1, 1 + 0.003 * i, 1) for j in range(3) for i in range(16)]
    found = slots_of(crowd, ["m", "m"], 32, slots=[8, 8], prefill_seconds=0.03)
    assert found["h"] > 1.3


@pytest.mark.parametrize("weight", [0.1, 0.01])
def test_a_newcomer_is_served_beside_a_client_of_little_weight(weight: float) -> None:
    """Who is far ahead is prefilled where there is room: that is not how far the others are."""
    crowd = [("l", "m", 200, 0.003 * i) for i in range(12)]
    crowd += [("f", "m", 60, 2 + 0.003 * i) for i in range(24)]
    crowd += [("b", "m", 60, 2 + 0.003 * i) for i in range(12)]
    crowd += [("n", "m", 60, 30 + 0.003 * i) for i in range(2)]
    weights = {"l": weight}
    found = slots_of(crowd, ["m", "m"], 32, slots=[4, 4], until=150.0, weights=weights)
    assert found["n"] > 1.0


def in_virtual_time(serve: Callable[[VirtualLoop], Awaitable[Any]]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(serve(loop))
    finally:
        loop.close()


async def until_over(world: World, tasks: list[asyncio.Task[None]]) -> None:
    while world.loop.time() < world.until:
        await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def several(
    world: World, client: str, answers: int, tokens: int, had: int, ends: float
) -> None:
    """Be served with a request of several answers, which ends then, with fewer tokens in all."""
    request = world.asked(client, "m", tokens)
    request.several, request.answers = True, answers
    dispatcher, places = world.dispatcher, world.places
    dispatcher.arrived(request)
    prefill = await dispatcher.take_prefill(request)
    await asyncio.sleep(world.prefill_seconds)
    places.put(request, None)
    request.instance = None
    if prefill is not None:
        dispatcher.began(request, prefill)
    dispatcher.wake()
    await dispatcher.place(request)
    await asyncio.sleep(max(ends - world.loop.time(), 0.0))
    request.was_counted(10, had)
    places.put(request, None)
    dispatcher.left(request, True)
    dispatcher.wake()


def test_who_pauses_is_served_beside_one_that_asks_for_hundreds_of_answers() -> None:
    async def giants(world: World) -> None:
        """One request of 256 answers after the other, and a small one behind each."""
        while True:
            await several(world, "g", 256, 800, 800 * 256, world.loop.time() + 8.0)
            await world.ask("g", "m", 1, prompt=1)

    async def serve(loop: VirtualLoop) -> World:
        world = World(loop, ["m", "m"], 32, slots=[8, 8])
        world.until = 150.0
        clients = [world.keep("f", "m", 200, 0.003 * i) for i in range(24)]
        clients += [world.keep("h", "m", 60, 1 + 0.3 * i) for i in range(2)]
        await until_over(world, [asyncio.create_task(one) for one in (*clients, giants(world))])
        return world

    world = in_virtual_time(serve)
    assert world.waited["h"] < 10.0
    assert world.slots["h"] * 0.01 / 130.0 > 0.4


def test_what_is_given_back_of_a_large_charge_does_not_have_others_stand_still() -> None:
    """A request of 128 answers is charged as if all were long; nearly all end early."""

    async def serve(loop: VirtualLoop) -> World:
        world = World(loop, ["m", "m"], 32, slots=[4, 4])
        world.until = 200.0
        clients = [world.keep(name, "m", 60, 0.003 * i) for name in "fb" for i in range(24)]
        clients += [world.keep("h", "m", 60, 6.0) for _ in range(3)]
        clients += [world.keep("h", "m", 60, 120.0) for _ in range(24)]

        async def large() -> None:
            await asyncio.sleep(5.0)
            await several(world, "h", 128, 1_000, 12_800, 120.0)

        await until_over(world, [asyncio.create_task(one) for one in (*clients, large())])
        return world

    world = in_virtual_time(serve)
    assert max(world.waited["f"], world.waited["b"]) < 12.0


@pytest.mark.parametrize("misfits", [40, 64, 100])
def test_however_many_wait_for_a_full_adapter_all_are_served_in_turn(misfits: int) -> None:
    """Background requests; whoever comes later has its turn as well."""
    draws = random.Random(1)

    async def serve(loop: VirtualLoop) -> Counter[str]:
        world = World(loop, ["m", "w"], 32, slots=[8, 2], capacity=100_000)
        world.until, ended = 300.0, Counter[str]()

        async def keep(name: str, model: str, begins: float, background: bool, ends: float) -> None:
            await asyncio.sleep(begins)
            while loop.time() < ends:
                request = world.asked(name, model, 60)
                request.background = background
                world.dispatcher.arrived(request)
                instance = await world.dispatcher.place(request)
                request.generating = True
                world.dispatcher.began(request, instance)
                for tokens in range(10, 70, 10):
                    await asyncio.sleep(draws.uniform(0.05, 0.15))
                    request.has(tokens)
                world.places.put(request, None)
                world.dispatcher.left(request, True)
                world.dispatcher.wake()
                ended[name] += 1

        clients = [keep("online", "w", 0.0, False, 40.0) for _ in range(6)]
        clients += [
            keep(f"x{i}", "w", 1 + 0.01 * i, True, 300.0) for i in range(misfits) for _ in range(2)
        ]
        clients += [keep("h", "m", 0.0, True, 300.0) for _ in range(12)]
        clients += [keep("new", "w", 50.0, True, 300.0) for _ in range(2)]
        await until_over(world, [asyncio.create_task(one) for one in clients])
        return ended

    ended = in_virtual_time(serve)
    had = [ended[f"x{i}"] for i in range(misfits)]
    assert max(had) <= min(had) + 4
    assert ended["new"] >= min(had) - 2
    assert ended["h"] > 1_000
