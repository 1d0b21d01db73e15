"""Shares of instances of which each has some of the models, in virtual time: all get what they may.

The dispatcher, the accounts and the line are the proxy's; instances and requests are made up.
"""

import asyncio
import selectors
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from rescheduler.engines.proxy_options import AccountOptions, ProxyOptions
from rescheduler.ordering import create_order
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.model_places import ModelPlaces
from rescheduler.placement.placeable import Placeable, Placements
from rescheduler.placement.waiting_line import Pool, WaitingLine
from rescheduler.routing import create_policy
from rescheduler.step_time.profile import MeanStepTime

TOKEN_SECONDS, WARM, UNTIL = 0.01, 20.0, 60.0
Demand = tuple[str, str, int, int]
"""A client, a model, requests at a time, and tokens of each."""


class VirtualTime(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = VirtualTime()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@pytest.fixture
def virtual_loop() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as loop:
        yield loop


class MadeUp:
    """An instance."""

    silent = draining = False
    available = True
    engine: Any = None
    others = ()
    kv_capacity = 1 << 30

    def __init__(self, role: str, models: str, slots: int) -> None:
        self.name = role + models
        self.instance = SimpleNamespace(role=role, name=self.name)
        self.models, self.slots = frozenset(models), slots
        self.breaker = SimpleNamespace(closed=True)

    def serves(self, model: str) -> bool:
        return model in self.models


@dataclass(eq=False, slots=True)
class Asked(Placeable):
    placements: Any = None

    kept_by: Any = None

    def begin_prefill(self, instance: Any) -> None:
        self.instance = instance
        self.placements.put(self, instance)
        if instance.engine is not None:
            self.kept_by = instance.engine
            self.kept_by.free_blocks -= self.prompt_tokens

    def place(self, instance: Any, decision: Any = None) -> None:
        if self.kept_by is not None:
            self.kept_by.free_blocks += self.prompt_tokens
        self.instance = self.destination = instance
        self.placements.put(self, instance)

    def has(self, tokens: int) -> None:
        self._generated = tokens


class World:
    def __init__(
        self,
        loop: VirtualLoop,
        instances: Iterable[str],
        ahead: int,
        slots: Iterable[int] = (),
        capacity: int = 1 << 30,
        direct: str = "",
        prefill_seconds: float = 0.01,
        patience: float = 3600.0,
        memories: Iterable[int] = (),
    ) -> None:
        self.loop, self.places = loop, Placements[Any]()
        self.direct, self.prefill_seconds = direct, prefill_seconds
        options = ProxyOptions(ahead=ahead, pool=1024, pool_seconds=3600.0)
        made = zip(instances, chain(slots, repeat(2)), strict=False)
        step, decodes = MeanStepTime(), [MadeUp("decode", models, n) for models, n in made]
        for one in decodes:
            one.kv_capacity = capacity
        step.seconds = TOKEN_SECONDS
        prefills = []
        for memory in memories or [0]:
            prefills.append(MadeUp("prefill", "".join(instances), 0))
            if memory:
                prefills[-1].kv_capacity = memory
                prefills[-1].engine = SimpleNamespace(block_size=1, free_blocks=memory)
        self.accounts = Accounts(AccountOptions(), clock=loop.time)
        order = create_order("fcfs", fairness=1.0)
        self.line: WaitingLine[Any] = WaitingLine(
            order, decodes, None, step, loop.time, patience, self.accounts  # type: ignore[arg-type]
        )  # fmt: skip
        pool = Pool(self.line, self.accounts)
        self.dispatcher: Dispatcher[Any] = Dispatcher(
            self.places, [*prefills, *decodes], create_policy("jsq"), options, step, loop.time,  # type: ignore[list-item]
            pool=pool,
        )  # fmt: skip
        self.slots: Counter[str] = Counter()
        self.until = UNTIL

    def asked(self, client: str, model: str, tokens: int, prompt: int = 10) -> Any:
        return Asked(
            "r", prompt_tokens=prompt, prompt_is_known=True, max_tokens=tokens,
            expected_tokens=tokens,
            model=model, arrived=self.loop.time(), account=self.accounts.named(client),
            placements=self.places,
        )  # fmt: skip

    async def ask(self, client: str, model: str, tokens: int, prompt: int = 10) -> None:
        request = self.asked(client, model, tokens, prompt)
        self.dispatcher.arrived(request)
        if client not in self.direct:
            prefill = await self.dispatcher.take_prefill(request)
            await asyncio.sleep(self.prefill_seconds)
            self.places.put(request, None)
            request.instance = None
            if prefill is not None:
                self.dispatcher.began(request, prefill)
            self.dispatcher.wake()
        await self.dispatcher.place(request)
        request.generating = True
        for done in range(0, tokens, 10):
            more = min(10, tokens - done)
            await asyncio.sleep(more * TOKEN_SECONDS)
            request.has(done + more)
            if WARM < self.loop.time() <= self.until:
                self.slots[client] += more
        self.places.put(request, None)
        self.dispatcher.left(request, True)
        self.dispatcher.wake()

    async def keep(
        self, client: str, model: str, tokens: int, begins: float, prompt: int = 10
    ) -> None:
        await asyncio.sleep(begins)
        while self.loop.time() < self.until:
            await self.ask(client, model, tokens, prompt)


def shares(
    instances: Iterable[str], demands: Iterable[Demand], ahead: int, **options: Any
) -> dict[str, float]:
    """Return the slots that each client had on average."""

    clients = [
        (client, model, tokens, i + 0.003 * j, 10)
        for i, (client, model, number, tokens) in enumerate(demands)
        for j in range(number)
    ]
    return slots_of(clients, instances, ahead, **options)


def slots_of(
    clients: Iterable[tuple[str, str, int, float, int]],
    instances: Iterable[str],
    ahead: int,
    until: float = UNTIL,
    **options: Any,
) -> dict[str, float]:
    """Return the same of clients that each keep one request: its model, tokens, begin, prompt."""

    async def serve() -> dict[str, float]:
        world = World(loop, instances, ahead, **options)
        world.until = until
        tasks = [asyncio.create_task(world.keep(*client)) for client in clients]
        while loop.time() < until:
            await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {name: n * TOKEN_SECONDS / (until - WARM) for name, n in world.slots.items()}

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(serve())
    finally:
        loop.close()


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
    monkeypatch.setitem(globals(), "WARM", 120.0)
    monkeypatch.setitem(globals(), "UNTIL", 160.0)

    async def serve() -> tuple[float, float]:
        world = World(loop, ["m", "m"], 32, slots=[8, 8], capacity=40_000, direct="abc")
        tasks = []
        for client in "bc":
            for i in range(16):
                tasks.append(asyncio.create_task(world.keep(client, "m", 400, 0.01 * i, 2_000)))
        await asyncio.sleep(5.0)  # there is no room for more
        giants = [asyncio.create_task(world.ask("a", "m", 20, 31_000)) for _ in range(2)]
        while loop.time() < WARM:
            await asyncio.sleep(1.0)
        for i in range(40):
            tasks.append(asyncio.create_task(world.keep("a", "m", 200, 0.01 * i)))
        while loop.time() < UNTIL:
            await asyncio.sleep(1.0)
        for task in (*giants, *tasks):
            task.cancel()
        await asyncio.gather(*giants, *tasks, return_exceptions=True)
        had = [world.slots[name] * TOKEN_SECONDS / (UNTIL - WARM) for name in "abc"]
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
