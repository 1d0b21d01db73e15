"""Accounts of all clients: who a request is for, and how much of what is shared it may have."""

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from statistics import median

from rescheduler.engines.deployment import AccountOptions
from rescheduler.ordering.fairness import OUTPUT_WEIGHT
from rescheduler.placement.accepted_keys import AcceptedKeys
from rescheduler.placement.account import Account
from rescheduler.placement.placeable import Placeable, R

__all__ = ["Accounts", "service_of"]

_MOST_ACCOUNTS = 1024
_FIRST_SERVICE, _LEARNS = 500.0, 0.02
_OTHERS = "others"
_BREAKS = 1.0
"""Strictness of an account's promises from which on none of them is a reason to go first."""
_NAME = re.compile(r"[\w.@:/+-]{1,64}", re.ASCII)


def service_of(request: Placeable, more_tokens: float = 0.0) -> float:
    """Return what a request has taken, and takes until so many tokens from now."""
    return request.prompt_tokens + OUTPUT_WEIGHT * (request.generated_tokens + more_tokens)


class Accounts:
    """The accounts of the clients of a deployment.

    A client is its address until an engine has accepted its API key; from then on it is that key,
    wherever it comes from. Keys count only where engines refuse others: else anybody could be
    many. A configured header, which what stands before the proxy sets, goes before both. Those
    that are known are bounded: who has been idle for longest is forgotten, and where nobody is,
    new clients share one account.

    Args:
        options: header and weights.
        checks_keys: engines are known to refuse what has no key.
        clock: in seconds.

    Attributes:
        keys: that engines have accepted.
        virtual_time: service that the account has had which is served now.
        mean_service: of requests that have ended, in prompt tokens.
    """

    def __init__(
        self,
        options: AccountOptions,
        checks_keys: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._checks_keys = options, checks_keys
        self.keys = AcceptedKeys(clock)
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self.virtual_time = 0.0
        self.mean_service = _FIRST_SERVICE

    def of(self, address: str, headers: Mapping[str, str]) -> Account:
        """Return whom a request is for, by its client's address and its headers."""
        if self._options.header is not None:
            name = _value(headers, self._options.header).strip()
            if name:
                return self.named(name if _NAME.fullmatch(name) else self.keys.digest(name))
        key = _value(headers, "Authorization")
        known = key and self._checks_keys and self.keys.knows({"Authorization": key})
        return self.named(self.keys.digest(key) if known else address)

    def named(self, name: str) -> Account:
        """Return the account of that name."""
        account = self._accounts.get(name)
        if account is None:
            if len(self._accounts) >= _MOST_ACCOUNTS and not self._forget():
                return self.named(_OTHERS) if name != _OTHERS else self._add(name)
            account = self._add(name)
        self._accounts.move_to_end(name)
        return account

    def refused_key(self) -> None:
        """Note that an engine has refused a request for want of a key."""
        self._checks_keys = True

    def began(self, request: Placeable) -> None:
        """Note a request that has just arrived."""
        if request.account.unfinished == 0:
            request.account.lift(self.virtual_time)
        request.account.unfinished += 1

    def placed(self, request: Placeable, waiting: Iterable[Account]) -> None:
        """Charge a request that gets a place, with what it is expected to take."""
        if request.account.taking(request) is None:
            least = min((one.served for one in waiting), default=request.account.served)
            self.virtual_time = max(self.virtual_time, least)
        foreseen = request.foreseen_tokens * request.account.correction
        left = max(foreseen - request.generated_tokens, 0.0)
        request.account.takes(request, service_of(request, left))

    def ended(self, request: Placeable, by_itself: bool) -> None:
        """Charge a request that has ended with what it took: nothing, if an engine refused it."""
        account = request.account
        account.unfinished -= 1
        if request.foreseen_tokens and request.generated_tokens:
            account.learn(request.foreseen_tokens, request.generated_tokens, by_itself)
        if account.taking(request) is None:
            return
        service = 0.0 if request.refused else service_of(request)
        account.settle(request, service)
        if service:
            self.mean_service += _LEARNS * (service - self.mean_service)

    def outgrown(self, request: Placeable) -> None:
        """Charge a request that has outlived what was expected of it."""
        charged = request.account.taking(request)
        if charged is not None and service_of(request) > charged:
            request.account.takes(request, service_of(request))

    def may_wait(self, account: Account, pool: int, waiting: Iterable[Placeable]) -> bool:
        """Return whether one more request of an account may wait where a pool is full.

        It may while fewer of it wait than its share among those who wait, and not twice as many
        wait in all as the pool holds.
        """
        counts = Counter(request.account for request in waiting)
        weights = sum(one.weight for one in {account, *counts})
        share = max(1.0, pool * account.weight / weights)
        return counts[account] + 1 <= share and counts.total() < 2 * pool

    def leading(self, urgent: Iterable[R], waiting: Iterable[R]) -> list[R]:
        """Return those of urgent requests that may go before others of what waits.

        Those of an account that is ahead of another one by more than a request, or that has broken
        too many promises, have their turn as all do.
        """
        ahead: dict[Account, float] = {}
        least = min((one.served for one in {request.account for request in waiting}), default=0.0)
        leading = []
        for request in urgent:
            account = request.account
            served = ahead.get(account, account.served)
            kept = self.strictness(account, request.promised_level) < _BREAKS
            if kept and served <= least + self.mean_service / account.weight:
                ahead[account] = served + self.mean_service / account.weight
                leading.append(request)
        return leading

    def strictness(self, account: Account, level: float) -> float:
        """Return how strictly a promise of a level is given to an account.

        One that has had none gets what is usual among the others, which no single one can change.
        """
        if level in account.strictness:
            return account.strictness[level]
        known = [
            one.strictness[level] for one in self._accounts.values() if level in one.strictness
        ]
        return median(known) if len(known) > 2 else 0.0

    def _add(self, name: str) -> Account:
        account = self._accounts[name] = Account(name, self._options.weights.get(name, 1.0))
        account.lift(self.virtual_time)
        return account

    def _forget(self) -> bool:
        """Forget the account that has been idle for longest; return whether there is one."""
        idle = next((one for one in self._accounts.values() if not one.unfinished), None)
        if idle is not None:
            del self._accounts[idle.name]
        return idle is not None


def _value(headers: Mapping[str, str], name: str) -> str:
    """Return a header, whose name may be in small letters."""
    return headers.get(name) or headers.get(name.lower(), "")
