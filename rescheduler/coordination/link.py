"""A proxy's end of its conversation with the coordinator, without the socket."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from rescheduler.coordination.messages import (
    MOST_FAILURES,
    MOST_LENGTHS,
    MOST_REQUESTS,
    MOST_TOKENS,
    MOST_UNSAID,
    NOWHERE,
    Answer,
    CoordinationError,
    Ended,
    Failure,
    LearnedLength,
    MoveEnded,
    MoveOrder,
    Notice,
    Record,
    Report,
    View,
)
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import MoveOutcome
from rescheduler.placement.request_states import Prefilling, Waiting
from rescheduler.step_time.profile import MeanStepTime

FAR = 32
"""From the last number, a number that is not to be believed; so many messages are lost at worst
to one that is nearer and is believed."""


class Arrival(Enum):
    """How a message comes."""

    NEXT = "next"
    """After the one before it."""
    AHEAD = "ahead"
    """Before one that is lost or late."""
    OLD = "old"
    """Again, or after one that was sent later."""
    FAR = "far"
    """With a number that no few lost messages explain: only a whole one is taken over."""


class Numbering:
    """The numbers of one sender's messages.

    A number that is far from the last one, on either side, is not taken over from a message that
    tells of changes only: whoever were believed a number far ahead would be heard no more. One
    that says how everything is begins the count anew.
    """

    def __init__(self) -> None:
        self.last = 0

    def arrived(self, number: int, whole: bool) -> Arrival:
        """Note a message, which says how everything is if it is whole; return how it comes."""
        ahead = number - self.last
        if abs(ahead) > FAR and not whole:
            return Arrival.FAR
        if -FAR <= ahead <= 0:
            return Arrival.OLD
        self.last = number
        return Arrival.NEXT if ahead == 1 else Arrival.AHEAD


logger = logging.getLogger("headway.serve")

_PATIENCE_SECONDS = 10.0
_LONGEST_SECONDS = 1e6
_LONGEST_STEP_SECONDS = 60.0
_FULL = MOST_REQUESTS - 1024  # some may have been let in already that have not asked for a place


class CoordinatorSilentError(RuntimeError):
    """The coordinator has fallen silent, so that a place is not to be had from it."""


@dataclass(eq=False, slots=True)
class _Ask:
    """A place that a request waits for."""

    ticket: int
    request: LiveRequest
    for_prefill: bool
    since: float
    place: "asyncio.Future[InstanceState | None]"


@dataclass(eq=False, slots=True)
class _Followed:
    """A request of which the coordinator knows, or hears next.

    Attributes:
        handle: its number in this session.
        ask: for the place that it waits for; None if it waits for none.
        moving: the hop of an order to move it that is carried out; None if none is.
        tokens: that it had as it was last reported; None before.
        can_move: whether it could then.
        expected: tokens that it was then expected to generate.
    """

    handle: int
    ask: _Ask | None = None
    moving: int | None = None
    tokens: int | None = None
    can_move: bool = False
    expected: int | None = None


class Link:
    """Asks for places, carries out orders to move, and reports what becomes of requests.

    This proxy alone knows how its requests are. A place counts only while its request still waits
    with the same ticket, an order only while the request is where it says, at the same placement:
    whatever comes late, or twice, is void.

    Args:
        session: random name of this process, for the coordinator only.
        deployment: digest of the instances' names.
        silent_seconds: without a view for this long, the coordinator is taken to be away.
        carry_out: begins a move to an instance, with a reason; `moved` is called at its end.

    Attributes:
        view: the coordinator's last.
        refused: why the coordinator does not work with this proxy; None if it does.
        back: set while the coordinator decides, as far as was noticed.
        lengths: learned here, and not told yet; the latest ones.
        taught: takes those that other proxies have learned.
    """

    def __init__(
        self,
        session: str,
        instances: Sequence[InstanceState],
        deployment: str,
        silent_seconds: float,
        clock: Callable[[], float],
        step: MeanStepTime,
        carry_out: Callable[[LiveRequest, InstanceState, str], None],
        wake: Callable[[], None],
    ) -> None:
        self.view: View | None = None
        self.refused: str | None = None
        self.back = asyncio.Event()
        self.lengths = deque[LearnedLength](maxlen=MOST_UNSAID)
        self.taught: Callable[[Sequence[LearnedLength]], None] = lambda learned: None
        self.session, self._deployment = session, deployment
        self._instances, self._index = instances, {one: g for g, one in enumerate(instances)}
        self._silent_seconds, self._clock = silent_seconds, clock
        self._step = step
        self._carry_out = carry_out
        self._wake = wake
        self._heard, self._incarnation = Numbering(), ""
        self._viewed, self._began = -math.inf, clock()
        self._awaited = True
        self._sent = self._handles = self._tickets = 0
        self._whole = True
        self._requests: dict[LiveRequest, _Followed] = {}
        self._by_handle: dict[int, LiveRequest] = {}
        self._asks: dict[int, _Ask] = {}
        self._changed: dict[LiveRequest, None] = {}
        self._ended: list[Ended] = []
        self._moves: list[MoveEnded] = []
        self._failures: list[Failure] = []

    @property
    def alive(self) -> bool:
        """Whether the coordinator decides."""
        return self._clock() - self._viewed < self._silent_seconds

    @property
    def asked(self) -> list[LiveRequest]:
        """Requests that wait for a decode instance, in order of arrival."""
        return [ask.request for ask in self._asks.values() if not ask.for_prefill]

    @property
    def asked_for_prefill(self) -> int:
        """Requests that wait for a prefill instance."""
        return sum(ask.for_prefill for ask in self._asks.values())

    @property
    def full(self) -> bool:
        """Whether there are as many requests as can be reported."""
        return len(self._requests) >= _FULL

    @property
    def pending(self) -> bool:
        """Whether there is something to report at once."""
        return bool(self._changed or self._ended or self._moves or self._failures)

    async def ask(self, request: LiveRequest, for_prefill: bool) -> InstanceState | None:
        """Wait for a place, where the request is then; None if no prefill instance is in service.

        Raises:
            CoordinatorSilentError: the coordinator has fallen silent meanwhile.
            RequestRefusedError: it refuses the request.
        """
        self._tickets += 1
        place: asyncio.Future[InstanceState | None] = asyncio.get_running_loop().create_future()
        ask = _Ask(self._tickets, request, for_prefill, self._clock(), place)
        self._asks[ask.ticket] = ask
        self.changed(request)
        if (followed := self._requests.get(request)) is not None:
            followed.ask = ask
        try:
            return await place
        except asyncio.CancelledError:
            if for_prefill and isinstance(request.state, Prefilling):
                request.prefill_failed()  # granted in the very same moment
            raise
        finally:
            del self._asks[ask.ticket]
            followed = self._requests.get(request)
            if followed is not None and followed.ask is ask:
                followed.ask = None
            self.changed(request)

    def changed(self, request: LiveRequest) -> None:
        """Note that a request has changed."""
        if request not in self._requests:
            if request.ended:
                return
            self._handles += 1
            self._requests[request] = _Followed(self._handles)
            self._by_handle[self._handles] = request
        self._changed[request] = None
        self._wake()

    def ended(self, request: LiveRequest, by_itself: bool) -> None:
        """Note that a request is over."""
        followed = self._requests.pop(request, None)
        self._changed.pop(request, None)
        if followed is not None:
            handle, tokens = followed.handle, request.generated_tokens
            tokens = _tokens(request.counted_tokens if request.several else tokens)
            said = {source: _tokens(n) for source, n in request.length_forecasts.items()}
            del self._by_handle[handle]
            ended = Ended(handle, by_itself, tokens, request.refused, request.counted, said)
            self._ended.append(ended)
            self._wake()

    def failed(self, instance: InstanceState, certain: bool) -> None:
        """Note a failure that counts against an instance."""
        self._failures.append(Failure(self._index[instance], certain))
        self._wake()

    def moved(self, request: LiveRequest, ended: MoveOutcome) -> None:
        """Note how an order to move a request ended."""
        followed = self._requests.get(request)
        if followed is not None and followed.moving is not None:
            pause = None if ended.pause is None else min(ended.pause, _LONGEST_SECONDS)
            self._moves.append(MoveEnded(followed.handle, followed.moving, ended.outcome, pause))
            followed.moving = None
            self.changed(request)

    def receive(self, notice: Notice) -> None:
        """Act on a notice; nothing is taken over of one that raises `CoordinationError`."""
        if notice.incarnation != self._incarnation:
            self._incarnation, self._heard = notice.incarnation, Numbering()
            self._whole = True
        view, last = notice.view, self._heard.last
        self._check(notice)
        arrival = self._heard.arrived(notice.number, view is not None or bool(notice.refused))
        if arrival is Arrival.OLD:
            return
        if arrival is Arrival.FAR:
            self._whole = True
            raise CoordinationError(f"notice {notice.number} after {last}", "number")
        self._whole = self._whole or notice.whole_please or arrival is Arrival.AHEAD
        if notice.refused != self.refused:
            self.refused = notice.refused
            if notice.refused is not None:
                logger.error("the coordinator refuses this proxy: %s", notice.refused)
        for answer in notice.answers:
            try:
                self._answered(answer)
            except Exception:
                logger.exception("an answer of the coordinator cannot be followed")
                ask = self._asks.get(answer.ticket)
                if ask is not None and not ask.place.done():
                    failed = RequestRefusedError(500, "the proxy failed; see its log")
                    ask.place.set_exception(failed)
        for order in notice.moves:
            self._ordered(order)
        if view is not None:
            if not self.back.is_set():
                logger.info("the coordinator places requests")
            self.view, self._viewed = view, self._clock()
            self._awaited = False
            self.back.set()
            for instance, drained in zip(self._instances, view.draining, strict=True):
                instance.drained = drained
        if self.pending:
            self._wake()
        self.taught(notice.learned)

    def give_up(self) -> None:
        """Withdraw all tickets, if the coordinator is silent: their requests ask elsewhere."""
        if not self.alive and self.back.is_set():
            self.back.clear()
            logger.warning("the coordinator is silent: placing by least KV load until it is back")
        if self._awaited and self._clock() - self._began >= _PATIENCE_SECONDS:
            self._awaited = False
            logger.warning(
                "no coordinator has answered yet: placing by least KV load until one does; does it "
                "run at coordinator.endpoint, with the same keys?"
            )
        if not self.alive:
            for ask in self._asks.values():
                if not ask.place.done():
                    ask.place.set_exception(CoordinatorSilentError())

    def report(self, beat: bool) -> Report | None:
        """Return what there is to say, or None.

        Args:
            beat: whether to say something in any case, and how many tokens requests have.
        """
        if not (beat or self.pending):
            return None
        whole = self._whole and beat  # however often it is asked for
        if beat:
            self._whole = False
            self._note_other()
        changed = list(self._requests if whole else self._changed)[:MOST_REQUESTS]
        ended, self._ended = self._ended[:MOST_REQUESTS], self._ended[MOST_REQUESTS:]
        moves, self._moves = self._moves[:MOST_REQUESTS], self._moves[MOST_REQUESTS:]
        failures = self._failures[-MOST_FAILURES:]  # of many, the latest count
        records = self._records([one for one in changed if one in self._requests])
        grown = self._grown() if beat and not whole else ([], [])
        step = self._step.seconds if self._step.known else 0.0
        self._sent += 1
        report = Report(
            session=self.session,
            number=self._sent,
            incarnation=self._incarnation,
            heard=self._heard.last,
            deployment=self._deployment,
            whole=whole,
            records=records,
            ended=ended,
            moves=moves,
            failures=failures,
            handles=np.array(grown[0], dtype=np.int64).tobytes(),
            tokens=np.array(grown[1], dtype=np.int64).tobytes(),
            step_seconds=min(step, _LONGEST_STEP_SECONDS),
            draining=[g for g, one in enumerate(self._instances) if one.drained],
            learned=said(self.lengths) if beat else [],
        )
        self._changed.clear()
        self._failures.clear()
        return report

    def _note_other(self) -> None:
        """Note what changes without a request's state: whether it can move, and its forecast."""
        for request, followed in self._requests.items():
            can_move = request.can_move and followed.moving is None
            if followed.can_move != can_move or followed.expected != request.expected_tokens:
                self._changed[request] = None

    def _grown(self) -> tuple[list[int], list[int]]:
        """Return the handles of requests that have more tokens than were reported, and how many."""
        handles, tokens = [], []
        for request, followed in self._requests.items():
            if request.generating:
                generated = _tokens(request.generated_tokens)
                if followed.tokens != generated:
                    followed.tokens = generated
                    handles.append(followed.handle)
                    tokens.append(generated)
        return handles, tokens

    def _records(self, requests: Sequence[LiveRequest]) -> list[Record]:
        """Return the requests as they are; one that cannot be reported is left out."""
        records = []
        for request in requests:
            try:
                records.append(self._record(request))
            except Exception:
                logger.exception("request %s cannot be reported to the coordinator", request.id)
        return records

    def _record(self, request: LiveRequest) -> Record:
        followed = self._requests[request]
        ask, moving = followed.ask, followed.moving is not None
        unreachable = {one for one in self._instances if not one.breaker.closed}
        followed.can_move = request.can_move and not moving
        followed.expected = request.expected_tokens
        return Record(
            handle=followed.handle,
            id=request.id,
            name=request.name,
            external_id=request.external_id,
            ticket=ask.ticket if ask is not None else 0,
            for_prefill=ask is not None and ask.for_prefill,
            waited=min(self._clock() - ask.since, _LONGEST_SECONDS) if ask is not None else 0.0,
            instance=self._where(request.instance),
            destination=self._where(request.destination),
            hop=request.hop,
            prompt_tokens=_tokens(request.prompt_tokens),
            generated_tokens=_tokens(request.generated_tokens),
            generated_at_move=_tokens_if_any(request.generated_at_move),
            max_tokens=_tokens_if_any(request.max_tokens),
            movable=request.movable,
            several=request.several,
            can_move=followed.can_move,
            moving=moving,
            generating=request.generating,
            on_its_way=request.on_its_way,
            avoid=sorted(self._index[one] for one in request.avoid | unreachable),
            expected_tokens=_tokens_if_any(request.expected_tokens),
            model=request.model,
            account=request.account.name,
            fewest_tokens=_tokens(request.fewest_tokens),
            prompt_is_known=request.prompt_is_known,
            media_tokens=_tokens(request.media_tokens),
            answers=request.answers,
        )

    def _where(self, instance: InstanceState | None) -> int:
        return NOWHERE if instance is None else self._index[instance]

    def _check(self, notice: Notice) -> None:
        check_lengths(notice.learned)
        n = len(self._instances)
        named = [answer.instance for answer in notice.answers]
        named += [max(order.source, order.target) for order in notice.moves]
        if max(named, default=NOWHERE) >= n:
            raise CoordinationError(f"instance {max(named)} of {n}", "content")
        if notice.view is not None and len(notice.view.draining) != n:
            raise CoordinationError(f"{len(notice.view.draining)} instances of {n}", "content")

    def _answered(self, answer: Answer) -> None:
        ask = self._asks.get(answer.ticket)
        if ask is None or ask.place.done() or not isinstance(ask.request.state, Waiting):
            return
        refusal, instance = answer.refusal, self._at(answer.instance)
        if refusal is not None:
            ask.place.set_exception(
                RequestRefusedError(
                    refusal.status, refusal.message, retry_after=refusal.retry_after
                )
            )
            return
        role = "prefill" if ask.for_prefill else "decode"
        if instance is None and not ask.for_prefill:
            return
        if instance is not None and instance.instance.role != role:
            return
        if (followed := self._requests.get(ask.request)) is not None:
            followed.ask = None
        if instance is not None:
            (ask.request.begin_prefill if ask.for_prefill else ask.request.place)(instance)
        ask.place.set_result(instance)

    def _ordered(self, order: MoveOrder) -> None:
        """Carry out an order, unless its request is not there any more, or moves already."""
        request = self._by_handle.get(order.handle)
        source, target = self._at(order.source), self._at(order.target)
        if request is None:
            return
        followed = self._requests[request]
        if (
            followed.moving is not None
            or request.hop != order.hop
            or request.instance is not source
            or target is None
            or target is source
            or not target.breaker.closed
            or not request.can_move
        ):
            self._moves.append(MoveEnded(order.handle, order.hop, "refused"))
            return
        followed.moving = order.hop
        self._carry_out(request, target, order.why)
        self.changed(request)

    def _at(self, index: int) -> InstanceState | None:
        return self._instances[index] if 0 <= index < len(self._instances) else None


def check_lengths(learned: Sequence[LearnedLength]) -> None:
    """Raise `CoordinationError` if digests of a length are none."""
    if any(len(one.chain) % 8 for one in learned):
        raise CoordinationError("digests of another size", "content")


def said(lengths: deque[LearnedLength]) -> list[LearnedLength]:
    """Take as many of the lengths as a message has."""
    return [lengths.popleft() for _ in range(min(len(lengths), MOST_LENGTHS))]


def _tokens(tokens: int) -> int:
    """Return as many tokens as a message can name: a client may ask for any number."""
    return min(max(tokens, 0), MOST_TOKENS)


def _tokens_if_any(tokens: int | None) -> int | None:
    return None if tokens is None else _tokens(tokens)
