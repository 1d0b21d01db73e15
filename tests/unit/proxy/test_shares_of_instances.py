"""Shares of instances of which each has some of the models, in virtual time: all get what they may.

The dispatcher, the accounts and the line are the proxy's; instances and requests are made up.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
import virtual_dispatcher
from virtual_dispatcher import (
    TOKEN_SECONDS,
    Asked,
    MadeUp,
    VirtualLoop,
    World,
    shares,
    slots_of,
)

from rescheduler.placement.model_places import ModelPlaces
from rescheduler.placement.placeable import Placements


@pytest.fixture
def virtual_loop() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as loop:
        yield loop


@pytest.mark.parametrize("ahead", [8, 32])
@pytest.mark.parametrize("tokens", [20, 200])
def test_who_comes_later_for_an_adapter_whose_room_is_full_is_served(
    ahead: int, tokens: int
) -> None:
    crowd = [("a", "w", 24, 200), ("b", "m", 24, 60), ("c", "m", 24, 60), ("h", "w", 12, tokens)]
    found = shares(["m", "m", "m", "mw"], crowd, ahead)
    assert found == pytest.approx({"a": 1.0, "h": 1.0, "b": 3.0, "c": 3.0}, abs=0.25)


@pytest.mark.parametrize("mix", [("z", "w"), ("z", "m")])
@pytest.mark.parametrize("more", [2, 4])
def test_who_asks_for_two_models_takes_nobody_elses_share(mix: tuple[str, str], more: int) -> None:
    first, second = mix
    crowd = [("b", "m", 24, 60), ("h", "z", 24, 60)]
    crowd += [("a", first, 24 - more, 60), ("a", second, more, 60)]
    found = shares(["mw", "mz", "mw", "mz"], crowd, 32)
    assert found == pytest.approx({"a": 8 / 3, "h": 8 / 3, "b": 8 / 3}, abs=0.25)


def test_who_waits_for_a_prefill_instance_has_no_claim_to_what_needs_none() -> None:
    """Else who comes later gets nothing: it begins where those are that need none."""
    crowd = [("h", "m", 24, 40), ("a", "m", 8, 200), ("n", "m", 4, 40)]
    found = shares(["m", "m"], crowd, 32, slots=[8, 8], direct="a", prefill_seconds=1.0)
    assert found["n"] > 0.4 and found["a"] > 7


def test_what_never_fits_saves_up_no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has waited for a giant does not get all places for its small requests."""
    warm, until = 120.0, 160.0
    monkeypatch.setattr(virtual_dispatcher, "WARM", warm)

    async def serve() -> tuple[float, float]:
        world = World(loop, ["m", "m"], 32, slots=[8, 8], capacity=40_000, direct="abc")
        world.until = until
        tasks = []
        for client in "bc":
            for i in range(16):
                tasks.append(asyncio.create_task(world.keep(client, "m", 400, 0.01 * i, 2_000)))
        await asyncio.sleep(5.0)  # there is no room for more
        giants = [asyncio.create_task(world.ask("a", "m", 20, 31_000)) for _ in range(2)]
        while loop.time() < warm:
            await asyncio.sleep(1.0)
        for i in range(40):
            tasks.append(asyncio.create_task(world.keep("a", "m", 200, 0.01 * i)))
        while loop.time() < until:
            await asyncio.sleep(1.0)
        for task in (*giants, *tasks):
            task.cancel()
        await asyncio.gather(*giants, *tasks, return_exceptions=True)
        had = [world.slots[name] * TOKEN_SECONDS / (until - warm) for name in "abc"]
        return had[0], had[1] + had[2]

    loop = VirtualLoop()
    try:
        flood, others = loop.run_until_complete(serve())
    finally:
        loop.close()
    assert others > 5 and flood > 5, "5.9 and 10.1 by service: 2,800 and 410 each"


