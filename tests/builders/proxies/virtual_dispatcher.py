"""The proxy's dispatcher, accounts and line in virtual time; instances and requests are made up."""

import asyncio
import selectors
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

from rescheduler.engines.proxy_options import AccountOptions, ProxyOptions
from rescheduler.ordering import create_order
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.dispatcher import Dispatcher
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
        weights: Mapping[str, float] | None = None,
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
        self.accounts = Accounts(AccountOptions(weights=dict(weights or {})), clock=loop.time)
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
        self.waited: defaultdict[str, float] = defaultdict(float)  # the longest of those placed
        self.until = UNTIL

    def asked(self, client: str, model: str, tokens: int, prompt: int = 10) -> Any:
        return Asked(
            "r", prompt_tokens=prompt, prompt_is_known=True, max_tokens=tokens,
            expected_tokens=tokens,
            model=model, arrived=self.loop.time(), account=self.accounts.named(client),
            placements=self.places,
        )  # fmt: skip

    async def ask(
        self, client: str, model: str, tokens: int, prompt: int = 10, expected: int | None = None
    ) -> None:
        """Be served; ``expected``: if not as many tokens as it generates."""
        request, asked = self.asked(client, model, tokens, prompt), self.loop.time()
        if expected is not None:
            request.expected_tokens, request.max_tokens = expected, max(tokens, 2 * expected)
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
        self.waited[client] = max(self.waited[client], self.loop.time() - asked)
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
        self,
        client: str,
        model: str,
        tokens: int,
        begins: float,
        prompt: int = 10,
        expected: int | None = None,
    ) -> None:
        await asyncio.sleep(begins)
        while self.loop.time() < self.until:
            await self.ask(client, model, tokens, prompt, expected)


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
    clients: Iterable[tuple[Any, ...]],
    instances: Iterable[str],
    ahead: int,
    until: float = UNTIL,
    **options: Any,
) -> dict[str, float]:
    """Return the same of clients that each keep one request, as `World.keep` takes them."""

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
