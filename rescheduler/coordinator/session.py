"""The coordinator's end of its conversation with one proxy, without the socket."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec.structs import replace

from rescheduler.coordination.link import Arrival, Numbering, check_lengths, said
from rescheduler.coordination.messages import (
    MOST_ANSWERS,
    MOST_ORDERS,
    MOST_REQUESTS,
    MOST_TOKENS,
    MOST_UNSAID,
    NOWHERE,
    Answer,
    CoordinationError,
    Ended,
    LearnedLength,
    MoveOrder,
    Notice,
    Record,
    Refusal,
    Report,
    View,
)
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.ordering.fairness import OUTPUT_WEIGHT
from rescheduler.placement.account import Account
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import (
    Decision,
    MoveOutcome,
    Placeable,
    Placements,
)


@dataclass(eq=False, slots=True)
class Order:
    """An order to leave placement ``hop``; ``number``: of its notice, 0 before it is sent."""

    target: InstanceState
    hop: int
    number: int
    why: str
    ended: asyncio.Future[MoveOutcome]


class Mirror(Placeable):
    """A request of a proxy, which alone knows how it is; this is what it last reported.

    The one exception: a place that the coordinator gives to a request is booked here at once, and
    stays so until the proxy reports that the request does not wait for it any more.

    Attributes:
        handle: number in its proxy's session.
        ticket: of the place that it waits for, as reported; 0 if it waits for none.
        asking: gets it that place.
        booked: ticket of the place that it has got here and, as reported, not taken; 0 if none.
        booked_in: number of the notice that says so; 0 before it is sent.
        had_place: it has been on an instance before, as reported or booked.
    """

    def __init__(self, record: Record, session: str, placements: "Placements[Mirror]") -> None:
        super().__init__(
            external_id=record.external_id,
            max_tokens=record.max_tokens,
            fewest_tokens=record.fewest_tokens,
            expected_tokens=record.expected_tokens,
            id=record.id,
            name=record.name,
            model=record.model,
            movable=record.movable,
            several=record.several,
            answers=record.answers,
            media_tokens=record.media_tokens,
        )
        self.session, self.handle = session, record.handle
        self.moving = self.had_place = False
        self.hop = -1
        self.ticket = self.booked = self.booked_in = 0
        self.asking: asyncio.Task[None] | None = None
        self.order: Order | None = None
        self._placements = placements
        self._can_move = self._prefill_booked = False
        self._waited = 0.0

    @property
    def can_move(self) -> bool:
        """Whether it can be ordered to move."""
        return self._can_move and self.order is None

    def count(self, record: Record) -> None:
        """Take over its tokens."""
        if record.prompt_is_known or not self.prompt_is_known:
            self.prompt_tokens, self.prompt_is_known = record.prompt_tokens, record.prompt_is_known
        self.has_generated(max(self.generated_tokens, record.generated_tokens))

    def has_generated(self, tokens: int) -> None:
        """Note how many tokens it has by now."""
        self._generated = tokens

    def be(self, record: Record, instances: list[InstanceState]) -> None:
        """Be as reported."""
        self.count(record)
        self.hop = record.hop
        self.generated_at_move = record.generated_at_move
        self.expected_tokens = record.expected_tokens
        self.generating, self.on_its_way = record.generating, record.on_its_way
        self.moving, self._can_move = record.moving, record.can_move
        self._prefill_booked = False
        self._waited = record.waited
        self.avoid = frozenset(instances[g] for g in record.avoid)
        self._stand(
            instances[record.instance] if record.instance >= 0 else None,
            instances[record.destination] if record.destination >= 0 else None,
        )
        self.had_decode_place = self.had_decode_place or record.hop >= 0
        self.had_place = self.had_place or record.hop >= 0

    def wait(self, now: float) -> None:
        """Begin to wait for a decode instance, as it did with its proxy a moment ago."""
        self.waiting_since = now - self._waited

    def begin_prefill(self, instance: InstanceState) -> None:
        """Book a place on a prefill instance."""
        self._prefill_booked = True
        self._stand(instance, instance)

    def prefill_failed(self) -> None:
        """Give up a place on a prefill instance, unless its proxy has reported otherwise since."""
        if self._prefill_booked:
            self._prefill_booked = False
            self._stand(None, None)

    def place(self, instance: InstanceState, decision: Decision | None = None) -> None:
        """Book a place on a decode instance."""
        del decision  # only its proxy traces it
        self.on_its_way = True
        self._stand(instance, instance)

    def leave(self) -> None:
        """Be on no instance."""
        self._stand(None, None)

    def _stand(self, instance: InstanceState | None, destination: InstanceState | None) -> None:
        self.instance, self.destination = instance, destination
        self.had_place = self.had_place or instance is not None
        self._placements.put(self, instance)


logger = logging.getLogger("headway.serve")

_REST_SECONDS = 5.0
_SLICE = 256  # requests that are looked at in one turn of the event loop
_MOST_ACCOUNTS = 256  # of a proxy that have requests; further ones share the proxy's own


@dataclass(frozen=True)
class Shared:
    """What the sessions of all proxies have in common.

    Attributes:
        incarnation: of the coordinator's process.
        pool: requests that wait, at most.
        names: the requests that engines call so: clients of two proxies may choose the same.
        wake: called when there is something to say to a proxy.
        settled: set once proxies have had the time to report what runs.
        lengths: for each session those that the others have learned, and it has not been told.
    """

    incarnation: str
    cluster: Cluster[Mirror]
    pool: int
    names: dict[str, dict[Mirror, None]]
    clock: Callable[[], float]
    wake: Callable[[], None]
    settled: asyncio.Event
    lengths: dict["Session", deque[LearnedLength]] = field(default_factory=dict)


class Session:
    """One proxy's requests, places for them, and orders to move them.

    Args:
        name: that the proxy's process gives itself, which only the two sides know.
        number: by which the log knows it.
        address: that it connects from; None if that is not known.

    Attributes:
        peer: its connection; None while it has none.
        mirrors: its requests, by handle.
        known: whether its requests are: a whole report has come, and none was missed since.
        forgotten: requests that it may report anew, by handle. They have been charged as if they
            had ended; what is reported anew is charged anew, and not twice.
    """

    def __init__(
        self, name: str, number: int, peer: bytes, address: str | None, shared: Shared
    ) -> None:
        self.name = name
        self.number = number
        self.address = address
        self.peer: bytes | None = peer
        # A proxy that was only silent for long must not take its numbers for earlier ones.
        self._incarnation, self._shared = f"{shared.incarnation}/{number}", shared
        self._cluster, self._instances = shared.cluster, shared.cluster.all
        self.mirrors: dict[int, Mirror] = {}
        self.forgotten: dict[int, Mirror] = {}
        self._accounts: Counter[str] = Counter()
        # What has had a place may wait for another one though the pool is full; not without end.
        self._again = asyncio.Semaphore(shared.pool)
        self.heard_at = self._begun_at = shared.clock()
        self.step_seconds = 0.0
        self.known = self._closed = False
        self._heard = Numbering()
        self._sent = 0
        self._lengths = shared.lengths[self] = deque[LearnedLength](maxlen=MOST_UNSAID)
        self._answers: list[Answer] = []
        self._booked: list[Mirror | None] = []  # to whom each answer gives a place
        self._new_orders: list[Mirror] = []
        self._orders: set[Mirror] = set()

    def __str__(self) -> str:
        return f"proxy {self.number} ({self.address or 'of an unknown address'})"

    @property
    def pending(self) -> bool:
        """Whether there is something to say at once."""
        return bool(self._answers or self._new_orders or not self.known)

    async def receive(self, report: Report) -> None:
        """Take over what the proxy says, in slices, between which others have their turn."""
        arrival = self._heard.arrived(report.number, report.whole)
        self.heard_at = self._shared.clock()
        if arrival is Arrival.OLD:
            return
        self.known = report.whole or (self.known and arrival is Arrival.NEXT)
        if not self.known:
            self._shared.wake()
            if arrival is Arrival.FAR:
                raise CoordinationError(
                    f"report {report.number} after {self._heard.last}", "number"
                )
            return
        self.step_seconds, longest = report.step_seconds, self._longest
        self._pass_on(report.learned)
        here = report.heard if report.incarnation == self._incarnation else 0
        if report.whole:
            listed = {record.handle for record in report.records}
            listed |= {ended.handle for ended in report.ended}
            gone = [one for one in self.mirrors.values() if one.handle not in listed]
            for i, mirror in enumerate(gone):
                if not await self._goes_on(i):
                    return
                self._forget(mirror, by_itself=False)
            self.forgotten = {h: one for h, one in self.forgotten.items() if h in listed}
        for i, record in enumerate(report.records):
            if not await self._goes_on(i):
                return
            with self._alone(record.handle):
                self._take(self._believed(record, longest), here, report.whole)
        self._take_tokens(report)
        for failure in report.failures:
            if not 0 <= failure.instance < len(self._instances):
                raise _nowhere(failure.instance, len(self._instances))
            self._failed(self._instances[failure.instance], failure.certain)
        for move in report.moves:
            moved = self.mirrors.get(move.handle)
            if moved is not None and moved.order is not None and moved.order.hop == move.hop:
                self._end_order(moved, MoveOutcome(move.outcome, move.pause))
        for i, ended in enumerate(report.ended):
            if not await self._goes_on(i):
                return
            with self._alone(ended.handle):
                self._end(ended)
        self._settle_orders(here)
        if report.records or report.ended:
            self._cluster.dispatcher.wake()

    @contextmanager
    def _alone(self, handle: int) -> Iterator[None]:
        """Forget a request where the body fails over it, and go on with the others."""
        try:
            yield
        except CoordinationError:
            raise
        except Exception:
            logger.exception("%s: a request cannot be followed", self)
            mirror = self.mirrors.get(handle)
            if mirror is not None:
                self._forget_for_now(mirror)

    async def close(self) -> None:
        """Forget the proxy and all of its requests: it is gone."""
        self._closed = True
        self._shared.lengths.pop(self, None)
        await self.forget_all()

    async def forget_all(self) -> None:
        """Forget all of its requests: the proxy has to report them anew."""
        self.known = False
        for i, mirror in enumerate(list(self.mirrors.values())):
            if i and i % _SLICE == 0:
                await asyncio.sleep(0)
            if mirror.order is not None:
                self._end_order(mirror, MoveOutcome("gone"))
            self._forget_for_now(mirror)
        self._cluster.dispatcher.wake()

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
        """Return what there is to say, or None."""
        if view is None and not self.pending:
            return None
        self._sent += 1
        answers, self._answers = self._answers[:MOST_ANSWERS], self._answers[MOST_ANSWERS:]
        ordered, self._new_orders = self._new_orders[:MOST_ORDERS], self._new_orders[MOST_ORDERS:]
        orders = [self._order(mirror) for mirror in ordered if mirror.order is not None]
        notice = Notice(
            incarnation=self._incarnation,
            number=self._sent,
            whole_please=not self.known,
            answers=answers,
            moves=[order for order in orders if order is not None],
            view=view,
            learned=said(self._lengths) if view is not None else [],
        )
        booked, self._booked = self._booked[: len(answers)], self._booked[len(answers) :]
        for mirror in booked:
            if mirror is not None:
                mirror.booked_in = self._sent
        return notice

    def _failed(self, instance: InstanceState, certain: bool) -> None:
        """Count a failure.

        On the word of proxies, at least half of a role's instances stay in service, however certain
        they are: more than that the coordinator takes out only by its own probes.
        """
        if self._cluster.may_leave(instance):
            self._cluster.failed(instance, certain)

    def _pass_on(self, learned: list[LearnedLength]) -> None:
        """Have the other proxies learn what this one has learned."""
        check_lengths(learned)
        believed = [one for one in learned if one.length <= self._longest] if learned else []
        for session, lengths in self._shared.lengths.items():
            if session is not self:
                lengths.extend(believed)

    def _take(self, record: Record, heard: int, whole: bool) -> None:
        """Have a request be as reported, unless it is about to get the place that it waits for."""
        n = len(self._instances)
        named = (record.instance, record.destination, *record.avoid)
        if max(named) >= n or min(record.avoid, default=0) < 0 or len(record.avoid) > n:
            raise _nowhere(max(named), n)
        mirror = self.mirrors.get(record.handle)
        if mirror is None:
            mirror = self._begin(record)
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
        mirror.be(record, self._instances)
        if mirror.instance is not None and mirror not in mirror.account.charges:
            # By its proxy itself, or before a restart.
            self._cluster.accounts.placed(mirror, for_prefill=mirror.hop < 0)
        instance = mirror.instance
        if mirror.generating and not generated and instance and instance.breaker.closed:
            instance.breaker.succeeded()
        mirror.ticket = record.ticket
        if record.ticket:
            mirror.asking = self._cluster.background(self._get_place(mirror, record.for_prefill))

    def _begin(self, record: Record) -> Mirror:
        if len(self.mirrors) >= MOST_REQUESTS:
            raise CoordinationError(f"more than {MOST_REQUESTS} requests", "content")
        mirror = Mirror(record, self.name, self._cluster.placements)
        mirror.arrived = self._shared.clock() - record.waited
        mirror.account = self._account(record.account)
        before = self.forgotten.pop(record.handle, None)
        if before is not None:
            before.account.take_back(before)
            mirror.foreseen_tokens = before.foreseen_tokens
        self._accounts[mirror.account.name] += 1
        self.mirrors[record.handle] = mirror
        sharing = self._shared.names.setdefault(mirror.external_id, {})
        sharing[mirror] = None
        if len(sharing) == 1:
            self._cluster.began(mirror)
        else:
            self._cluster.accounts.began(mirror)
        return mirror

    def _account(self, name: str) -> Account:
        """Return whom a request is for; a proxy cannot fill the table with names."""
        full = len(self._accounts) >= _MOST_ACCOUNTS
        if not name or (full and name not in self._accounts):
            name = f"proxy-{self.number}"
        return self._cluster.accounts.named(name)

    def _believed(self, record: Record, longest: int) -> Record:
        """Return a request as reported, within what can be.

        It has waited at most since its proxy was first heard of, and has as many tokens as a model.
        Otherwise a proxy could put its requests before those of all others.
        """
        waited = min(record.waited, self._shared.clock() - self._begun_at)
        generated = min(record.generated_tokens, longest)
        if (waited, generated) == (record.waited, record.generated_tokens):
            return record
        return replace(record, waited=waited, generated_tokens=generated)

    @property
    def _longest(self) -> int:
        """Tokens of the longest answer that any instance can give."""
        engines = [one.engine for one in self._instances if one.engine is not None]
        return max((engine.max_model_len for engine in engines), default=MOST_TOKENS)

    async def _goes_on(self, i: int) -> bool:
        """Let others have their turn after a slice; return whether the proxy is still there."""
        if i and i % _SLICE == 0:
            await asyncio.sleep(0)
            self.heard_at = self._shared.clock()  # whoever is still being read is not gone
        return not self._closed

    async def _get_place(self, mirror: Mirror, for_prefill: bool) -> None:
        """Get a place for a request, and book it."""
        dispatcher, ticket = self._cluster.dispatcher, mirror.ticket
        await self._shared.settled.wait()
        place = dispatcher.take_prefill if for_prefill else dispatcher.place
        try:
            if mirror.had_place:
                async with self._again:
                    instance = await place(mirror)
            else:
                dispatcher.admit(mirror.account)
                instance = await place(mirror)
        except RequestRefusedError as error:
            status: Literal[429, 503] = 429 if error.status == 429 else 503
            refusal = Refusal(status, str(error), error.retry_after)
            mirror.asking = None
            self._answers.append(Answer(ticket, NOWHERE, refusal))
            self._booked.append(None)
            self._shared.wake()
            return
        mirror.asking = None
        mirror.booked = ticket
        self._answer(mirror, instance)

    def _answer(self, mirror: Mirror, instance: InstanceState | None) -> None:
        at = NOWHERE if instance is None else self._instances.index(instance)
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
        index = self._instances.index
        return MoveOrder(mirror.handle, order.hop, index(source), index(order.target), order.why)

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
            raise CoordinationError("handles and tokens of different lengths", "content")
        handles = np.frombuffer(report.handles, dtype=np.int64).tolist()
        tokens = np.frombuffer(report.tokens, dtype=np.int64)
        if ((tokens < 0) | (tokens > MOST_TOKENS)).any():
            raise CoordinationError("tokens that nothing has generated", "content")
        mirrors = self.mirrors
        for handle, generated in zip(handles, tokens.clip(max=self._longest).tolist(), strict=True):
            mirror = mirrors.get(handle)
            if mirror is not None:
                mirror.has_generated(generated)

    def _end(self, ended: Ended) -> None:
        mirror = self.mirrors.get(ended.handle)
        self.forgotten.pop(ended.handle, None)
        if mirror is not None:
            if mirror.several:
                most = self._longest * mirror.answers
                mirror.counted_tokens = min(ended.generated_tokens, most)
            else:  # of an answer that comes as a whole only its engine knows, by telemetry
                mirror.has_generated(max(mirror.generated_tokens, ended.generated_tokens))
            mirror.refused = ended.refused
            if ended.counted is not None:
                costliest = (1 + OUTPUT_WEIGHT) * self._longest * mirror.answers
                mirror.counted = min(ended.counted, costliest)
            by_itself = ended.by_itself and mirror.generated_tokens <= self._longest
            if by_itself:
                mirror.length_forecasts = ended.length_forecasts
                self._cluster.length_factors.ended(mirror)
            self._forget(mirror, by_itself)

    def _forget(self, mirror: Mirror, by_itself: bool) -> None:
        if self.mirrors.pop(mirror.handle, None) is None:
            return
        name = mirror.account.name
        self._accounts[name] -= 1
        if not self._accounts[name]:
            del self._accounts[name]
        self._stop_asking(mirror)
        mirror.leave()
        if mirror.order is not None:
            self._end_order(mirror, MoveOutcome("ended"))
        sharing = self._shared.names[mirror.external_id]
        followed = next(iter(sharing)) is mirror
        del sharing[mirror]
        if not sharing:
            del self._shared.names[mirror.external_id]
            self._cluster.ended(mirror, by_itself)
            return
        self._cluster.accounts.ended(mirror, by_itself)
        if followed and self._cluster.forecasts is not None:
            self._cluster.forecasts.handed_over(mirror, next(iter(sharing)))

    def _forget_for_now(self, mirror: Mirror) -> None:
        """Forget a request that may be reported anew."""
        self._forget(mirror, by_itself=False)
        self.forgotten[mirror.handle] = mirror

    def _stop_asking(self, mirror: Mirror) -> None:
        asking, mirror.asking = mirror.asking, None
        if asking is not None:
            asking.cancel()


def _nowhere(instance: int, n: int) -> CoordinationError:
    return CoordinationError(f"instance {instance} of {n}", "content")
