"""Whose requests wait at the coordinator where the pool is full: by account, not by proxy."""

import asyncio
from typing import Any

from coordinating import RECORD, shared_by_sessions
from msgspec.structs import replace

from benchmarks.support.engine_states import engine_state
from rescheduler.coordination.messages import Record, Report
from rescheduler.coordinator.session import Session, Shared
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.placement.instance_state import InstanceState

POOL = 4
RUNS = replace(RECORD, instance=0, destination=0, hop=0, generating=True)


def coordinator() -> Shared:
    """One that has just started, with an instance that runs one request at a time."""
    options = ProxyOptions(pool=POOL)
    instance = InstanceState(Instance("d", "decode", "http://d:1"), options, None)
    instance.engine = engine_state(max_num_seqs=1)
    loop = asyncio.get_running_loop()
    return shared_by_sessions("c", [instance], options, loop.time, loop.create_task)


class Proxy:
    """What a proxy says, and how many of its requests were refused."""

    def __init__(self, shared: Shared, number: int) -> None:
        self.session = Session(f"s{number}", number, b"peer", None, shared)
        self._reports = self._handles = self.refused = 0

    async def says(self, *records: Record, whole: bool = False) -> None:
        self._reports += 1
        whole = whole or self._reports == 1
        report = Report(self.session.name, self._reports, "", 0, "digest", whole, list(records))
        await self.session.receive(report)
        for _ in range(5):
            await asyncio.sleep(0)
        notice = self.session.notice(None)
        answers = [] if notice is None else notice.answers
        refusals = [answer.refusal for answer in answers if answer.refusal is not None]
        assert all(refusal.status == 429 for refusal in refusals)
        self.refused += len(refusals)

    async def asks(self, n: int, account: str = "", **changes: Any) -> None:
        await self.says(*(self.asking(account, **changes) for _ in range(n)))

    def asking(self, account: str = "", **changes: Any) -> Record:
        handle = self._handles = self._handles + 1
        return replace(RECORD, handle=handle, ticket=handle, account=account, **changes)

    def running(self) -> Record:
        self._handles += 1
        return replace(RUNS, handle=self._handles)


def waiting(shared: Shared, proxy: Proxy) -> int:
    names = [one.session for one in shared.cluster.dispatcher.waiting]
    return names.count(proxy.session.name)


async def crowded() -> tuple[Shared, Proxy, Proxy]:
    """Two proxies, and an instance without room."""
    shared = coordinator()
    one, two = Proxy(shared, 1), Proxy(shared, 2)
    await one.says(one.running())
    return shared, one, two


async def end(*proxies: Proxy) -> None:
    for proxy in proxies:
        await proxy.session.close()


async def test_a_flood_of_one_account_keeps_no_other_proxys_requests_out() -> None:
    shared, one, two = await crowded()
    await one.asks(100, "flood")
    assert (waiting(shared, one), one.refused) == (POOL, 96)
    await two.asks(3, "other")
    assert (waiting(shared, two), two.refused) == (2, 1), "its share is half of the pool"
    await end(one, two)


async def test_an_account_has_one_share_whichever_proxies_it_asks() -> None:
    shared, one, two = await crowded()
    await one.asks(POOL, "flood")
    await two.asks(2, "flood")
    assert (waiting(shared, two), two.refused) == (0, 2)
    await end(one, two)


async def test_a_proxy_that_names_no_account_is_one() -> None:
    shared, one, two = await crowded()
    await one.asks(100)
    await two.asks(3)
    assert (waiting(shared, one), waiting(shared, two)) == (POOL, 2)
    await end(one, two)


async def test_the_pool_holds_where_no_instance_prefills_for_others() -> None:
    shared, one, two = await crowded()
    prefills = [one.asking("flood", for_prefill=True) for _ in range(20)]
    await one.says(*prefills)
    assert one.refused == 0, "there is nowhere to wait"
    await one.says(*(replace(r, ticket=r.ticket + 100, for_prefill=False) for r in prefills))
    assert (waiting(shared, one), one.refused) == (POOL, 20 - POOL)
    await end(one, two)


async def test_what_has_had_a_place_waits_for_another_one_and_crowds_nobody_out() -> None:
    shared, one, two = await crowded()
    await one.asks(100, "flood", hop=0)
    assert (waiting(shared, one), one.refused) == (POOL, 0), "the others wait before the pool"
    await two.asks(2, "other")
    assert (waiting(shared, two), two.refused) == (2, 0)
    await end(one, two)


async def test_a_coordinator_that_starts_anew_takes_what_runs_though_the_pool_is_full() -> None:
    shared = coordinator()
    proxy = Proxy(shared, 1)
    runs, waits = [proxy.running() for _ in range(6)], [proxy.asking() for _ in range(10)]
    await proxy.says(*waits, *runs)
    (instance,) = shared.cluster.all
    assert len(shared.cluster.placements.on(instance)) == 6
    assert (waiting(shared, proxy), proxy.refused) == (POOL, 10 - POOL)
    fails = replace(runs[0], ticket=100, instance=-1, destination=-1, generating=False)
    await proxy.says(fails)
    assert (waiting(shared, proxy), proxy.refused) == (POOL + 1, 10 - POOL), "it is not refused"
    await end(proxy)
