"""Which instance a request goes to: prefill by least load, decode by the routing policy."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.background import Background
from rescheduler.placement.claims import Claims
from rescheduler.placement.guarded_policy import (
    GuardedPolicy,
    PrefillBudgets,
    crowded_view,
    guarded_view,
)
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.model_places import Instances, ModelPlaces
from rescheduler.placement.placeable import Decision, Placements, R
from rescheduler.placement.shadows import ShadowOrder, ShadowPolicy
from rescheduler.placement.waiting_line import Pool, is_promised, still_waiting, taken_out
from rescheduler.routing.heuristics import JSQLoad
from rescheduler.routing.policy import Needs, RoutingPolicy
from rescheduler.step_time.profile import MeanStepTime
from rescheduler.transfer.migration_params import Suspended

P = TypeVar("P")

logger = logging.getLogger("headway.serve")


class Dispatcher(Generic[R]):
    """The two pools in which requests wait: for a prefill instance, and then for a decode one.

    Args:
        policy: chooses the decode instance.
        forecasts: of remaining lengths; None if no engine publishes them.
        budgets: of prompts that can be computed in time, if the policy goes by them.
        pool: of the requests that wait; as they come, with accounts of its own, when None.
        background: of background requests, which come after all others, likewise.
        shadow: decides too, and does not act; None: there is none.
        shadow_order: likewise of the order.
    """

    def __init__(
        self,
        placements: Placements[R],
        instances: Sequence[InstanceState],
        policy: RoutingPolicy,
        options: ProxyOptions,
        step: MeanStepTime,
        clock: Callable[[], float],
        forecasts: LiveForecasts | None = None,
        budgets: PrefillBudgets | None = None,
        pool: Pool[R] | None = None,
        background: Pool[R] | None = None,
        shadow: RoutingPolicy | None = None,
        shadow_order: ShadowOrder[R] | None = None,
    ) -> None:
        self.shadow = None if shadow is None else ShadowPolicy(shadow, clock)
        self.shadow_order = shadow_order
        self._pool = pool or Pool(None, Accounts(options.accounts))
        self._background_pool = background or Pool(None, Accounts(options.accounts))
        self.accounts = self._pool.accounts
        self.background_accounts = self._background_pool.accounts
        self._placements = placements
        self._policy = policy
        self._step = step
        self._prefills = [one for one in instances if one.instance.role == "prefill"]
        self._decodes = [one for one in instances if one.instance.role == "decode"]
        self._models = ModelPlaces(self._prefills, self._decodes)
        for accounts in (self.accounts, self.background_accounts):
            accounts.group_of, accounts.lacking = self._models.connected, self._models.lacking
        at_once = JSQLoad() if policy.holds_back() else policy
        self._decides = GuardedPolicy(policy, clock)
        self._decides_at_once = GuardedPolicy(at_once, clock)
        needs = max(policy.needs, Needs.COUNTS if shadow is None else shadow.needs)
        self._forecasts = forecasts if needs >= Needs.LENGTHS else None
        self._budgets = budgets
        self._options = options
        self._clock = clock
        self._longest = options.pool_seconds / 3
        self._background = Background(
            self._background_pool,
            self._pool,
            placements,
            self._prefills,
            options.background,
            step,
            clock,
            forecasts,
            self._longest,
            self.usable_for,
            self._place_by_policy,
        )
        self._dispatched = 0
        self._round_due = self._undecided = False
        self._last_round = -math.inf

    @property
    def waiting(self) -> Sequence[R]:
        """Requests that wait for a decode instance, in the order of service; none of background."""
        return self._in_order(self._pool, list(self._pool.for_decode))[0]

    @property
    def in_line(self) -> list[R]:
        """Requests without a decode instance, in the order in which they will get one."""
        prefilled = (one for instance in self._prefills for one in self._placements.on(instance))
        for_prefill = self._in_order(self._pool, list(self._pool.for_prefill))[0]
        return [*self.waiting, *prefilled, *for_prefill]

    @property
    def usable(self) -> list[InstanceState]:
        """Decode instances that new requests may go to.

        One that drains takes them while all others are out of service: better there than nowhere.
        So does one that is silent, which may be paused, or overloaded.
        """
        available = _lively([instance for instance in self._decodes if instance.available])
        if available or all(instance.draining for instance in self._decodes):
            return available
        return [instance for instance in self._decodes if instance.breaker.closed]

    def usable_for(self, request: R) -> Sequence[InstanceState]:
        """Return those that a request may go to: they have its model, as far as is known."""
        return self._models.usable_for(self._models.lacking(request.model), self.usable)

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill instance; none of background."""
        return len(self._pool.for_prefill)

    @property
    def waiting_in_background(self) -> int:
        """Background requests that wait for an instance."""
        return self._background_pool.waiting

    def admit(self, account: Account) -> None:
        """Refuse a new request of an account when there is no room for it.

        Raises:
            RequestRefusedError: 503 if no decode instance is in service, 429 if the pool is full,
                and the account has its share of it.
        """
        if not self.usable:
            now = self._clock()
            soonest = min(i.breaker.seconds_to_probe(now) for i in self._decodes)
            raise RequestRefusedError(
                503, "no decode instance is in service", retry_after=max(1, math.ceil(soonest))
            )
        waiting = self._pool.waiting
        if self._pool.is_full(account, self._options.pool):
            # A place becomes free about every token time; the pool is this many of them long.
            seconds = min(60, max(1, round(waiting * self._step.seconds)))
            raise RequestRefusedError(
                429, f"{waiting} requests wait already; try again later", retry_after=seconds
            )

    def admit_background(self, account: Account) -> None:
        """Refuse a new background request of an account when there is no room for it.

        Raises:
            RequestRefusedError: 429 if too many wait, and the account has its share of them.
        """
        account = self.background_accounts.named(account.name)
        if self._background_pool.is_full(account, self._options.background.pool):
            waiting = self._background_pool.waiting
            message = f"{waiting} background requests wait already; try again later"
            raise RequestRefusedError(429, message, retry_after=5)

    async def take_prefill(self, request: R) -> InstanceState | None:
        """Wait for a place on a prefill instance; `wake` when the request has left it.

        Returns:
            The instance, or None if none is in service, so that the decode instance prefills.

        Raises:
            RequestRefusedError: 503, no place in time.
        """
        place: asyncio.Future[InstanceState | None] | None = None
        try:
            async with self._waits(request, self._pool_of(request).for_prefill, "prefill") as place:
                self._grant_prefills()
                self._background.wake()
                return await place
        except BaseException:
            granted = place is not None and place.done() and not place.cancelled()
            if place is not None and granted and not place.exception() and place.result():
                request.prefill_failed()  # in the very same moment
            raise

    async def place(self, request: R) -> InstanceState:
        """Wait until the policy gives a request a decode instance; it is counted there then.

        Raises:
            RequestRefusedError: 503, none in time, or none that could ever hold the request.
        """
        request.wait(self._clock())
        async with self._waits(request, self._pool_of(request).for_decode, "decode") as place:
            self.wake()
            return await place

    @asynccontextmanager
    async def _waits(
        self, request: R, places: dict[R, asyncio.Future[P]], stage: str
    ) -> AsyncIterator[asyncio.Future[P]]:
        """Have a request wait for a place while the body runs; refuse it if none comes in time."""
        place: asyncio.Future[P] = asyncio.get_running_loop().create_future()
        seconds = self._options.pool_seconds
        try:
            with self._pool_of(request).accounts.waits(request):
                places[request] = place
                async with asyncio.timeout(None if request.background else seconds):
                    yield place
        except TimeoutError as error:
            message = f"no {stage} instance had room within {seconds:g} s"
            raise RequestRefusedError(503, message, retry_after=5) from error
        finally:
            places.pop(request, None)

    def wake(self) -> None:
        """Decide soon, as often as the policy does: a request came or went, or an instance did."""
        self._background.wake()
        if not self._round_due:
            self._round_due = True
            loop = asyncio.get_running_loop()
            seconds = self._last_round + self._policy.decide_every() - self._clock()
            if seconds > 0:
                loop.call_later(seconds, self._decide)
            else:
                loop.call_soon(self._decide)
        self._grant_prefills()

    def began(self, request: R, instance: InstanceState) -> None:
        """Note that a request has its first token on an instance, or is prefilled there."""
        self._background.began(request, instance)

    def compile(self) -> None:
        """Decide once on a made-up cluster, so that no request waits for a compiler."""
        for guarded in (self._decides, self._decides_at_once):
            guarded.policy.assign(crowded_view(len(self._decodes)))
        if self.shadow is not None:
            self.shadow.policy.assign(crowded_view(len(self._decodes)))
        shadow_line = None if self.shadow_order is None else self.shadow_order.line
        for line in (self._pool.line, shadow_line):
            if line is not None:
                line.compile()

    def has_another(self, request: R) -> bool:
        """Return whether an instance is in service that has not failed or turned away a request."""
        return any(instance not in request.avoid for instance in self.usable_for(request))

    def has_model_elsewhere(self, request: R) -> bool:
        """Return whether such an instance may have the request's model, as far as is known."""
        if not request.model:
            return False
        usable = [one for one in self.usable if one.serves(request.model)]
        return any(instance not in request.avoid for instance in usable)

    def choose(self, requests: Sequence[R], source: InstanceState) -> list[InstanceState | None]:
        """Return where running requests would go now; None where there is no room for one.

        By the policy, or by least KV load where that may hold requests back. All are on the same
        instance; what cannot read its KV cache, or does not have the model, is left out.
        """
        available = [one for one in self._decodes if one.available and not one.silent]
        targets = [one for one in available if not source.is_unlike(one)]
        may = [one for one in requests if any(target.serves(one.model) for target in targets)]
        chosen = self._chosen(may, self._decides_at_once, targets)
        found = {request: instance for request, instance, _ in chosen}
        return [found.get(request) for request in requests]

    def _chosen(
        self,
        requests: Sequence[R],
        policy: GuardedPolicy,
        usable: Sequence[InstanceState],
    ) -> Iterator[tuple[R, InstanceState | None, Decision | None]]:
        """Yield where a policy places requests, None for one that has to wait, and how it decided.

        A request goes where its model is, and to another instance than those that have just failed
        it, if there is any. Requests that may go elsewhere are decided on after those before them
        have been placed.
        """
        if self._forecasts is not None and requests:
            self._forecasts.refresh()
        lacking = self._models.lacking_of(requests)
        groups: dict[tuple[Instances, Instances], list[R]] = {}
        for request in requests:
            groups.setdefault((lacking[request.model], request.avoid), []).append(request)
        for (without_model, avoid), alike in groups.items():
            having = self._models.usable_for(without_model, usable)
            instances = [one for one in having if one not in avoid] or having
            if instances:
                places, decision = self._assign(alike, instances, policy)
                for request, instance in zip(alike, places, strict=True):
                    yield request, instance, decision

    def _assign(
        self,
        requests: Sequence[R],
        instances: Sequence[InstanceState],
        policy: GuardedPolicy,
    ) -> tuple[Sequence[InstanceState | None], Decision | None]:
        """Decide by a policy, or by the number of requests where no instance can be viewed."""
        began = time.time_ns()
        try:
            shown, view = guarded_view(
                "placing",
                self._placements,
                self._decodes if self._policy.whole_cluster else instances,
                requests,
                self._forecasts,
                self._clock(),
                self._step.seconds,
                self._dispatched,
                self._budgets,
            )
            usable = [instance in instances for instance in shown]
            if any(usable):
                if not all(usable):
                    view = replace(view, slots=np.where(usable, view.slots, 0))
                chosen = policy.assign(view)
                places = [shown[g] if g >= 0 else None for g in chosen]
                self._undecided = False
                decision = Decision(policy.decided_by, shown, view, began, time.time_ns())
                if self.shadow is not None and policy is self._decides:
                    self.shadow.compare(view, chosen)
                return places, decision
        except Exception:
            if not self._undecided:
                logger.exception("no decision by what is known; by the number of requests instead")
            self._undecided = True
        return self._by_count(len(requests), instances), None

    def _by_count(
        self, n_requests: int, instances: Sequence[InstanceState]
    ) -> list[InstanceState | None]:
        """Give each request to the instance that has the fewest, if any has a slot."""
        loads = {one: len(self._placements.on(one)) + len(one.others) for one in instances}
        places: list[InstanceState | None] = []
        for _ in range(n_requests):
            free = [instance for instance in instances if loads[instance] < instance.slots]
            places.append(min(free, key=loads.__getitem__, default=None))
            if free:
                loads[min(free, key=loads.__getitem__)] += 1
        return places

    def _decide(self) -> None:
        self._round_due = False
        self._last_round = self._clock()
        places = self._pool.for_decode
        waiting, alone = self._in_order(self._pool, still_waiting(places))
        if alone and not self.usable_for(waiting[0]):
            alone = False  # what has its model is out of service: that is no reason for others
        again = waiting[0] if alone and len(waiting) > 1 else None
        others, free = list[R](), list[InstanceState]()
        if again is not None:  # it holds back what it may go to itself
            held = self.usable_for(again)
            free = [one for one in self.usable if one not in held]
            others = [one for one in waiting[1:] if any(each.serves(one.model) for each in free)]
            del waiting[1:]
        claims = Claims(
            self.accounts, self._models, places, self._pool.for_prefill, self._may_prefill()
        )
        chosen = chain(
            self._chosen(waiting, self._decides, self.usable),
            self._chosen(others, self._decides, free),
        )
        for request, instance, decision in chosen:
            if instance is None:
                claims.passed_over(request)
                continue
            with taken_out(request, places):
                self._place_on(request, instance, decision)
                claims.placed(request, instance)
                places.pop(request).set_result(instance)
        self._refuse_too_large(places)
        self._refuse_too_large(self._background_pool.for_decode)
        placed = again is not None and again not in places
        if not placed:
            self._have_given_way()
        if placed or (places and self._policy.decide_every() > 0):
            self.wake()  # the others have their turn
        self._grant_prefills()

    def _place_on(
        self,
        request: R,
        instance: InstanceState,
        decision: Decision | None,
    ) -> None:
        self._dispatched += 1
        self._pool_of(request).accounts.placed(request)
        request.place(instance, decision)
        logger.debug(
            "request %s (%s), %d tokens: to %s",
            request.id,
            request.name,
            request.context_tokens,
            instance.name,
        )
        if self._budgets is not None:
            self._budgets.spend(instance, request)

    def _pool_of(self, request: R) -> Pool[R]:
        return self._background_pool if request.background else self._pool

    def arrived(self, request: R) -> None:
        """Note a request that has just arrived, with its client's account."""
        if request.background:  # what the others leave is nobody's share of theirs
            request.account = self.background_accounts.named(request.account.name)
        self._pool_of(request).accounts.began(request)

    def left(self, request: R, by_itself: bool) -> None:
        """Note that a request has ended, and what it took."""
        self._pool_of(request).accounts.ended(request, by_itself)

    def suspended(self, request: R) -> Suspended:
        """Return how the engine that has a request is to treat it when memory runs out.

        One of background makes room for the others. What has been promised stays, unless its
        account has more on that engine than another one, by more than a request, or has broken its
        promises: a promise is no ticket.
        """
        if request.background:
            return "first"
        if request.instance is None or not is_promised(request, self._clock()):
            return None
        beside = [one for one in self._placements.on(request.instance) if not one.background]
        return "last" if self.accounts.leading([request], beside) else None

    def _have_given_way(self) -> None:
        """Have a background request leave for one that has waited while others were placed."""
        rounds = 2 * self._policy.decide_every()
        now = self._clock()
        waiting = still_waiting(self._pool.for_decode)
        late = {one.model: one for one in waiting if now - one.waiting_since >= rounds}
        if late:
            usable = [one for request in late.values() for one in self.usable_for(request)]
            self._background.give_way(dict.fromkeys(usable))

    def _place_by_policy(
        self, request: R, instances: Sequence[InstanceState]
    ) -> InstanceState | None:
        """Place a background request by the policy on one of these instances, if it wants to."""
        for _, instance, decision in self._chosen([request], self._decides, instances):
            if instance is not None:
                self._place_on(request, instance, decision)
                return instance
        return None

    def _in_order(self, pool: Pool[R], waiting: list[R]) -> tuple[list[R], bool]:
        """Return requests in the order of service, and whether the first holds back the others."""
        ordered = pool.in_order(waiting, self._clock(), self._longest)
        if self.shadow_order is not None and pool is self._pool:
            self.shadow_order.compare(waiting, ordered[0])
        return ordered

    def _refuse_too_large(self, waiting: dict[R, asyncio.Future[InstanceState]]) -> None:
        """Refuse what no instance could hold if it were empty, also of those out of service.

        Only by the tokens that it has for certain: the length of a prompt may be a guess, and one
        that is too long is the engine's to refuse.
        """
        if not waiting:
            return
        room = max((one.kv_capacity for one in self._decodes if one.slots > 0), default=-1)
        for request, place in waiting.items():
            tokens = 1 + request.generated_tokens
            if tokens > room and not place.done():
                message = f"no decode instance can hold a request of {tokens} tokens"
                place.set_exception(RequestRefusedError(503, message, retry_after=60))

    def _prefilled(self) -> list[R]:
        """Return the requests that are prefilled ahead of those that decode."""
        on_prefills = (one for each in self._prefills for one in self._placements.on(each))
        return [*self._pool.for_decode, *on_prefills]

    def _may_prefill(self) -> bool:
        on_prefills = sum(len(self._placements.on(one)) for one in self._prefills)
        return len(self._pool.for_decode) + on_prefills < self._options.ahead

    def _grant_prefills(self) -> None:
        """Have requests prefilled, as long as there is room for what is prefilled ahead.

        A request whose model no prefill instance has is prefilled by its decode instance. Requests
        that only some decode instances have the model of get as large a part of that room as those
        have of the slots: the others are not to wait behind what waits for these. Where there is no
        room, those are prefilled for which an instance with their model would be idle. So it is
        behind a prompt that fits nowhere: others would take the memory that it waits for.
        """
        places = self._pool.for_prefill
        if not places:
            return
        most, differ = self._options.prefill_concurrency, self._models.differ
        available = _lively([instance for instance in self._prefills if instance.available])
        loads = {instance: len(self._placements.on(instance)) for instance in available}
        prefilled = self._prefilled()
        scarce = len(prefilled) >= self._options.ahead
        if available and ((scarce and not differ) or min(loads.values()) >= most):
            return
        candidates, idle = list(places), list[InstanceState]()
        if available and scarce:
            idle = self._models.idle(prefilled, self._placements)
            candidates = [one for one in places if any(each.serves(one.model) for each in idle)]
            if not candidates:
                return
        line = self._in_order(self._pool, candidates)[0]
        lacking, room = self._models.lacking_of(line), dict[Instances, int]()
        if differ and any(lacking.values()):
            room = self._models.rooms_ahead(lacking.values(), prefilled, self._options.ahead)
        for request in line:
            place, without_model = places[request], lacking[request.model]
            having = [one for one in available if one.serves(request.model)]
            if having and not place.done():
                if min(loads.values()) >= most or (scarce and not differ):
                    return
                fitting = [one for one in having if self._fits(request, one)]
                if not fitting:
                    if not scarce:
                        scarce, idle = True, self._models.idle(prefilled, self._placements)
                    continue
                least = min(fitting, key=lambda one: loads[one] + len(one.others))
                wider = [one for one in room if one <= without_model]
                if scarce:
                    may = any(one.serves(request.model) for one in idle)
                else:
                    may = all(room[one] > 0 for one in wider)
                if loads[least] >= most or not may:
                    continue  # others may go to instances without this model
                loads[least] += 1
                prefilled.append(request)
                scarce = scarce or len(prefilled) >= self._options.ahead
                if scarce and differ:
                    idle = self._models.idle(prefilled, self._placements)
                for one in wider:
                    room[one] -= 1
            with taken_out(request, places):
                if having and not place.done():
                    self.accounts.placed(request, for_prefill=True)
                    request.begin_prefill(least)
                del places[request]
                if not place.done():
                    place.set_result(least if having else None)

    def _fits(self, request: R, instance: InstanceState) -> bool:
        """Return whether a prompt fits beside what is kept for requests that wait, when last asked.

        Otherwise it would wait in the engine for memory that only decode instances can free. Its
        length may be a guess, and so counts as half of the memory at most.
        """
        engine = instance.engine
        if engine is None or not self._pool.for_decode:
            return True
        needs = min(request.prompt_tokens, instance.kv_capacity // 2)
        return engine.free_blocks * engine.block_size >= needs


def _lively(instances: list[InstanceState]) -> list[InstanceState]:
    """Return the instances of which something has been heard lately, or all if there are none."""
    return [instance for instance in instances if not instance.silent] or instances
