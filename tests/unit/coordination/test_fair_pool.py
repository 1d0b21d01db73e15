"""Who waits for a place, of many proxies' requests."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rescheduler.coordinator.fair_pool import FairPool
from rescheduler.placement.account import Account

STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["come", "come", "go", "give up"])), max_size=60
)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Waiting:
    """A request that waits, inside or before the pool, until it goes."""

    def __init__(self, pool: FairPool, proxy: int, account: Account | None = None) -> None:
        self.proxy, self.inside = proxy, False
        self.account = account or Account(str(proxy))
        self.goes = asyncio.Event()
        self.task = asyncio.create_task(self._wait(pool))

    async def _wait(self, pool: FairPool) -> None:
        async with pool.waiting(self.proxy, self.account):
            self.inside = True
            await self.goes.wait()


@given(st.integers(1, 12), STEPS)
def test_each_proxy_has_its_share_and_no_place_stays_empty(
    size: int, steps: list[tuple[int, str]]
) -> None:
    async def play() -> None:
        pool, all_of_them = FairPool(size), list[Waiting]()
        for proxy, step in steps:
            own = [one for one in all_of_them if one.proxy == proxy]
            inside = [one for one in own if one.inside]
            if step == "come":
                all_of_them.append(Waiting(pool, proxy))
            elif step == "go" and inside:
                inside[0].goes.set()
                all_of_them.remove(inside[0])
            elif step == "give up" and own:
                own[-1].task.cancel()
                all_of_them.remove(own[-1])
            await turns()
            check(all_of_them, size, pool)
        for one in all_of_them:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in all_of_them), return_exceptions=True)

    asyncio.run(play())


def check(all_of_them: list[Waiting], size: int, pool: FairPool) -> None:
    proxies = {one.proxy for one in all_of_them}
    share = max(1, size // max(1, len(proxies)))
    inside = Counter(one.proxy for one in all_of_them if one.inside)
    outside = Counter(one.proxy for one in all_of_them if not one.inside)
    if outside:
        assert inside.total() >= size, "a place stays empty"
    assert inside.total() <= size + share * len(proxies)
    for proxy in proxies:
        assert not outside[proxy] or inside[proxy] >= share, "kept out of its share"
        assert pool.below_share(proxy) == (inside[proxy] + outside[proxy] < share)
        own = [one.inside for one in all_of_them if one.proxy == proxy]
        assert own == sorted(own, reverse=True), "one overtakes another"


def test_of_one_proxys_accounts_that_with_the_fewest_inside_comes_in_first() -> None:
    async def play() -> None:
        pool, flood, other = FairPool(2), Account("flood"), Account("other")
        flooding = [Waiting(pool, 1, flood) for _ in range(6)]
        await turns()
        honest = Waiting(pool, 1, other)
        await turns()
        assert [one.inside for one in flooding] == [True] * 2 + [False] * 4 and not honest.inside
        flooding[0].goes.set()
        await turns()
        assert honest.inside
        for one in [*flooding, honest]:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in [*flooding, honest]), return_exceptions=True)

    asyncio.run(play())
