"""Accounts of all clients: who a request is for, and how much of what is shared it may have."""

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from statistics import median, median_low

from rescheduler.engines.proxy_options import AccountOptions
from rescheduler.ordering.fairness import OUTPUT_WEIGHT
from rescheduler.placement.account import OTHERS, AcceptedKeys, Account, Group
from rescheduler.placement.placeable import Placeable, R

_MOST_ACCOUNTS = 1024
_FIRST_SERVICE, _LEARNS = 500.0, 0.02
_LEAST_COST = 50.0
"""Of a place, as a share of a mean request."""
_CHARGE_SECONDS = 0.1
_BREAKS = 1.0
"""Strictness of an account's promises from which on none of them is a reason to go first."""
_NAME = re.compile(r"[\w.@:/+-]{1,64}", re.ASCII)


def corrected(request: Placeable, left: float) -> float:
    """Return a forecast of tokens, corrected by what those of its account were wrong by."""
    left *= request.account.correction
    if request.max_tokens is not None:
        left = min(left, float(request.max_tokens - request.generated_tokens))
    return left


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
        salt: of digests, which all proxies of a deployment share; a random one when empty.

    Attributes:
        keys: that engines have accepted.
        group_of: returns what stands for the instances that have a model, however it is named.
        lacking: returns what stands for the instances that lack a model, likewise.
        virtual_times: most service that an account had had as it got a place, by that group.
        mean_service: of a request that has ended, in prompt tokens: the median of the accounts'
            means and of what is taken before any, which no single account sets.
    """

    def __init__(
        self,
        options: AccountOptions,
        checks_keys: bool = False,
        clock: Callable[[], float] = time.monotonic,
        salt: bytes = b"",
    ) -> None:
        self._options = options
        self._checks_keys = checks_keys
        self._clock = clock
        self._charged_at = -inf
        self.keys = AcceptedKeys(clock, salt)
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._waiting: dict[Account, None] = {}
        self.group_of: Callable[[str], Group] = lambda model: None
        self.lacking: Callable[[str], Group] = lambda model: None
        self.virtual_times: dict[Group, float] = {}
        self.mean_service = _FIRST_SERVICE

    def of(self, address: str, headers: Mapping[str, str]) -> Account:
        """Return whom a request is for, by its client's address and its headers."""
        if self._options.header is not None:
            name = _value(headers, self._options.header).strip()
            if name:
                return self.named(name if _NAME.fullmatch(name) else self.keys.digest(name))
        has_key = self._checks_keys and bool(_value(headers, "Authorization"))
        known = has_key and self.keys.knows(headers)
        return self.named(self.keys.of(headers) if known else address)

    def named(self, name: str) -> Account:
        """Return the account of that name."""
        account = self._accounts.get(name)
        if account is None:
            if len(self._accounts) >= _MOST_ACCOUNTS and not self._forget():
                return self.named(OTHERS) if name != OTHERS else self._add(name)
            account = self._add(name)
        self._accounts.move_to_end(name)
        return account

    def at_work(self) -> tuple[int, float]:
        """Return how many accounts have requests, and the largest share of them that one has."""
        unfinished = [one.unfinished for one in self._accounts.values() if one.unfinished]
        return len(unfinished), max(unfinished) / sum(unfinished) if unfinished else 0.0

    def refused_key(self) -> None:
        """Note that an engine has refused a request for want of a key."""
        self._checks_keys = True

    def began(self, request: Placeable) -> None:
        """Note a request that has just arrived."""
        request.account.unfinished += 1

    @contextmanager
    def waits(self, request: Placeable) -> Iterator[None]:
        """Note that a request waits for a place while the body runs.

        An account that had none waiting for these instances begins where those are that are served
        now: it has no claim to what others had meanwhile.
        """
        account, group = request.account, self.group_of(request.model)
        request.group = group
        if not account.waiting[group]:
            account.lift(group, self.virtual_times.get(group, 0.0))
        self._waiting[account] = None
        account.waiting[group] += 1
        try:
            yield
        finally:
            account.waiting[group] -= 1
            account.waiting += Counter()  # none that is 0
            if not account.waiting:
                del self._waiting[account]

    def passed_over(self, requests: Iterable[Placeable]) -> None:
        """Note that others got places for which these do not fit: they have no claim to those."""
        for request in requests:
            virtual_time = self.virtual_times.get(request.group, 0.0)
            request.account.come_up(request.group, virtual_time)

    def could_not_go(
        self,
        rivals: Collection[Placeable],
        placed: Placeable,
        prefilled: Container[Account] = (),
        others: Iterable[Account] = (),
    ) -> None:
        """Note that a request got a place where none of some accounts' waiting requests can go.

        They have no claim to it: the one of them that has had least comes up to what the account
        of that request had had before, and the others as far, so that none gets ahead of another.
        It is one with requests that are prefilled, if any has: who has to be prefilled may wait for
        these to go. None comes up beyond where newcomers begin: else each newcomer would lift its
        rivals by what the placed account has only been promised.

        Args:
            rivals: a request of each of these accounts, which compete for the same instances.
            placed: that request.
            prefilled: accounts with requests that wait for nothing but a place to decode.
            others: with which the rivals compete as well, beyond which none of them comes up.
        """
        account, group = placed.account, placed.group
        rivals = [one for one in rivals if one.group == group]
        if not rivals:
            return
        before = account.served(group) - account.charges[placed] / account.weight
        most = min((one.served(group) for one in others), default=inf)
        before = min(before, self.virtual_times.get(group, 0.0), most)
        first = [one for one in rivals if one.account in prefilled] or rivals
        behind = before - min(one.account.served(group) for one in first)
        if behind > 0.0:
            for request in rivals:
                request.account.come_up(group, request.account.served(group) + behind)

    def placed(self, request: Placeable, for_prefill: bool = False) -> None:
        """Charge a request that gets a place, with what it is expected to take.

        A prefill does not raise the virtual time: where the others wait only for a decode instance,
        an account that is far ahead may be prefilled.
        """
        request.had_decode_place = request.had_decode_place or not for_prefill
        charges = request.account.charges
        if request not in charges:
            request.group = self.group_of(request.model)
        settled = request.account.settled.setdefault(request.group, 0.0)
        if not for_prefill:
            virtual_time = self.virtual_times.get(request.group, 0.0)
            self.virtual_times[request.group] = max(virtual_time, settled)
        length = request.foreseen_tokens * request.account.correction
        if request.max_tokens is not None:
            length = min(length, float(request.max_tokens))
        left = max(length - request.generated_tokens, 0.0)
        charges[request] = self.cost(request, left * request.answers)

    def ahead(self, account: Account, group: Group) -> float:
        """Return how far an account is ahead of the virtual time of a group of instances."""
        return account.served(group) - self.virtual_times.get(group, 0.0)

    def ended(self, request: Placeable, by_itself: bool) -> None:
        """Charge a request that has ended with what it took.

        Of an answer that was not read token by token that is what its engine has counted, or at
        least what was expected, unless only its prompt has had a place. One that an engine refused
        has had a place as any other: otherwise whoever is refused would always be the one that has
        had least.
        """
        account, charged = request.account, request.account.charges.get(request)
        account.unfinished -= 1
        generated, was_cut = request.generated_tokens, request.was_cut
        if request.several:
            generated = round(request.counted_tokens / request.answers)
            was_cut = request.max_tokens is not None and generated >= request.max_tokens
        if request.foreseen_tokens and generated:
            account.learn(request.foreseen_tokens, generated, by_itself and not was_cut)
        if charged is None:
            return
        service = self.cost(request)
        if request.counted is not None:
            service = max(request.counted, _LEAST_COST)
        elif request.had_decode_place and (request.several or not request.generated_tokens):
            service = max(service, charged)
        if request.refused:
            prompt_known = request.prompt_is_known
            service = max(self.service(request) if prompt_known else 0.0, self.mean_service)
        had = account.served(request.group) if charged > service else 0.0
        account.settle(request, service)
        if charged > service:
            # What it is given back is a claim to what waits now, at most: else others stand still.
            mean = account.mean_service or self.mean_service
            claim = account.waiting[request.group] * mean / account.weight
            virtual_time = self.virtual_times.get(request.group, 0.0)
            account.come_up(request.group, min(had, virtual_time - claim))
        if request.generated_tokens and not request.several:
            mean = service if account.mean_service is None else account.mean_service
            account.mean_service = mean + _LEARNS * (service - mean)
            means = [one.mean_service for one in self._accounts.values()]
            known = [one for one in means if one is not None]
            self.mean_service = median_low([_FIRST_SERVICE, _FIRST_SERVICE, *known])

    def charge_outgrown(self) -> None:
        """Charge, a few times a second, what has outlived its forecast with what it took so far."""
        now = self._clock()
        if now - self._charged_at < _CHARGE_SECONDS:
            return
        self._charged_at = now
        for account in self._accounts.values():
            for request, charged in account.charges.items():
                account.charges[request] = max(charged, self.service(request))

    def service(self, request: Placeable, more_tokens: float = 0.0) -> float:
        """Return what a request has taken, and takes until so many tokens from now.

        A prompt that no engine has counted is known by its bytes. Those of pictures and the like
        say less: they are taken for a mean request at most.
        """
        prompt = float(request.prompt_tokens)
        if not request.prompt_is_known:
            most = self.mean_service * request.answers
            prompt -= max(request.media_tokens - most, 0.0)
        return prompt + OUTPUT_WEIGHT * (request.generated_tokens + more_tokens)

    def cost(self, request: Placeable, more_tokens: float = 0.0) -> float:
        """Return what a request is charged for that: as 50 tokens at least.

        A place costs more than its tokens: it is prefilled, and passed on. Otherwise requests of
        one token would be free, and whoever sends enough of them would have all places.
        """
        return max(self.service(request, more_tokens), _LEAST_COST)

    def may_wait(self, account: Account, pool: int) -> bool:
        """Return whether one more request of an account may wait where a pool is full.

        One may that has none there, and others while they have fewer than their share among those
        who wait, and not twice as many wait in all as the pool holds.
        """
        if not account.waiting:
            return True
        weights = sum(one.weight for one in self._waiting)
        share = max(1.0, pool * account.weight / weights)
        total = sum(one.waiting.total() for one in self._waiting)
        return account.waiting.total() + 1 <= share and total < 2 * pool

    def leading(self, urgent: Iterable[R], waiting: Iterable[R]) -> list[R]:
        """Return those of urgent requests that may go before others of what waits.

        Those of an account that is ahead of another one by more than a request, or that has broken
        too many promises, have their turn as all do.
        """
        self.charge_outgrown()
        ahead: dict[tuple[Account, Group], float] = {}
        strictest: dict[Account, float] = {}
        leading: list[R] = []
        least: dict[Group, float] = {}
        for account, group in {(request.account, request.group) for request in waiting}:
            least[group] = min(self.ahead(account, group), least.get(group, inf))
        for request in urgent:
            account, rival = request.account, (request.account, request.group)
            if rival not in ahead:
                ahead[rival] = self.ahead(*rival)
                strictest[account] = max(account.strictness.values(), default=0.0)
            kept, one_more = strictest[account] < _BREAKS, self.mean_service / account.weight
            if kept and ahead[rival] <= least.get(request.group, 0.0) + one_more:
                ahead[rival] += one_more
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
