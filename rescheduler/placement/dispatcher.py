"""Which instance a request goes to: prefill by least load, decode by the routing policy."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any, Generic, TypeVar

import numpy as np

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.engines.deployment import BackgroundOptions, ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.guarded_policy import (
    GuardedPolicy,
    PrefillBudgets,
    ShadowPolicy,
    crowded_view,
    guarded_view,
)
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Decision, Placements, R
from rescheduler.placement.waiting_line import (
    Pool,
    has_leftover,
    still_waiting,
    taken_out,
)
from rescheduler.routing.heuristics import JSQLoad
from rescheduler.routing.policy import Needs, RoutingPolicy
from rescheduler.step_time.profile import MeanStepTime

Instances = frozenset[InstanceState]
P = TypeVar("P")

logger = logging.getLogger("headway.serve")

_APART_SECONDS, _LOOK_SECONDS = 0.02, 0.1
"""Between two looks for room at least, and after which there may be more though nothing ended."""
_LOOKED_AT = 64
"""Accounts whose first request is looked at in one look."""


class Background(Generic[R]):
    """Gives background requests the places that all others leave.

    They are looked at when no other request waits, one at a time, in their own order, and as long
    as there is room. Where another request waits nevertheless, one that runs gives way.

    Args:
        dispatcher: places all requests.
        pool: those of background that wait.
        others: those that wait and are served before.
        placements: of all requests.
        prefills: instances that prefill.
    """

    def __init__(
        self,
        dispatcher: "Dispatcher[R]",
        pool: Pool[R],
        others: Pool[R],
        placements: Placements[R],
        prefills: Sequence[InstanceState],
        options: BackgroundOptions,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._others = others
        self._placements = placements
        self._prefills = prefills
        self._options = options
        self._clock = clock
        self._look: asyncio.TimerHandle | None = None
        self._due = inf
        self._looked = -inf
        self._latest: dict[InstanceState, tuple[R, float]] = {}  # until it has begun
        self._rests_until: dict[InstanceState, float] = {}
        self._failed = False

    def began(self, request: R, instance: InstanceState) -> None:
        r"""Note that a request has begun to generate on an instance, or that it is prefilled there.

        If it is of background, and took t seconds from its place until now, no other one is begun
        there for :math:`t \,(1 / \text{prefill} - 1)` seconds.
        """
        latest = self._latest.get(instance)
        if latest is not None and latest[0] is request:
            now = self._clock()
            rest = (now - latest[1]) * (1.0 / self._options.prefill - 1.0)
            self._rests_until[instance] = now + rest
            del self._latest[instance]
        self.wake()

    def rests(self, instance: InstanceState) -> bool:
        """Return whether none is to begin on an instance yet, since another one just has."""
        return self._clock() < self._rests_until.get(instance, -inf)

    def wake(self, seconds: float = 0.0) -> None:
        """Look for room so many seconds from now, or soon."""
        if not self._pool.waiting:
            return
        when = max(self._clock() + seconds, self._looked + _APART_SECONDS)
        if self._due <= when:
            return
        if self._look is not None:
            self._look.cancel()
        self._due = when
        self._look = asyncio.get_running_loop().call_at(when, self._give_places)

    def give_way(self, instances: Sequence[InstanceState]) -> None:
        """Have one that runs on any of these instances leave it, unless one is about to.

        That which holds most: so the fewest have to.
        """
        on = [request for instance in instances for request in self._placements.on(instance)]
        running = [request for request in on if request.background]
        if any(request.gives_way for request in running):
            return
        leaving = [request for request in running if request.can_give_way]
        if leaving:
            max(leaving, key=lambda request: request.context_tokens).give_way()

    def _give_places(self) -> None:
        self._due, self._looked = inf, self._clock()
        try:
            self._give(self._decode, self._pool.for_decode)
            self._give(self._prefill, self._pool.for_prefill)
            self._failed = False
        except Exception:
            if not self._failed:
                logger.exception("background requests wait, since no room can be looked for")
            self._failed = True
        self.wake(_LOOK_SECONDS)

    def _give(self, takes: Callable[[R], bool], places: Mapping[R, asyncio.Future[Any]]) -> None:
        """Give the first that fits a place, as long as there is one and no other request waits."""
        while not self._others.waiting:
            firsts = self._firsts(places)
            taken = next((i for i, request in enumerate(firsts) if takes(request)), None)
            if taken is None:
                return
            self._pool.accounts.passed_over(firsts[:taken])

    def _decode(self, request: R) -> bool:
        """Give a request a decode instance; return whether it waits no more."""
        places = self._pool.for_decode
        instance: InstanceState | None = None
        with taken_out(request, places):
            instances = self._dispatcher.with_leftover(request)
            instance = self._dispatcher.place_by_policy(request, instances) if instances else None
        if instance is not None:
            self._latest[instance] = request, self._clock()
            places.pop(request).set_result(instance)
        return request not in places

    def _prefill(self, request: R) -> bool:
        """Give a request a prefill instance; return whether it waits no more."""
        places = self._pool.for_prefill
        available = [one for one in self._prefills if one.available and one.serves(request.model)]
        if not available:
            places.pop(request).set_result(None)
            return True
        idle = [one for one in available if not self._placements.on(one) and not self.rests(one)]
        # What has been prefilled occupies its prefill instance until it is placed.
        with taken_out(request, places):
            if idle and not self._pool.for_decode and self._dispatcher.with_leftover(request):
                self._pool.accounts.placed(request)
                request.begin_prefill(idle[0])
                self._latest[idle[0]] = request, self._clock()
                places.pop(request).set_result(idle[0])
        return request not in places

    def _firsts(self, places: Mapping[R, asyncio.Future[Any]]) -> list[R]:
        """Return the first request of each account: one without room holds back no other client."""
        waiting = still_waiting(places)
        if len(waiting) > 1:
            waiting = self._dispatcher.in_order(self._pool, waiting)[0]
        firsts: dict[Account, R] = {}
        for request in waiting:
            firsts.setdefault(request.account, request)
        return list(islice(firsts.values(), _LOOKED_AT))


class Dispatcher(Generic[R]):
    """The two pools in which requests wait: for a prefill instance, and then for a decode one.

    Args:
        policy: chooses the decode instance.
        forecasts: of remaining lengths; None if no engine publishes them.
        budgets: of prompts that can be computed in time, if the policy goes by them.
        pool: of the requests that wait; as they come, with accounts of its own, when None.
        background: of background requests, which come after all others, likewise.
        shadow: decides too, and does not act; None: there is none.
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
    ) -> None:
        self.shadow = None if shadow is None else ShadowPolicy(shadow, clock)
        self._pool = pool or Pool(None, Accounts(options.accounts))
        self._background_pool = background or Pool(None, Accounts(options.accounts))
        self.accounts = self._pool.accounts
        self.background_accounts = self._background_pool.accounts
        self._placements = placements
        self._policy = policy
        self._step = step
        self._prefills = [one for one in instances if one.instance.role == "prefill"]
        self._decodes = [one for one in instances if one.instance.role == "decode"]
        for accounts in (self.accounts, self.background_accounts):
            accounts.group_of = self._connected
        at_once = JSQLoad() if policy.holds_back() else policy
        self._decides = GuardedPolicy(policy, clock)
        self._decides_at_once = GuardedPolicy(at_once, clock)
        needs = max(policy.needs, Needs.COUNTS if shadow is None else shadow.needs)
        self._forecasts = forecasts if needs >= Needs.LENGTHS else None
        self._budgets = budgets
        self._options = options
        self._clock = clock
        self._all_forecasts = forecasts
        self._background = Background(
            self,
            self._background_pool,
            self._pool,
            placements,
            self._prefills,
            options.background,
            clock,
        )
        self._listed: list[frozenset[str] | None] = []
        self._components: list[Instances] = []
        self._dispatched = 0
        self._round_due = self._undecided = False
        self._last_round = -inf

    @property
    def waiting(self) -> Sequence[R]:
        """Requests that wait for a decode instance, in the order of service; none of background."""
        return self.in_order(self._pool, list(self._pool.for_decode))[0]

    @property
    def in_line(self) -> list[R]:
        """Requests without a decode instance, in the order in which they will get one."""
        prefilled = (one for instance in self._prefills for one in self._placements.on(instance))
        for_prefill = self.in_order(self._pool, list(self._pool.for_prefill))[0]
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
        return self._usable_for(self._lacking(request.model), self.usable)

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
        if self._pool.line is not None:
            self._pool.line.compile()

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
        lacking = {model: self._lacking(model) for model in {one.model for one in requests}}
        groups: dict[tuple[Instances, Instances], list[R]] = {}
        for request in requests:
            groups.setdefault((lacking[request.model], request.avoid), []).append(request)
        for (without_model, avoid), alike in groups.items():
            having = self._usable_for(without_model, usable)
            instances = [one for one in having if one not in avoid] or having
            if instances:
                places, decision = self._assign(alike, instances, policy)
                for request, instance in zip(alike, places, strict=True):
                    yield request, instance, decision

    def _connected(self, model: str) -> Instances:
        """Return the instances for which requests for a model compete, with whom these compete too.

        Two are connected if they have a model in common, prefill instances among them. No instance
        stands for all of them, as where one has not listed its models. A name that none has goes
        with the first that are connected.
        """
        listed = [one.models for one in (*self._prefills, *self._decodes)]
        if listed != self._listed:
            self._listed, self._components = listed, self._found_components()
        if len(self._components) < 2:
            return frozenset()
        chosen = (one for one in self._components if any(each.serves(model) for each in one))
        return next(chosen, self._components[0])

    def _found_components(self) -> list[Instances]:
        components: list[Instances] = []
        models: list[frozenset[str]] = []
        for instance in (*self._prefills, *self._decodes):
            if instance.models is None:
                return []
            joined, names = frozenset({instance}), instance.models
            for k in reversed(range(len(components))):
                if models[k] & instance.models:
                    joined, names = joined | components.pop(k), names | models.pop(k)
            components.append(joined)
            models.append(names)
        return components

    def _lacking(self, model: str) -> Instances:
        """Return the decode instances without a model; none where no instance is known to have it.

        Then whichever is asked says what it thinks of the name.
        """
        lacking = frozenset(one for one in self._decodes if not one.serves(model))
        return lacking if len(lacking) < len(self._decodes) else frozenset()

    def _usable_for(
        self, lacking: Instances, usable: Sequence[InstanceState]
    ) -> Sequence[InstanceState]:
        """Return those of usable instances that have a model.

        One that drains takes requests while no other instance in service has it.
        """
        if not lacking:
            return usable
        having = [one for one in usable if one not in lacking]
        return having or [one for one in self._decodes if one.breaker.closed and one not in lacking]

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
                    self._compare(self.shadow, view, chosen)
                return places, decision
        except Exception:
            if not self._undecided:
                logger.exception("no decision by what is known; by the number of requests instead")
            self._undecided = True
        return self._by_count(len(requests), instances), None

    def _compare(self, shadow: ShadowPolicy, view: ClusterView, chosen: Sequence[int]) -> None:
        """Let the shadow decide; whatever goes wrong there changes nothing."""
        try:
            shadow.compare(view, chosen)
        except Exception:
            shadow.decisions["none"] += len(chosen)
            logger.debug("the shadow %s did not decide", shadow.policy.name, exc_info=True)

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
        waiting, alone = self.in_order(self._pool, still_waiting(places))
        if alone and not self._usable_for(self._lacking(waiting[0].model), self.usable):
            alone = False  # what has its model is out of service: that is no reason for others
        again = waiting[0] if alone and len(waiting) > 1 else None
        if again is not None:
            del waiting[1:]
        for request, instance, decision in self._chosen(waiting, self._decides, self.usable):
            if instance is not None:
                with taken_out(request, places):
                    self._place_on(request, instance, decision)
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

    def _have_given_way(self) -> None:
        """Have a background request leave for one that has waited while others were placed."""
        rounds = 2 * self._policy.decide_every()
        now = self._clock()
        waiting = still_waiting(self._pool.for_decode)
        if any(now - request.waiting_since >= rounds for request in waiting):
            self._background.give_way(self.usable)

    def with_leftover(self, request: R) -> list[InstanceState]:
        """Return the decode instances on which there is room for a background request."""
        begun = [
            one
            for one in self._usable_for(self._lacking(request.model), self.usable)
            if not self._background.rests(one)
            and all(other.generating for other in self._placements.on(one))
        ]
        if not begun:
            return []
        if self._all_forecasts is not None:
            self._all_forecasts.refresh()
        shown, view = guarded_view(
            "placing",
            self._placements,
            begun,
            [request],
            self._all_forecasts,
            self._clock(),
            self._step.seconds,
        )
        left = has_leftover(view, self._options.background)
        return [one for one, has_room in zip(shown, left, strict=True) if has_room]

    def place_by_policy(
        self, request: R, instances: Sequence[InstanceState]
    ) -> InstanceState | None:
        """Place a background request by the policy on one of these instances, if it wants to."""
        for _, instance, decision in self._chosen([request], self._decides, instances):
            if instance is not None:
                self._place_on(request, instance, decision)
                return instance
        return None

    def in_order(self, pool: Pool[R], waiting: list[R]) -> tuple[list[R], bool]:
        """Return requests in the order of service, and whether the first holds back the others."""
        return pool.in_order(waiting, self._clock(), self._options.pool_seconds / 3)

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

    def _grant_prefills(self) -> None:
        """Have requests prefilled, as long as there is room for what is prefilled ahead.

        A request whose model no prefill instance has is prefilled by its decode instance.
        """
        places = self._pool.for_prefill
        if not places:
            return
        most = self._options.prefill_concurrency
        available = _lively([instance for instance in self._prefills if instance.available])
        loads = {instance: len(self._placements.on(instance)) for instance in available}
        ahead = len(self._pool.for_decode) + sum(loads.values())
        if available and (ahead >= self._options.ahead or min(loads.values()) >= most):
            return
        for request in self.in_order(self._pool, list(places))[0]:
            place = places[request]
            having = [one for one in available if one.serves(request.model)]
            if having and not place.done():
                least = min(having, key=lambda one: loads[one] + len(one.others))
                full = ahead >= self._options.ahead or min(loads.values()) >= most
                if full or not self._fits(request, least):
                    return
                if loads[least] >= most:
                    continue  # others may go to instances without this model
                loads[least] += 1
                ahead += 1
            with taken_out(request, places):
                if having and not place.done():
                    self.accounts.placed(request)
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
