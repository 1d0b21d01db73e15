"""Background requests: they get the places that all others leave, and give them back."""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import inf
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.engines.proxy_options import BackgroundOptions
from rescheduler.placement.account import Account
from rescheduler.placement.guarded_policy import guarded_view
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placements, R
from rescheduler.placement.waiting_line import Pool, still_waiting, taken_out
from rescheduler.step_time.profile import MeanStepTime

logger = logging.getLogger("headway.serve")

_APART_SECONDS, _LOOK_SECONDS = 0.02, 0.1
"""Between two looks for room at least, and after which there may be more though nothing ended."""
_LOOKED_AT, _MOST_AT_ONCE = 64, 16
"""Accounts whose first request is looked at in one look, and those that get a place in one."""


class Background(Generic[R]):
    """Gives background requests the places that all others leave.

    They are looked at one at a time, in their own order, and as long as there is room, on the
    instances for which no other request waits. Where one waits, one that runs there gives way.

    Args:
        pool: those of background that wait.
        others: those that wait and are served before.
        placements: of all requests.
        prefills: instances that prefill.
        forecasts: of remaining lengths; None if no engine publishes them.
        longest: seconds for which promises go first; after them every second place is of others.
        usable_for: returns the decode instances that a request may go to.
        place: places a request on one of these by the policy, and returns it, if it wants to.
    """

    def __init__(
        self,
        pool: Pool[R],
        others: Pool[R],
        placements: Placements[R],
        prefills: Sequence[InstanceState],
        options: BackgroundOptions,
        step: MeanStepTime,
        clock: Callable[[], float],
        forecasts: LiveForecasts | None,
        longest: float,
        usable_for: Callable[[R], Sequence[InstanceState]],
        place: Callable[[R, Sequence[InstanceState]], InstanceState | None],
    ) -> None:
        self._pool = pool
        self._others = others
        self._placements = placements
        self._prefills = prefills
        self._options = options
        self._step = step
        self._clock = clock
        self._forecasts = forecasts
        self._longest = longest
        self._usable_for = usable_for
        self._place = place
        self._look: asyncio.TimerHandle | None = None
        self._due = inf
        self._looked = -inf
        self._latest: dict[InstanceState, tuple[R, float]] = {}  # until it has begun
        self._rests_until: dict[InstanceState, float] = {}
        self._wanted: set[InstanceState] = set()
        # In the last look there was no room for these, and others were not looked at.
        self._passed: dict[bool, set[Account]] = {False: set(), True: set()}
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

    def _rests(self, instance: InstanceState) -> bool:
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

    def give_way(self, instances: Iterable[InstanceState]) -> None:
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
            self._wanted = self._wanted_by_others()
            self._give(self._decode, self._pool.for_decode)
            self._give(self._prefill, self._pool.for_prefill)
            self._failed = False
        except Exception:
            if not self._failed:
                logger.exception("background requests wait, since no room can be looked for")
            self._failed = True
        self.wake(_LOOK_SECONDS)

    def _give(self, takes: Callable[[R], bool], places: Mapping[R, asyncio.Future[Any]]) -> None:
        """Give the first that fits a place, as long as there is one."""
        waiting = still_waiting(places)
        if not waiting:
            return
        wanted, alike = self._wanted, {one.model: one for one in waiting}.values()
        if wanted and all(one in wanted for request in alike for one in self._usable_for(request)):
            return
        waiting = self._pool.in_order(waiting, self._clock(), self._longest)[0]
        # Without a free place no look at its size is needed, however many wait for it.
        has_place = {one.model: any(map(self._is_free, self._usable_for(one))) for one in alike}
        placeless = [one for one in waiting if not has_place[one.model]]
        waiting = [one for one in waiting if has_place[one.model]]
        here = {one.account for one in waiting}
        placeless = [one for one in placeless if one.account not in here]
        misfits: dict[Account, R] = {}
        passed = self._passed[places is self._pool.for_prefill]
        for _ in range(_MOST_AT_ONCE):
            for request in _firsts(waiting, misfits, passed):
                if takes(request):
                    break
                misfits[request.account] = request
            else:
                if len(misfits) == _LOOKED_AT:
                    passed.update(misfits)
                else:  # that was the last of the line: all have their turn again
                    passed.clear()
                return
            not_asked = [one for one in waiting if one.account in passed]
            self._pool.accounts.passed_over([*misfits.values(), *not_asked, *placeless])
            waiting.remove(request)
        self.wake()

    def _is_free(self, instance: InstanceState) -> bool:
        """Return whether a request that is small enough could begin on an instance now."""
        on = self._placements.on(instance)
        return (
            instance not in self._wanted
            and not self._rests(instance)
            and all(other.generating for other in on)
            and (not on or len(on) + 1 <= self._options.slots * instance.slots)
        )

    def _wanted_by_others(self) -> set[InstanceState]:
        """Return the instances that requests may go to which wait and are served before."""
        wanted = set[InstanceState]()
        prefill, decode = self._others.for_prefill, self._others.for_decode
        for request in {one.model: one for one in still_waiting(prefill)}.values():
            usable = self._usable_for(request)
            wanted.update(usable)
            if any(len(self._placements.on(one)) < one.slots for one in usable):
                wanted.update(one for one in self._prefills if one.serves(request.model))
        for request in {one.model: one for one in still_waiting(decode)}.values():
            wanted.update(self._usable_for(request))
        return wanted

    def _decode(self, request: R) -> bool:
        """Give a request a decode instance; return whether it waits no more."""
        places = self._pool.for_decode
        instance: InstanceState | None = None
        with taken_out(request, places):
            instances = self._with_leftover(request)
            instance = self._place(request, instances) if instances else None
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
        free = [one for one in available if one not in self._wanted and not self._rests(one)]
        idle = [one for one in free if not self._placements.on(one)]
        # What has been prefilled occupies its prefill instance until it is placed.
        with taken_out(request, places):
            if idle and not self._pool.for_decode and self._with_leftover(request):
                self._pool.accounts.placed(request, for_prefill=True)
                request.begin_prefill(idle[0])
                self._latest[idle[0]] = request, self._clock()
                places.pop(request).set_result(idle[0])
        return request not in places

    def _with_leftover(self, request: R) -> list[InstanceState]:
        """Return the decode instances on which there is room for a request."""
        begun = [
            one
            for one in self._usable_for(request)
            if one not in self._wanted
            and not self._rests(one)
            and all(other.generating for other in self._placements.on(one))
        ]
        if not begun:
            return []
        if self._forecasts is not None:
            self._forecasts.refresh()
        shown, view = guarded_view(
            "placing",
            self._placements,
            begun,
            [request],
            self._forecasts,
            self._clock(),
            self._step.seconds,
        )
        left = has_leftover(view, self._options)
        return [one for one, has_room in zip(shown, left, strict=True) if has_room]


def _firsts(
    waiting: Sequence[R], without: Mapping[Account, R], passed: Container[Account]
) -> list[R]:
    """Return the first request of each other account: one without room holds back no client."""
    firsts: dict[Account, R] = {}
    for request in waiting:
        if len(firsts) + len(without) == _LOOKED_AT:
            break
        if request.account not in without and request.account not in passed:
            firsts.setdefault(request.account, request)
    return list(firsts.values())


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
