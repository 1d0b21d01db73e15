"""Background requests: those that take what all others leave, and nothing else."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.engines.deployment import BackgroundOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Counted, Placeable, PlacedRequests, R
from rescheduler.placement.waiting_line import WaitingLine, taken_out

__all__ = ["Background", "has_leftover"]

logger = logging.getLogger("headway.serve")

_APART_SECONDS, _LOOK_SECONDS = 0.02, 0.1
"""Between two looks for room at least, and after which there may be more though nothing ended."""

_STEPS_AHEAD = (0, *(2**i for i in range(4, 14)))

P = TypeVar("P", bound=InstanceState | None)


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
        placements: PlacedRequests[Counted],
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
        self._placements, self._prefills, self._options = placements, prefills, options
        self._line, self._clock, self._others_wait = line, clock, others_wait
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
        while not self._others_wait() and (request := self._first(self.for_decode)) is not None:
            instance: InstanceState | None = None
            with taken_out(request, self.for_decode):
                instances = self._with_room(request)
                instance = self._placed(request, instances) if instances else None
            if request not in self.for_decode:
                continue
            if instance is None:
                return
            self._latest[instance] = request, self._clock()
            self.for_decode.pop(request).set_result(instance)

    def _give_prefill_places(self) -> None:
        while not self._others_wait() and (request := self._first(self.for_prefill)) is not None:
            available = [
                one for one in self._prefills if one.available and one.serves(request.model)
            ]
            if not available:
                self.for_prefill.pop(request).set_result(None)
                continue
            idle = [
                one for one in available if not self._placements.on(one) and not self.rests(one)
            ]
            # What has been prefilled occupies its prefill instance until it is placed.
            with taken_out(request, self.for_prefill):
                if not idle or self.for_decode or not self._with_room(request):
                    return
                self._accounts.placed(request)
                request.begin_prefill(idle[0])
                self._latest[idle[0]] = request, self._clock()
                self.for_prefill.pop(request).set_result(idle[0])

    def _first(self, pool: dict[R, asyncio.Future[P]]) -> R | None:
        waiting = [request for request, place in pool.items() if not place.done()]
        if self._line is not None and len(waiting) > 1:
            try:
                waiting = self._line.in_order(waiting)[0]
            except Exception:
                if not self._unordered:
                    logger.exception("no order of background requests; as they came instead")
                self._unordered = True
        return waiting[0] if waiting else None
