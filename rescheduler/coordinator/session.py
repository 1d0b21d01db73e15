"""The coordinator's end of its conversation with one proxy, without the socket."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from rescheduler.coordination.messages import (
    MOST,
    NOWHERE,
    Answer,
    MoveEnded,
    MoveOrder,
    Notice,
    ProxyLoad,
    Record,
    Refusal,
    Report,
    View,
)
from rescheduler.coordination.numbering import Arrival, Numbering
from rescheduler.coordinator.mirror import Mirror, Order
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.move_outcome import MoveOutcome
from rescheduler.placement.placements import Placements

__all__ = ["Session", "Shared"]

logger = logging.getLogger("headway.serve")

_REST_SECONDS = 5.0


@dataclass(frozen=True)
class Shared:
    """What the sessions of all proxies have in common.

    Attributes:
        incarnation: of the coordinator's process.
        instances: of the deployment, in its order.
        placements: which requests are on which instance.
        dispatcher: chooses instances.
        forecasts: of remaining lengths; None if no engine publishes them.
        failed: counts a failure against an instance; the flag: nothing listens there.
        background: runs something, and returns its task.
        clock: seconds.
        wake: called when there is something to say to a proxy.
        settled: set once proxies have had the time to report what runs.
    """

    incarnation: str
    instances: list[InstanceState]
    placements: Placements[Mirror]
    dispatcher: Dispatcher[Mirror]
    forecasts: LiveForecasts | None
    failed: Callable[[InstanceState, bool], None]
    background: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    clock: Callable[[], float]
    wake: Callable[[], None]
    settled: asyncio.Event


class Session:
    """One proxy's requests, places for them, and orders to move them.

    Args:
        name: of the proxy's process.
        incarnation: of this session, whose notices are numbered from 1.
        shared: with the sessions of other proxies.

    Attributes:
        name: as given.
        mirrors: its requests, by handle.
        heard_at: when its last report came.
        listening: endpoint at which its peers hear its loads.
        step_seconds: mean time between two tokens of its requests.
        known: whether its requests are: a whole report has come, and none was missed since.
    """

    def __init__(self, name: str, incarnation: str, shared: Shared) -> None:
        self.name, self._incarnation, self._shared = name, incarnation, shared
        self.mirrors: dict[int, Mirror] = {}
        self.heard_at = shared.clock()
        self.listening = ""
        self.step_seconds = 0.0
        self.known = False
        self._heard = Numbering()
        self._sent = 0
        self._answers: list[Answer] = []
        self._booked: list[Mirror] = []
        self._new_orders: list[Mirror] = []
        self._orders: set[Mirror] = set()

    @property
    def pending(self) -> bool:
        """Whether there is something to say at once."""
        return bool(self._answers or self._new_orders or not self.known)

    def receive(self, report: Report) -> None:
        """Take over what the proxy says."""
        arrival = self._heard.arrived(report.number)
        self.heard_at = self._shared.clock()
        if arrival is Arrival.OLD:
            return
        self.known = report.whole or (self.known and arrival is Arrival.NEXT)
        self.listening, self.step_seconds = report.listening, report.step_seconds
        if not self.known:
            self._shared.wake()
            return
        here = report.heard if report.incarnation == self._incarnation else 0
        if report.whole:
            listed = {record.handle for record in report.records}
            for mirror in [one for one in self.mirrors.values() if one.handle not in listed]:
                self._forget(mirror, by_itself=False)
        for record in report.records:
            self._take(record, here, report.whole)
        self._take_tokens(report)
        for failure in report.failures:
            if failure.instance < len(self._shared.instances):
                self._shared.failed(self._shared.instances[failure.instance], failure.certain)
        for move in report.moves:
            self._move_ended(move)
        for ended in report.ended:
            over = self.mirrors.get(ended.handle)
            if over is not None:
                # Of an answer that comes as a whole only its engine knows, by telemetry.
                over.generated_tokens = max(over.generated_tokens, ended.generated_tokens)
                self._forget(over, ended.by_itself)
        self._settle_orders(here)
        if report.records or report.ended:
            self._shared.dispatcher.wake()

    def close(self) -> None:
        """Forget all of its requests: the proxy is gone, or has to report them anew."""
        self.known = False
        for mirror in list(self.mirrors.values()):
            if mirror.order is not None:
                self._end_order(mirror, MoveOutcome("gone"))
            self._forget(mirror, by_itself=False)
        self._shared.dispatcher.wake()

    async def move(self, mirror: Mirror, target: InstanceState, why: str) -> MoveOutcome:
        """Order a request to move; return how that ended, as soon as it is known."""
        if not mirror.can_move or mirror.handle not in self.mirrors:
            return MoveOutcome("gone")
        ended: asyncio.Future[MoveOutcome] = asyncio.get_running_loop().create_future()
        mirror.order = Order(target, mirror.hop, 0, why, ended)
        self._new_orders.append(mirror)
        self._orders.add(mirror)
        self._shared.wake()
        return await ended

    def notice(self, view: View | None) -> Notice | None:
        """Return what there is to say, or None.

        Args:
            view: of the cluster, if it is time for one.
        """
        if view is None and not self.pending:
            return None
        self._sent += 1
        for mirror in self._booked:
            mirror.booked_in = self._sent
        orders = [self._order(mirror) for mirror in self._new_orders if mirror.order is not None]
        notice = Notice(
            incarnation=self._incarnation,
            number=self._sent,
            whole_please=not self.known,
            answers=self._answers,
            moves=[order for order in orders if order is not None],
            view=view,
        )
        self._answers, self._booked, self._new_orders = [], [], []
        return notice

    def load(self) -> ProxyLoad:
        """Return what its requests hold on each instance."""
        index = {instance: g for g, instance in enumerate(self._shared.instances)}
        requests, tokens = [0] * len(index), [0] * len(index)
        for mirror in self.mirrors.values():
            if mirror.instance is not None:
                g = index[mirror.instance]
                requests[g] += 1
                tokens[g] += mirror.context_tokens
        return ProxyLoad(self.name, self.listening, requests, tokens)

    def _take(self, record: Record, heard: int, whole: bool) -> None:
        """Have a request be as reported, unless it is about to get the place that it waits for."""
        n = len(self._shared.instances)
        if max(record.instance, record.destination, *record.avoid, NOWHERE) >= n:
            raise ValueError(f"instance {max(record.instance, record.destination)} of {n}")
        mirror = self.mirrors.get(record.handle)
        if mirror is None:
            mirror = self.mirrors[record.handle] = Mirror(
                record, self.name, self._shared.placements
            )
            if self._shared.forecasts is not None:
                self._shared.forecasts.began(mirror)
        if record.ticket and record.ticket == mirror.booked:
            mirror.count(record)
            if whole and 0 < mirror.booked_in <= heard:  # what said so was lost
                self._answer(mirror, mirror.instance)
            return
        if record.ticket and record.ticket == mirror.ticket and mirror.asking is not None:
            mirror.count(record)
            return
        generated = mirror.generating
        self._stop_asking(mirror)
        mirror.booked = mirror.booked_in = 0
        mirror.be(record, self._shared.instances)
        if mirror.generating and not generated and mirror.instance is not None:
            mirror.instance.breaker.succeeded()
        mirror.ticket = record.ticket
        if record.ticket:
            mirror.asking = self._shared.background(self._get_place(mirror, record.for_prefill))

    async def _get_place(self, mirror: Mirror, for_prefill: bool) -> None:
        """Get a place for a request, and book it."""
        dispatcher, ticket = self._shared.dispatcher, mirror.ticket
        await self._shared.settled.wait()
        try:
            if not mirror.admitted:
                dispatcher.admit()
                mirror.admitted = True
            place = dispatcher.take_prefill if for_prefill else dispatcher.place
            instance = await place(mirror)
        except RequestRefusedError as error:
            refusal = Refusal(error.status, str(error), error.retry_after)
            mirror.asking = None
            self._answers.append(Answer(ticket, NOWHERE, refusal))
            self._shared.wake()
            return
        mirror.asking = None
        mirror.booked = ticket
        self._answer(mirror, instance)

    def _answer(self, mirror: Mirror, instance: InstanceState | None) -> None:
        at = NOWHERE if instance is None else self._shared.instances.index(instance)
        mirror.booked_in = 0
        self._answers.append(Answer(mirror.booked, at))
        self._booked.append(mirror)
        self._shared.wake()

    def _order(self, mirror: Mirror) -> MoveOrder | None:
        order, source = mirror.order, mirror.instance
        if order is None:
            return None
        order.number = self._sent
        if source is None:
            return None
        index = self._shared.instances.index
        return MoveOrder(mirror.handle, order.hop, index(source), index(order.target), order.why)

    def _move_ended(self, move: MoveEnded) -> None:
        mirror = self.mirrors.get(move.handle)
        if mirror is not None and mirror.order is not None and mirror.order.hop == move.hop:
            self._end_order(mirror, MoveOutcome(move.outcome, move.pause))

    def _settle_orders(self, heard: int) -> None:
        """End the orders that the proxy has read, and does not carry out."""
        for mirror in list(self._orders):
            order = mirror.order
            if order is not None and 0 < order.number <= heard and not mirror.moving:
                arrived = mirror.instance is order.target and mirror.hop > order.hop
                landed = arrived and mirror.generating  # and what said so was lost
                self._end_order(mirror, MoveOutcome("moved" if landed else "gone"))

    def _end_order(self, mirror: Mirror, ended: MoveOutcome) -> None:
        order, mirror.order = mirror.order, None
        self._orders.discard(mirror)
        if ended.outcome != "moved":
            mirror.rest(self._shared.clock() + _REST_SECONDS)
        if order is not None and not order.ended.done():
            order.ended.set_result(ended)

    def _take_tokens(self, report: Report) -> None:
        if len(report.handles) != len(report.tokens) or len(report.handles) % 8:
            raise ValueError("handles and tokens of different lengths")
        handles = np.frombuffer(report.handles, dtype=np.int64).tolist()
        tokens = np.frombuffer(report.tokens, dtype=np.int64)
        if ((tokens < 0) | (tokens > MOST)).any():
            raise ValueError("tokens that nothing has generated")
        mirrors = self.mirrors
        for handle, generated in zip(handles, tokens.tolist(), strict=True):
            mirror = mirrors.get(handle)
            if mirror is not None:
                mirror.generated_tokens = generated

    def _forget(self, mirror: Mirror, by_itself: bool) -> None:
        del self.mirrors[mirror.handle]
        self._stop_asking(mirror)
        mirror.leave()
        if mirror.order is not None:
            self._end_order(mirror, MoveOutcome("ended"))
        if self._shared.forecasts is not None:
            self._shared.forecasts.ended(mirror, by_itself)

    def _stop_asking(self, mirror: Mirror) -> None:
        asking, mirror.asking = mirror.asking, None
        if asking is not None:
            asking.cancel()
