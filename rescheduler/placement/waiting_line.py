"""Requests that wait, in the order of service."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import inf
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.engines.deployment import BackgroundOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.ordering import ServiceOrder
from rescheduler.ordering.fairness import interleave, slack
from rescheduler.ordering.service_order import Line, Room
from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts, corrected
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable, Placements, R
from rescheduler.step_time.mean_step_time import MeanStepTime

logger = logging.getLogger("headway.serve")

_LEAST_LEVEL = 0.5
"""Of a promise for which others wait: one that is likelier kept than broken."""
_MOST_IN_LINE = 256
"""Accounts between which a line is shared out; further ones share one."""
_FRESH_SECONDS = 0.1
"""Until what is expected of a waiting request is asked anew: many decisions are made meanwhile."""


def promised_first(requests: list[R], accounts: Accounts, now: float, longest: float) -> list[R]:
    """Return requests with those first that must start now to finish as promised.

    Of these the one with the earliest promise leads; one that is late already does not, nor one
    that was as likely to be broken, nor what `Accounts.leading` leaves out. The others keep their
    order; once the first of them has waited ``longest`` seconds, every second place is theirs, so
    that promises keep nobody out.
    """
    urgent = [
        one
        for one in requests
        if one.start_by <= now < one.finish_by and one.promised_level > _LEAST_LEVEL
    ]
    if urgent:
        urgent.sort(key=lambda request: request.finish_by)
        urgent = accounts.leading(urgent, requests)
    if not urgent:
        return requests
    chosen = set(urgent)
    others = [request for request in requests if request not in chosen]
    if not others or now - others[0].arrived < longest:
        return [*urgent, *others]
    mixed = [one for pair in zip(others, urgent, strict=False) for one in pair]
    n = min(len(others), len(urgent))
    return [*mixed, *urgent[n:], *others[n:]]


@contextmanager
def taken_out(request: R, pool: dict[R, "asyncio.Future[Any]"]) -> Iterator[None]:
    """Refuse a request where the body fails over it, so that the others of its pool go on."""
    try:
        yield
    except Exception:
        logger.exception("request %s (%s) cannot be placed; refused", request.id, request.name)
        place = pool.pop(request, None)
        if place is not None and not place.done():
            place.set_exception(RequestRefusedError(500, "the proxy failed; see its log"))


class WaitingLine(Generic[R]):
    """Says which of the waiting requests goes first.

    Args:
        order: of service, not that of arrival.
        decodes: that serve.
        forecasts: of remaining lengths; None if no engine publishes them, so that all requests
            are expected to be like those that ended lately.
        longest: seconds for which a request may wait; well before, it is overdue.
        accounts: between which the line is shared out, as the order says; None: it is not.
    """

    def __init__(
        self,
        order: ServiceOrder,
        decodes: Sequence[InstanceState],
        forecasts: LiveForecasts | None,
        step: MeanStepTime,
        clock: Callable[[], float],
        longest: float,
        accounts: Accounts | None = None,
    ) -> None:
        self._line, self._decodes = Line(order), decodes
        self._fairness, self._accounts = order.fairness, accounts
        self._step, self._clock = step, clock
        self._learns = forecasts is None
        self._forecasts = forecasts or LiveForecasts(None)
        self._latest = longest / 3
        self._left: dict[R, float] = {}
        self._left_at = clock()
        self._faulty: set[R] = set()

    def ended(self, request: R) -> None:
        """Learn from a request that has ended by itself."""
        if self._learns:
            self._forecasts.ended(request, by_itself=True)
        self._line.ended(self._clock() - request.arrived)

    def in_order(self, requests: Sequence[R]) -> tuple[list[R], bool]:
        """Return requests, given as they came, in the order of service.

        A request that cannot be put in order goes after all others.

        Returns:
            Those, and whether the first holds back the others.
        """
        if not requests:
            self._left.clear()
            self._faulty.clear()
        sound = [one for one in requests if one not in self._faulty]
        if not sound:
            return list(requests), False
        try:
            order, alone = self._put_in_order(sound)
        except Exception:
            faulty = {one for one in sound if self._is_faulty(one)}
            if not faulty or len(faulty) == len(sound):  # it is not about some of them
                raise
            logger.exception("%d requests cannot be put in order; they go last", len(faulty))
            self._faulty |= faulty
            return self.in_order(requests)
        return [*order, *(one for one in requests if one in self._faulty)], alone

    def _is_faulty(self, request: R) -> bool:
        try:
            self._put_in_order([request])
        except Exception:
            return True
        return False

    def _put_in_order(self, requests: list[R]) -> tuple[list[R], bool]:
        n = len(requests)
        left = self._expected_left(requests)
        context = np.fromiter((one.context_tokens for one in requests), np.float64, n)
        order, alone = self._line.put_in_order(
            waited=self._clock() - np.fromiter((one.arrived for one in requests), np.float64, n),
            left=left,
            context=context,
            latest=self._latest,
            room=Room(
                slots=float(min(one.slots for one in self._decodes)),
                capacity=float(min(one.kv_capacity for one in self._decodes)),
                step_seconds=self._step.seconds,
            ),
        )
        first = order[0]
        if self._fairness and self._accounts is not None:
            self._share_out(self._accounts, requests, order, left)
        return [requests[i] for i in order], alone and bool(order[0] == first)

    def _share_out(
        self,
        accounts: Accounts,
        requests: Sequence[R],
        order: npt.NDArray[np.int64],
        left: npt.NDArray[np.float64],
    ) -> None:
        """Rewrite an order so that no account gets ahead of another by too much."""
        index: dict[Account, int] = {}
        for request in requests:
            index.setdefault(request.account, min(len(index), _MOST_IN_LINE - 1))
        if len(index) == 1:
            return
        accounts.charge_outgrown()
        n, n_accounts = len(requests), min(len(index), _MOST_IN_LINE)
        served = np.full(n_accounts, np.inf)
        for account, a in index.items():
            served[a] = min(served[a], account.served)
        service = np.fromiter(map(accounts.service, requests, left), np.float64, n)
        weight = np.fromiter((one.account.weight for one in requests), np.float64, n)
        interleave(
            order,
            np.fromiter((index[one.account] for one in requests), np.int64, n),
            served,
            service / weight,
            slack(self._fairness, accounts.mean_service),
            np.zeros(n, dtype=np.int64),
            np.zeros(n, dtype=np.int64),
            np.zeros(n_accounts, dtype=np.int64),
            n,
        )

    def compile(self) -> None:
        """Order once, so that no request waits for a compiler."""
        self._line.compile()
        one = np.zeros(1, dtype=np.int64)
        interleave(one.copy(), one.copy(), np.zeros(1), np.zeros(1), 0.0, one, one, one, 1)

    def _expected_left(self, requests: Sequence[R]) -> npt.NDArray[np.float64]:
        """Return the tokens that requests are expected to generate, [n], at least 1."""
        if self._clock() - self._left_at >= _FRESH_SECONDS:
            self._left.clear()
            self._left_at = self._clock()
        known = self._left
        new = [one for one in requests if one not in known]
        if new:
            self._forecasts.refresh()
            means = np.maximum(self._forecasts.forecast(new).mean(), 1.0)
            for request, left in zip(new, means.tolist(), strict=True):
                if not request.generated_tokens:
                    request.foreseen_tokens = left
                known[request] = max(corrected(request, left), 1.0)
        return np.fromiter((known[one] for one in requests), np.float64, len(requests))


_APART_SECONDS, _LOOK_SECONDS = 0.02, 0.1
"""Between two looks for room at least, and after which there may be more though nothing ended."""
_LOOKED_AT = 64
"""Accounts whose first request is looked at in one look."""

_STEPS_AHEAD = (0, *(2**i for i in range(4, 14)))


def has_leftover(view: ClusterView, options: BackgroundOptions) -> npt.NDArray[np.bool_]:
    r"""Return which instances have room for the first waiting request of a view, [n_instances].

    An instance g with n of S places taken and K tokens of KV cache has room for a request w if all
    requests on it have begun to generate, so that no prompt is computed but that of w, and

    .. math::
        n + 1 \le \text{slots} \cdot S, \qquad
        \max_h \Big[ S_w(h)\,(c_w + h) + \sum_{i \text{ on } g} S_i(h)\,(c_i + h) \Big]
        \le \text{kv} \cdot K

    with c the tokens that a request holds and S(h) the probability that it still runs h steps from
    now; without forecasts what is held now. An instance that has no request takes any; one that
    does not say how much it holds takes no other beside it.

    Args:
        view: of the instances, and of one waiting request.
        options: ``slots`` and ``kv``.
    """
    running = view.running
    known = view.kv_capacity < UNLIMITED
    begun = view.queued == 0
    fits = _peaks(view) <= options.kv * view.kv_capacity
    free = running + 1 <= options.slots * view.slots
    has_room: npt.NDArray[np.bool_] = (running == 0) | (known & begun & fits & free)
    return has_room


def _peaks(view: ClusterView) -> npt.NDArray[np.float64]:
    """Return the greatest load expected of each instance with the first waiting request on it."""
    context, waits = view.context_tokens, int(view.waiting_prompt_tokens[0])
    waits += int(view.waiting_generated_tokens[0])
    if view.forecast is None or view.waiting_forecast is None:
        return view.kv_load.astype(np.float64) + waits
    peaks = np.zeros(view.n_instances)
    for steps in _STEPS_AHEAD:
        held = view.forecast.at(steps) * (context + steps)
        load = np.bincount(view.instance, weights=held, minlength=view.n_instances)
        more = view.waiting_forecast.at(steps)[0] * (waits + steps)
        peaks = np.maximum(peaks, load + more)
    return peaks


class Background(Generic[R]):
    """The background requests that wait for a prefill instance, and then for a decode one.

    They are looked at when no other request waits, one at a time, in their own order, and as long
    as there is room. Where another request waits nevertheless, one that runs gives way.

    Args:
        placements: of all requests.
        prefills: instances that prefill.
        options: how much of an instance they may use, and how many may wait.
        line: the order among them; as they come when None.
        clock: in seconds.
        others_wait: says whether any other request waits.
        with_room: returns those decode instances that have room for a request.
        placed: places a request on one of some decode instances; returns which.
        accounts: of the clients.
    """

    def __init__(
        self,
        placements: Placements[R],
        prefills: Sequence[InstanceState],
        options: BackgroundOptions,
        line: WaitingLine[R] | None,
        clock: Callable[[], float],
        others_wait: Callable[[], bool],
        with_room: Callable[[R], list[InstanceState]],
        placed: Callable[[R, Sequence[InstanceState]], InstanceState | None],
        accounts: Accounts,
    ) -> None:
        self._accounts = accounts
        self.for_prefill: dict[R, asyncio.Future[InstanceState | None]] = {}
        self.for_decode: dict[R, asyncio.Future[InstanceState]] = {}
        self._placements = placements
        self._prefills = prefills
        self._options = options
        self._line = line
        self._clock = clock
        self._others_wait = others_wait
        self._with_room, self._placed = with_room, placed
        self._look: asyncio.TimerHandle | None = None
        self._due, self._looked = inf, -inf
        self._latest: dict[InstanceState, tuple[R, float]] = {}  # until it has begun
        self._rests_until: dict[InstanceState, float] = {}
        self._failed = self._unordered = False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self.for_prefill) + len(self.for_decode)

    def admit(self, account: Account) -> None:
        """Refuse a new one of an account when too many wait, and it has its share of them.

        Raises:
            RequestRefusedError: 429.
        """
        account = self._accounts.named(account.name)
        if self.waiting >= self._options.pool and not self._accounts.may_wait(
            account, self._options.pool
        ):
            message = f"{self.waiting} background requests wait already; try again later"
            raise RequestRefusedError(429, message, retry_after=5)

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
        if not self.waiting:
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
        on = [one for instance in instances for one in self._placements.on(instance)]
        running = [one for one in on if isinstance(one, Placeable) and one.background]
        if any(one.gives_way for one in running):
            return
        leaving = [one for one in running if one.can_give_way]
        if leaving:
            max(leaving, key=lambda one: one.context_tokens).give_way()

    def _give_places(self) -> None:
        self._due, self._looked = inf, self._clock()
        try:
            self._give_decode_places()
            self._give_prefill_places()
            self._failed = False
        except Exception:
            if not self._failed:
                logger.exception("background requests wait, since no room can be looked for")
            self._failed = True
        self.wake(_LOOK_SECONDS)

    def _give_decode_places(self) -> None:
        while not self._others_wait() and self._give_one(self._decode, self.for_decode):
            pass

    def _give_one(self, takes: Callable[[R], bool], pool: Mapping[R, asyncio.Future[Any]]) -> bool:
        """Give the first that fits a place; return whether there is one."""
        firsts = self._firsts(pool)
        for i, request in enumerate(firsts):
            if takes(request):
                self._accounts.passed_over(firsts[:i])
                return True
        return False

    def _decode(self, request: R) -> bool:
        """Give a request a decode instance; return whether it waits no more."""
        instance: InstanceState | None = None
        with taken_out(request, self.for_decode):
            instances = self._with_room(request)
            instance = self._placed(request, instances) if instances else None
        if instance is not None:
            self._latest[instance] = request, self._clock()
            self.for_decode.pop(request).set_result(instance)
        return request not in self.for_decode

    def _give_prefill_places(self) -> None:
        while not self._others_wait() and self._give_one(self._prefill, self.for_prefill):
            pass

    def _prefill(self, request: R) -> bool:
        """Give a request a prefill instance; return whether it waits no more."""
        available = [one for one in self._prefills if one.available and one.serves(request.model)]
        if not available:
            self.for_prefill.pop(request).set_result(None)
            return True
        idle = [one for one in available if not self._placements.on(one) and not self.rests(one)]
        # What has been prefilled occupies its prefill instance until it is placed.
        with taken_out(request, self.for_prefill):
            if idle and not self.for_decode and self._with_room(request):
                self._accounts.placed(request)
                request.begin_prefill(idle[0])
                self._latest[idle[0]] = request, self._clock()
                self.for_prefill.pop(request).set_result(idle[0])
        return request not in self.for_prefill

    def _firsts(self, pool: Mapping[R, asyncio.Future[Any]]) -> list[R]:
        """Return the first request of each account: one without room holds back no other client."""
        waiting = [request for request, place in pool.items() if not place.done()]
        if self._line is not None and len(waiting) > 1:
            try:
                waiting = self._line.in_order(waiting)[0]
            except Exception:
                if not self._unordered:
                    logger.exception("no order of background requests; as they came instead")
                self._unordered = True
        firsts: dict[Account, R] = {}
        for request in waiting:
            firsts.setdefault(request.account, request)
        return list(islice(firsts.values(), _LOOKED_AT))