@pytest.mark.parametrize(("ahead", "number"), [(32, 1), (32, 2), (6, 2)])
def test_no_instance_is_idle_while_another_client_fills_what_is_prefilled(
    ahead: int, number: int
) -> None:
    crowd = [("a", "w", 30, 3000), ("a", "z", 30, 3000), ("h", "q", number, 20)]
    found = shares(["mw", "mwz", "mz", "mq"], crowd, ahead)
    assert found["h"] > 0.85 * number


def test_adapters_on_overlapping_instances_are_one_competition() -> None:
    """Else what some had on the instance that others lack is forgiven on the one they share."""
    crowd = [
        ("a0", "z", 48, 20), ("a0", "y", 24, 40), ("a1", "w", 24, 200), ("a2", "m", 16, 80),
        ("a2", "y", 16, 200), ("a3", "y", 24, 40), ("a3", "z", 48, 40), ("a4", "y", 24, 200),
        ("a4", "w", 16, 20), ("a5", "z", 48, 20),
    ]  # fmt: skip
    found = shares(["m", "mwyz", "w", "m"], crowd, 32, slots=[8, 8, 4, 4], direct="a0a1a2a3a4a5")
    fair = dict.fromkeys(("a0", "a1", "a3", "a4", "a5"), 2.4)
    assert found == pytest.approx({**fair, "a2": 12.0}, abs=0.4)


def test_what_is_prefilled_is_not_counted_twice() -> None:
    """Who has long requests prefilled ahead does not owe for them before they are served."""
    lengths = {"a": 20, "b": 80, "c": 200, "d": 80, "e": 200, "f": 40}
    found = shares(
        ["m", "m"], [(name, "m", 12, n) for name, n in lengths.items()], 32, slots=[1, 2]
    )
    assert found == pytest.approx(dict.fromkeys(lengths, 0.5), abs=0.15)


def test_what_waits_for_a_busy_adapter_holds_back_no_other_instance() -> None:
    """However long it has waited: the others cannot be used by it."""
    crowd = [("b", "m", 16, 60), ("c", "m", 16, 60), ("x", "w", 3, 20_000)]
    found = shares(["mw", "m", "m"], crowd, 32, slots=[2, 8, 8], direct="bcx", patience=15.0)
    assert found["b"] + found["c"] == pytest.approx(16.0, abs=1.0)


def test_an_instance_whose_memory_is_full_is_not_idle() -> None:
    instances: list[Any] = [MadeUp("decode", "m", 8), MadeUp("decode", "m", 8)]
    for one in instances:
        one.kv_capacity = 100
    models, running = ModelPlaces([], instances), Placements[Any]()
    full: Any = Asked("r", prompt_tokens=100, prompt_is_known=True, model="m", placements=running)
    running.put(full, instances[0])
    assert models.idle([], running) == instances[1:]
    assert models.idle([full], running) == []


def test_who_has_had_most_goes_last_however_many_clients_wait(virtual_loop: VirtualLoop) -> None:
    """Else it goes first among those that share a line with a client that has had nothing."""
    world = World(virtual_loop, ["m"], 32)
    names = [f"a{i}" for i in range(300)]
    names[260:260] = ["greedy"] * 3
    waiting = [world.asked(name, "m", 10) for name in names]
    group = world.accounts.group_of("m")
    for request in waiting:
        request.group = group
    world.accounts.named("greedy").settled[group] = 1_000.0
    ordered, _ = world.line.in_order(waiting)
    assert [one.account.name for one in ordered[-3:]] == ["greedy"] * 3


@pytest.mark.parametrize("tokens", [20, 200])
@pytest.mark.parametrize("number", [4, 8])
def test_a_few_long_requests_have_their_share_beside_a_flood(number: int, tokens: int) -> None:
    """Each time none of theirs waits they begin anew, with what runs: not ahead by it."""
    crowd = [("h", "m", 2_000, 0.5 + 2.7 * i, 10) for i in range(number)]
    crowd += [("a", "m", tokens, 0.003 * i, 10) for i in range(64)]
    found = slots_of(crowd, ["m", "m"], 32, slots=[8, 8], until=400.0)
    assert found["h"] > 0.93 * number


