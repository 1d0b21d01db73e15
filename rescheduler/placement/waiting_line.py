"""Requests that wait, in the order of service."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.ordering import ServiceOrder
from rescheduler.ordering.fairness import interleave, slack
from rescheduler.ordering.kernel import HOLDS_BACK
from rescheduler.ordering.service_order import Line, Room
from rescheduler.placement.account import Account, Group
from rescheduler.placement.accounts import Accounts, corrected
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable, R
from rescheduler.step_time.profile import MeanStepTime

logger = logging.getLogger("headway.serve")

_LEAST_LEVEL = 0.5
"""Of a promise for which others wait: one that is likelier kept than broken."""
_MOST_IN_LINE = 4096
"""Accounts between which a line is shared out; further ones share one."""
_FRESH_SECONDS = 0.1
"""Until what is expected of a waiting request is asked anew: many decisions are made meanwhile."""


def is_promised(request: Placeable, now: float) -> bool:
    """Return whether a request's end has been promised, and may yet be in time."""
    return now < request.finish_by and request.promised_level > _LEAST_LEVEL


def promised_first(requests: list[R], accounts: Accounts, now: float, longest: float) -> list[R]:
    """Return requests with those first that must start now to finish as promised.

    Of these the one with the earliest promise leads; one that is late already does not, nor one
    that was as likely to be broken, nor what `Accounts.leading` leaves out. The others keep their
    order; once the first of them has waited ``longest`` seconds, every second place is theirs, so
    that promises keep nobody out.
    """
    urgent = [one for one in requests if one.start_by <= now and is_promised(one, now)]
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


class WaitingLine(Generic[R]):
    """Says which of the waiting requests goes first.

    Args:
        order: of service, not that of arrival.
        decodes: that serve.
        forecasts: of remaining lengths; None if no engine publishes them, so that all requests
            are expected to be like those that ended lately.
        longest: seconds for which a request may wait; well before, it is overdue.
        accounts: between which the line is shared out, as the order says; None: it is not, and
            the line is asked only.
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
        self._by_arrival = order.name == "fcfs"
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
        left = self.expected_left(requests)
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
        if self._fairness and self._by_arrival:
            alone = bool(self._clock() - requests[first].arrived >= HOLDS_BACK * self._latest)
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
        """Rewrite an order so that no account gets ahead of another by too much.

        Requests of an account that can go to other instances are a line of their own, which begins
        where the account is: what cannot go now is no charge to what can. Where instances have
        other models than when a request came, it competes with those that come now.
        """
        models = {one.model for one in requests}
        groups = {model: accounts.group_of(model) for model in models}
        for one in requests:
            if one.group != groups[one.model]:
                one.group = groups[one.model]
                one.account.lift(one.group, accounts.virtual_times.get(one.group, 0.0))
        lacking = {model: accounts.lacking(model) for model in models}
        rivals = [(one.account, one.group, lacking[one.model]) for one in requests]
        index: dict[tuple[Account, Group, Group], int] = {}
        for rival in rivals:
            index.setdefault(rival, min(len(index), _MOST_IN_LINE - 1))
        if len(index) == 1:
            return
        accounts.charge_outgrown()
        n, n_accounts = len(requests), min(len(index), _MOST_IN_LINE)
        served, here = np.full(n_accounts, np.inf), dict[tuple[Account, Group], float]()
        had = [accounts.service(one) if one.generated_tokens else 0.0 for one in requests]
        for one, before in zip(requests, had, strict=True):  # what they are charged for is to come
            charge = max(one.account.charges.get(one, 0.0) - before, 0.0) / one.account.weight
            here[one.account, one.group] = here.get((one.account, one.group), 0.0) + charge
        for (account, group, _), a in index.items():
            served[a] = min(served[a], accounts.ahead(account, group) - here[account, group])
        service = np.fromiter(map(accounts.cost, requests, left), np.float64, n) - np.array(had)
        weight = np.fromiter((one.account.weight for one in requests), np.float64, n)
        interleave(
            order,
            np.fromiter(map(index.__getitem__, rivals), np.int64, n),
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

    def expected_left(self, requests: Sequence[R]) -> npt.NDArray[np.float64]:
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
                if self._accounts is not None and not request.generated_tokens:
                    request.foreseen_tokens = left
                known[request] = max(corrected(request, left), 1.0)
        return np.fromiter((known[one] for one in requests), np.float64, len(requests))


@dataclass(eq=False, slots=True)
class Pool(Generic[R]):
    """Requests that wait for a prefill instance, and then for a decode one.

    Attributes:
        line: the order among them; as they come when None.
        accounts: of their clients.
        for_prefill: the place that each waits for; None once no prefill instance is in service.
        for_decode: likewise.
        unordered: their order has failed.
    """

    line: WaitingLine[R] | None
    accounts: Accounts
    for_prefill: "dict[R, asyncio.Future[InstanceState | None]]" = field(default_factory=dict)
    for_decode: "dict[R, asyncio.Future[InstanceState]]" = field(default_factory=dict)
    unordered: bool = False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self.for_prefill) + len(self.for_decode)

    def is_full(self, account: Account, size: int) -> bool:
        """Return whether so many wait already, and an account has its share of them."""
        return self.waiting >= size and not self.accounts.may_wait(account, size)

    def in_order(self, waiting: list[R], now: float, longest: float) -> tuple[list[R], bool]:
        """Return requests in the order of service, and whether the first holds back the others.

        Those that must start now go first, as far as `promised_first` lets them.
        """
        try:
            ordered = (waiting, False) if self.line is None else self.line.in_order(waiting)
            if not ordered[1]:
                ordered = promised_first(ordered[0], self.accounts, now, longest), False
        except Exception:
            if not self.unordered:
                logger.exception("no order by what is known; as they came instead")
            self.unordered = True
            return waiting, False
        self.unordered = self.unordered and not waiting
        return ordered


def still_waiting(places: "Mapping[R, asyncio.Future[Any]]") -> list[R]:
    """Return the requests that have neither a place nor a refusal."""
    return [request for request, place in places.items() if not place.done()]


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
