"""Clients beside those that ask for much, for little, or for more than they say."""

import asyncio
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
    """The least cost of a place is no part of a mean that they themselves bring down."""
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


def test_who_pauses_is_served_beside_one_that_asks_for_hundreds_of_answers() -> None:
    loop = VirtualLoop()

    async def giants(world: World) -> None:
        """One request of 256 answers after the other, and a small one behind each."""
        while True:
            request = world.asked("g", "m", 800)
            request.several, request.answers = True, 256
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
            await asyncio.sleep(8.0)
            request.was_counted(10, 800 * 256)
            places.put(request, None)
            dispatcher.left(request, True)
            dispatcher.wake()
            await world.ask("g", "m", 1, prompt=1)

    async def serve() -> World:
        world = World(loop, ["m", "m"], 32, slots=[8, 8])
        world.until = 150.0
        clients = [world.keep("f", "m", 200, 0.003 * i) for i in range(24)]
        clients += [world.keep("h", "m", 60, 1 + 0.3 * i) for i in range(2)]
        tasks = [asyncio.create_task(one) for one in (*clients, giants(world))]
        while loop.time() < world.until:
            await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return world

    try:
        world = loop.run_until_complete(serve())
    finally:
        loop.close()
    assert world.waited["h"] < 10.0
    assert world.slots["h"] * 0.01 / 130.0 > 0.4