@pytest.mark.parametrize("prefill_seconds", [0.01, 0.03])
def test_requests_of_one_token_do_not_have_all_places(prefill_seconds: float) -> None:
    """Hundreds a second keep the prefill instance: else 0.5 and 0.0 of 16 slots are left."""
    crowd = [("h", "m", 60, 0.003 * i, 500) for i in range(48)]
    crowd += [("x", "m", 1, 1 + 0.001 * i, 1) for i in range(200)]
    found = slots_of(crowd, ["m", "m"], 32, slots=[8, 8], prefill_seconds=prefill_seconds)
    assert found["h"] > 5.5, "half is its share"


def test_who_asks_for_little_waits_for_little_beside_long_requests() -> None:
    """A place costs it no more because others' requests are long: else it has 0.1 slots."""
    crowd = [(f"l{i % 8}", "m", 2_000, 0.01 * i, 100) for i in range(40)]
    crowd += [("t", "m", 20, 30 + 0.05 * i, 10) for i in range(8)]
    found = slots_of(crowd, ["m", "m"], 32, slots=[8, 8], until=200.0)
    assert found["t"] > 1.1, "a ninth of 16 slots is 1.8"


@pytest.mark.parametrize("prompt", [500, 4_000])
def test_a_prompt_that_fits_elsewhere_waits_for_no_full_prefill_instance(prompt: int) -> None:
    """The instance that has least to prefill has no room, since what it keeps is not fetched."""
    found = long_and_short([12_000, 200_000], prompt=prompt)
    assert found["b"] == pytest.approx(8.0, abs=0.5)


def test_a_prompt_that_fits_nowhere_leaves_no_other_instance_idle() -> None:
    assert long_and_short([22_000])["b"] > 7.0


def test_a_long_prompt_is_prefilled_though_short_ones_come_all_the_time() -> None:
    """Else they would take for ever what it waits for."""
    found = long_and_short([30_000], tokens=300, longest=12_000)
    assert found["x"] > 0.03 and found["b"] > 5.0


def long_and_short(
    memories: Iterable[int], tokens: int = 3_000, prompt: int = 500, longest: int = 0
) -> dict[str, float]:
    """Return the slots of each client; what is prefilled and waits for w fills the memory."""
    clients = [("a", "w", tokens, 0.001 * i, 4_000) for i in range(16)]
    clients += [("b", "m", 60, 5.0 + 0.001 * i, prompt) for i in range(12)]
    if longest:
        clients.append(("x", "m", 60, 10.0, longest))
    return slots_of(clients, ["mw", "m", "m"], 32, slots=[2, 4, 4], memories=memories)


def test_what_waits_while_instances_get_models_in_common_competes_with_what_comes(
    virtual_loop: VirtualLoop,
) -> None:
    """Else what each is ahead by is of other instances, and whoever waits longer may starve."""
    world = World(virtual_loop, ["m"], 32)
    early, late = world.asked("early", "m", 10), world.asked("late", "m", 10)
    world.accounts.group_of = lambda model: "before"
    with world.accounts.waits(early):
        early.account.settled["before"] = 1_000_000.0
        world.accounts.group_of = lambda model: "after"
        with world.accounts.waits(late):
            late.account.settled["after"] = 1_000.0
            ordered, _ = world.line.in_order([late, early])
    assert ordered == [early, late]


def test_what_a_request_had_before_it_waits_again_is_no_loan(virtual_loop: VirtualLoop) -> None:
    """Else whoever's long requests give way has nothing had, as long as these wait."""
    world = World(virtual_loop, ["m"], 32)
    gave_way, short, other = (world.asked(name, "m", 60) for name in ("a", "a", "b"))
    gave_way.foreseen_tokens, gave_way.max_tokens = 12_000.0, 12_000
    world.accounts.placed(gave_way)
    gave_way.has(2_000)
    group = world.accounts.group_of("m")
    for request in (gave_way, short, other):
        request.group = group
    other.account.settled[group] = 2_000.0
    ordered, _ = world.line.in_order([gave_way, short, other])
    assert ordered[0] is other
