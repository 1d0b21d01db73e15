"""Fair shares where some models are on some instances only, as adapters are."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from clients import ask, client
from hypothesis import given
from hypothesis import strategies as st
from live_requests import live_request
from scripted_cluster import Cluster, cluster, until
from tokenizers import Tokenizer

from rescheduler.engines.proxy_options import AccountOptions
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.model_places import ModelPlaces

FAIR = {"name": "fcfs", "fairness": 1.0}
ADAPTER, OLD, NEW, THIRD = "adapter", "127.0.0.2", "127.0.0.3", "127.0.0.4"


@asynccontextmanager
async def one_with_an_adapter(
    tokenizer: Tokenizer, slots: int = 2, ahead: int = 32
) -> AsyncIterator[Cluster]:
    """Four decode instances of two slots, the last of which alone has an adapter."""
    async with cluster(tokenizer, decodes=4, order=FAIR, pool=256, ahead=ahead) as it:
        it.set_engines(says={"max_num_seqs": 2, "max_model_len": 15_000}, token_seconds=0.01)
        last = it.engines["decode-3"]
        last.says = {"max_num_seqs": slots, "max_model_len": 15_000}
        for name, engine in it.engines.items():
            engine.models = ["m", ADAPTER] if name in ("decode-3", "prefill-0") else ["m"]
        decodes = it.proxy.cluster.decodes
        await until(lambda: [one.slots for one in decodes] == [2, 2, 2, slots])
        listed = {name: frozenset(engine.models) for name, engine in it.engines.items()}
        await until(lambda: {one.name: one.models for one in it.proxy.cluster.all} == listed)
        yield it


class Crowd:
    """Clients that keep so many requests under way, and how many answers each has got."""

    def __init__(self, it: Cluster) -> None:
        self._it, self._stack = it, AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self.answers: Counter[tuple[str, str]] = Counter()

    async def __aenter__(self) -> "Crowd":
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def keep(self, address: str, model: str, number: int, tokens: int = 30) -> None:
        session = await self._stack.enter_async_context(client(self._it, address))

        async def loop() -> None:
            while True:
                assert await ask(session, model=model, max_tokens=tokens) == 200
                self.answers[address, model] += 1

        self._tasks += [asyncio.create_task(loop()) for _ in range(number)]

    async def serve(self, until_served: int, *clients: tuple[str, str]) -> Counter[tuple[str, str]]:
        """Wait until these clients have so many further answers together; return those of all."""
        before = self.answers.copy()
        await until(lambda: sum(self.answers[one] - before[one] for one in clients) >= until_served)
        return self.answers - before


async def test_who_comes_later_and_who_came_before_share_an_adapter_beside_a_third(
    tokenizer: Tokenizer,
) -> None:
    async with one_with_an_adapter(tokenizer) as it, Crowd(it) as crowd:
        await crowd.keep(OLD, ADAPTER, 8)
        await crowd.keep(THIRD, "m", 12)
        await crowd.serve(20, (OLD, ADAPTER))
        await crowd.keep(NEW, ADAPTER, 4)
        await crowd.serve(12, (OLD, ADAPTER), (NEW, ADAPTER))  # until both are even
        served = await crowd.serve(30, (OLD, ADAPTER), (NEW, ADAPTER))
        assert served[OLD, ADAPTER] >= 8 and served[NEW, ADAPTER] >= 8
        assert served[THIRD, "m"] > 45, "which has three times as many slots"


async def test_waiting_for_an_adapter_is_no_claim_to_other_instances(tokenizer: Tokenizer) -> None:
    async with one_with_an_adapter(tokenizer) as it, Crowd(it) as crowd:
        await crowd.keep(THIRD, "m", 16)
        await crowd.keep(OLD, ADAPTER, 4)
        await crowd.serve(80, (THIRD, "m"))
        await crowd.keep(OLD, "m", 16)
        served = await crowd.serve(40, (THIRD, "m"), (OLD, "m"))
        assert served[THIRD, "m"] >= 14


async def test_many_requests_for_an_adapter_do_not_fill_what_is_prefilled_ahead(
    tokenizer: Tokenizer,
) -> None:
    async with one_with_an_adapter(tokenizer, slots=1, ahead=14) as it, Crowd(it) as crowd:
        await crowd.keep(OLD, ADAPTER, 60, tokens=100)
        await crowd.keep(NEW, "m", 16)
        await crowd.serve(30, (NEW, "m"))
        dispatcher = it.proxy.cluster.dispatcher
        for _ in range(3):
            served = await crowd.serve(12, (NEW, "m"))
            assert sum(one.model == ADAPTER for one in dispatcher.waiting) <= 4
            assert served[OLD, ADAPTER] <= 6


def asked(accounts: Accounts, name: str, foreseen: float) -> LiveRequest:
    request = live_request("r")
    request.account, request.foreseen_tokens = accounts.named(name), foreseen
    request.prompt_tokens, request.prompt_is_known = 10, True
    return request


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=1, max_size=30),
    st.data(),
)
def test_who_could_not_go_comes_up_and_gets_ahead_of_no_rival(
    places: list[tuple[str, int]], data: st.DataObject
) -> None:
    accounts = Accounts(AccountOptions())
    rivals = [asked(accounts, name, 10.0) for name in ("x", "y")]
    for request in rivals:
        accounts.placed(request)
        request.prompt_tokens = data.draw(st.integers(1, 300))
        accounts.began(request)
        accounts.ended(request, by_itself=True)
    x, y = (request.account for request in rivals)
    for name, foreseen in places:
        request = asked(accounts, name, float(foreseen))
        apart, group = x.served(None) - y.served(None), request.group
        had = request.account.served(group)
        accounts.placed(request)
        had = min(had, accounts.virtual_times[group])
        accounts.could_not_go(rivals, request)
        assert x.served(None) - y.served(None) == pytest.approx(apart, abs=1e-6)
        assert min(x.served(None), y.served(None)) >= had - 1e-6


def test_waiting_in_one_group_of_instances_changes_no_debt_in_another() -> None:
    accounts = Accounts(AccountOptions())
    for name in ("t", "x"):
        accounts.named(name).lift("base", 1_000.0)
    rivals = [asked(accounts, name, 10.0) for name in ("x", "new")]
    for request in rivals:
        request.group = "other"
    placed = asked(accounts, "t", 10.0)
    placed.group = "base"
    accounts.group_of = lambda model: "base"
    accounts.placed(placed)
    accounts.could_not_go(rivals, placed)
    assert accounts.named("x").served("base") == 1_000.0
    assert accounts.named("new").served("base") == 0.0


@dataclass(eq=False)
class Serves:
    """What is read of an instance."""

    models: frozenset[str]
    slots: int = 2

    def serves(self, model: str) -> bool:
        return model in self.models


def granted_ahead(asked: str, ahead: int) -> Counter[str]:
    """Return how many of a line of models are prefilled, none of which is placed meanwhile.

    Four instances: all have m, the last three w, the last two z, the last y.
    """
    names = ("m", "mw", "mwz", "mwzy")
    places = ModelPlaces([], [Serves(frozenset(one)) for one in names])  # type: ignore[list-item]
    prefilled: list[Any] = []
    for model in asked:
        one = SimpleNamespace(model=model)
        room = places.rooms_ahead([places.lacking(model)], prefilled, ahead)  # type: ignore[type-var]
        wider = [without for without in room if without <= places.lacking(model)]
        if len(prefilled) < ahead and all(room[without] > 0 for without in wider):
            prefilled.append(one)
    return Counter(one.model for one in prefilled)


@given(st.text("mwzy", max_size=60))
def test_what_can_go_to_some_instances_only_leaves_room_ahead_for_the_others(asked: str) -> None:
    granted = granted_ahead(asked, 16)
    assert granted["y"] <= 4
    assert granted["y"] + granted["z"] <= 8
    assert granted["y"] + granted["z"] + granted["w"] <= 12
    assert granted_ahead(asked + "m" * 16, 16).total() == 16


def test_newcomers_do_not_lift_who_waits_with_them() -> None:
    accounts = Accounts(AccountOptions())
    for _ in range(8):
        accounts.placed(asked(accounts, "third", 100.0))
    waits = asked(accounts, "waits", 10.0)
    for i in range(6):
        placed = asked(accounts, "third", 100.0)
        accounts.placed(placed)
        accounts.could_not_go([waits, asked(accounts, f"new-{i}", 10.0)], placed)
    assert waits.account.served(None) <= accounts.virtual_times[None]


async def test_what_one_client_has_prefilled_for_an_adapter_keeps_nobody_from_it(
    tokenizer: Tokenizer,
) -> None:
    async with one_with_an_adapter(tokenizer, ahead=8) as it, Crowd(it) as crowd:
        await crowd.keep(THIRD, "m", 24)
        await crowd.keep(OLD, ADAPTER, 24, tokens=60)
        await crowd.serve(40, (THIRD, "m"))
        await crowd.keep(NEW, ADAPTER, 12)
        await crowd.serve(100, (THIRD, "m"))  # until both are even
        served = await crowd.serve(120, (THIRD, "m"))
        assert served[OLD, ADAPTER] > 0 and served[NEW, ADAPTER] > 0
