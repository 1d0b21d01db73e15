"""Waiting for places together, so that no proxy's requests crowd out those of another."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rescheduler.placement.account import Account

__all__ = ["FairPool"]


class FairPool:
    """A pool of so many requests, and before it a queue of each proxy.

    Of N proxies whose requests wait, each has a share of ``size`` // N, at least 1. A request
    comes in while its proxy has fewer in there than its share, however full the pool is, and
    beyond its share while the pool is not full; of several proxies first from the one that has
    fewest there, and of its accounts likewise. So a proxy that is alone fills the pool, and keeps
    nobody else out of it; at most 2 * ``size`` requests are in there if there are no more proxies
    than that.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._inside: Counter[int] = Counter()
        self._inside_of: Counter[Account] = Counter()
        self._total = 0
        self._outside: dict[int, dict[Account, dict[asyncio.Future[None], None]]] = {}

    def below_share(self, proxy: int) -> bool:
        """Return whether a proxy has fewer requests waiting than its share."""
        outside = sum(map(len, self._outside.get(proxy, {}).values()))
        return self._inside[proxy] + outside < self._share(proxy)

    @asynccontextmanager
    async def waiting(self, proxy: int, account: Account) -> AsyncIterator[None]:
        """Be in the pool, as soon as it is a request's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outside.setdefault(proxy, {}).setdefault(account, {})[turn] = None
        self._let_in()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._count(proxy, account, -1)
            else:
                self._leave_queue(proxy, account, turn)
            self._let_in()

    def _let_in(self) -> None:
        while self._outside:
            proxy = min(self._outside, key=self._inside.__getitem__)
            if self._total >= self._size and self._inside[proxy] >= self._share(proxy):
                return
            account = min(self._outside[proxy], key=self._inside_of.__getitem__)
            turn = next(iter(self._outside[proxy][account]))
            self._leave_queue(proxy, account, turn)
            if not turn.done():
                turn.set_result(None)
                self._count(proxy, account, 1)

    def _share(self, proxy: int) -> int:
        return max(1, self._size // len({proxy, *self._inside, *self._outside}))

    def _count(self, proxy: int, account: Account, more: int) -> None:
        self._total += more
        self._inside[proxy] += more
        self._inside_of[account] += more
        if not self._inside[proxy]:
            del self._inside[proxy]
        if not self._inside_of[account]:
            del self._inside_of[account]

    def _leave_queue(self, proxy: int, account: Account, turn: "asyncio.Future[None]") -> None:
        queues = self._outside.get(proxy, {})
        queues.get(account, {}).pop(turn, None)
        if not queues.get(account):
            queues.pop(account, None)
        if not queues:
            self._outside.pop(proxy, None)
