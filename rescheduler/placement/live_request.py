"""One client's request while the proxy holds it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from tokenizers import Tokenizer

from rescheduler.openai.openai_request import ClientRequest
from rescheduler.openai.openai_stream import StreamSplicer
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Decision, Placeable, Placements
from rescheduler.placement.request_states import (
    TRANSITIONS,
    Copying,
    Decoding,
    Finished,
    Freezing,
    Frozen,
    Kept,
    Landing,
    Move,
    Params,
    Placed,
    Prefill,
    Prefilling,
    RequestState,
    Returned,
    Unanswered,
    Waiting,
    instance_of,
    kept_of,
)
from rescheduler.tracing.span import NO_SPAN, Span


class IllegalTransitionError(RuntimeError):
    """Raised when a request cannot go from its state to the requested one."""


_CHARACTERS_PER_TOKEN = 4
_MOVING = (Copying, Freezing, Unanswered, Frozen, Landing)

S = TypeVar("S", bound=RequestState)


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """What a new token is to its request.

    Attributes:
        first: the first one that its present instance has generated.
        landed: the first one since it moved.
        waited: seconds since the previous token; None if this is the very first.
    """

    first: bool
    landed: bool
    waited: float | None


class LiveRequest(Placeable):
    """A request from its arrival to its end: its state, its tokens and its stream.

    Its state changes by the methods below only, each of which is one arrow of the diagram in
    ``docs/migrate.md``. Every change keeps `placements` right and resolves the futures of the
    move that it ends.

    Args:
        id: the migration id.
        name: what engines call it, after ``cmpl-`` or ``chatcmpl-``.
        arrived: seconds on the loop's clock.
        tokenizer: of the model; a request without one never moves.

    Attributes:
        hop: number of its placement on decode instances, from 0; -1 before the first.
        client_blocks: its tokens wait for its client, which reads too slowly.
        last_token: when its last token so far came, on the loop's clock; None before the first.
        failed_by: instances that answered it with an error since one last served it.
        engines_lost: engines that ended while they had just begun with it.
        breaks: its streams that broke later than that.
        lease_until: when what its prefill instance keeps can be read no more, on the loop's clock;
            None while nobody has looked.
    """

    def __init__(
        self,
        id: str,
        name: str,
        client: ClientRequest,
        headers: dict[str, str],
        arrived: float,
        tokenizer: Tokenizer | None,
        placements: "Placements[LiveRequest]",
    ) -> None:
        super().__init__(
            external_id=f"{'chatcmpl' if client.chat else 'cmpl'}-{name}",
            prompt_tokens=client.prompt_ids or max(1, client.size // _CHARACTERS_PER_TOKEN),
            max_tokens=client.max_tokens,
            fewest_tokens=client.fewest_tokens,
            id=id,
            name=name,
            model=client.model,
            movable=client.movable,
            prompt_is_known=client.prompt_ids is not None,
            media_tokens=client.media // _CHARACTERS_PER_TOKEN,
            several=client.answers > 1 or (not client.movable and client.stream_interval > 1),
            answers=client.answers,
            arrived=arrived,
        )
        self.client, self.headers = client, headers
        self.splicer = StreamSplicer(client, tokenizer)
        self.hop = -1
        self.client_blocks = False
        self.failed_by: list[InstanceState] = []
        self.engines_lost: list[str] = []
        self.breaks = 0
        self.incarnation = ""
        self._generated_before = 0
        self.lease_until: float | None = None
        self.trace: Span = NO_SPAN
        self._placements = placements
        self._state: RequestState = Waiting()
        self.last_token: float | None = None
        self._next_token: asyncio.Future[None] | None = None  # if anyone waits for it
        self._prefills = 0
        self._segment: asyncio.Timeout | None = None  # if it may give way

    @property
    def id_there(self) -> str:
        """How the control sockets of engines know it."""
        return self.external_id if self.client.direct else self.id

    @property
    def generated_here(self) -> int:
        """Tokens that its present instance has generated."""
        return self.generated_tokens - self._generated_before

    @property
    def state(self) -> RequestState:
        """Its state."""
        return self._state

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return isinstance(self._state, Finished)

    @property
    def prefill(self) -> Prefill | None:
        """What a prefill instance keeps for its decode instance; None if there is nothing."""
        return self._state.prefill if isinstance(self._state, (Waiting, Placed)) else None

    @property
    def transfer_params(self) -> Params | None:
        """Where its instance finds its KV cache; None if the instance computes it."""
        state = self._state
        if isinstance(state, Placed):
            return state.prefill.params if state.prefill is not None else None
        return state.params if isinstance(state, Landing) else None

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, on all instances."""
        return len(self.splicer.output_token_ids) or self._generated

    @property
    def may_be_frozen(self) -> bool:
        """Whether the end of its stream may be a freeze's."""
        return isinstance(self._state, (Freezing, Unanswered, Frozen))

    @property
    def can_move(self) -> bool:
        """Whether it can be moved right now."""
        return (
            isinstance(self._state, Decoding)
            and not self.client_blocks  # else nobody would read the end of its stream
            and self.movable
            and self._goes_on_elsewhere(self._state.instance)
            and self.generated_tokens > 0
            and self._state.instance.control is not None
        )

    @property
    def can_give_way(self) -> bool:
        """Whether it can leave its decode instance now and be resumed later.

        A client that streams would wait for its next token: such a request stays.
        """
        return (
            self.background
            and isinstance(self._state, Decoding)
            and self._segment is not None
            and not self.gives_way
            and self.movable
            and self._goes_on_elsewhere(self._state.instance)
            and not self.client.stream
        )

    def _goes_on_elsewhere(self, instance: InstanceState) -> bool:
        """Whether another instance can go on with its text, if it is as this one."""
        splicer = self.splicer
        return splicer.moves and (not splicer.parsed or instance.parses_again)

    @property
    def gives_way(self) -> bool:
        """Whether it is about to leave its decode instance."""
        return self._segment is not None and self._segment.when() is not None

    def give_way(self) -> None:
        """Leave the decode instance, and wait for one again, behind all other requests."""
        assert self._segment is not None
        self._segment.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def may_give_way(self) -> AsyncIterator[None]:
        """Let it be told to give way while the body decodes.

        Raises:
            TimeoutError: it was; it still is where it was.
        """
        try:
            async with asyncio.timeout(None) as self._segment:
                yield
        finally:
            self._segment = None

    def gave_way(self) -> Kept | None:
        """Leave its decode instance, which has not failed; as `fail`."""
        kept = self.fail(unsent=False)
        self.avoid = frozenset()
        return kept

    def begin_prefill(self, instance: InstanceState) -> None:
        """Occupy a place on a prefill instance."""
        self._enter(Prefilling(instance, self._prefills))
        self._prefills += 1

    @property
    def prefill_hop(self) -> int:
        """Which attempt to prefill it runs, from 0."""
        return self._expect(Prefilling).hop

    def prefilled(self, params: Params, prompt_tokens: int) -> None:
        """Leave the prefill instance, which keeps the blocks for a decode instance."""
        state = self._expect(Prefilling)
        self.prompt_tokens, self.lease_until = prompt_tokens, None
        self.prompt_is_known = True
        self._enter(Waiting(Prefill(Kept(state.instance, state.hop), params)))

    def prefill_failed(self) -> Kept:
        """Leave a prefill instance that has failed; return what it may keep nevertheless."""
        state = self._expect(Prefilling)
        self._enter(Waiting())
        return Kept(state.instance, state.hop)

    def place(self, instance: InstanceState, decision: Decision | None = None) -> None:
        """Occupy a place on the decode instance that was chosen."""
        prefill = self._expect(Waiting).prefill
        if self.trace.recorded:
            self._trace_place(instance, decision)
        self.hop += 1
        self.on_its_way = True
        self._enter(Placed(instance, prefill))

    def computes_prompt(self) -> Kept:
        """Have its instance compute its prompt; return what the prefill instance keeps in vain."""
        state = self._expect(Placed)
        assert state.prefill is not None
        self._enter(replace(state, prefill=None))
        return state.prefill.kept

    def accepted(self) -> None:
        """Note that its instance has accepted it, and so sees to the blocks kept elsewhere."""
        state, self.on_its_way = self._state, False
        if not isinstance(state, (Placed, Landing)):
            self._expect(Returned)
        else:
            self._enter(replace(state, accepted=True))

    def declined(self) -> None:
        """Note that its instance refuses it after all: an error is the first that it says.

        vLLM begins the answer of a stream before it looks at what is asked for, so that the status
        says nothing. What is kept for the instance elsewhere, nobody pulls then.
        """
        if isinstance(self._state, (Placed, Landing)):
            self._enter(replace(self._state, accepted=False))

    def token(self, now: float) -> TokenArrival:
        """Note that tokens come; take them into `splicer` afterwards."""
        state = self._state
        landed = isinstance(state, Landing)
        first = landed or isinstance(state, (Placed, Returned))
        waited = None if self.last_token is None else now - self.last_token
        if first:
            assert self.instance is not None
            self._enter(Decoding(self.instance), waited if landed else None)
            self.avoid = frozenset()
            self.prompt_tokens = len(self.splicer.prompt_token_ids) or self.prompt_tokens
            if landed:
                self.generated_at_move = self.generated_tokens
        elif not self.generating:
            raise IllegalTransitionError(f"a token comes for a request that is {self._name}")
        self._wake()
        self.last_token = now
        return TokenArrival(first, landed, waited)

    def untracked_tokens(self, tokens: int, now: float) -> TokenArrival:
        """Note tokens of a stream that is passed through as it is."""
        arrival = self.token(now)
        self._generated += tokens
        return arrival

    def move_to(self, target: InstanceState) -> Move:
        """Begin to move: its target copies what there is of its KV cache."""
        source = self._expect(Decoding).instance
        loop = asyncio.get_running_loop()
        move = Move(source, self.hop, target, loop.create_future(), loop.create_future())
        self._enter(Copying(move))
        return move

    def is_copying(self, move: Move) -> bool:
        """Return whether its target still copies its KV cache for this move."""
        return isinstance(self._state, Copying) and self._state.move is move

    async def next_token(self) -> None:
        """Wait for its next token, or until it leaves its state."""
        if self._next_token is None:
            self._next_token = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_token)

    def not_copied(self) -> None:
        """Stay, since there is no copy, or no reason to move any more."""
        self._enter(Decoding(self._expect(Copying).move.source))

    def freeze(self) -> None:
        """Note that its source is being asked to freeze it."""
        self._enter(Freezing(self._expect(Copying).move))

    async def freeze_answered(self) -> None:
        """Wait while it is `Freezing`."""
        if isinstance(self._state, Freezing):
            await asyncio.shield(self._state.move.answered)  # others wait for it, too

    def is_freezing(self, move: Move) -> bool:
        """Return whether it still waits for the source's answer to this freeze."""
        return isinstance(self._state, Freezing) and self._state.move is move

    def frozen(self, output_token_ids: list[int], params: Params) -> None:
        """Note that the source has frozen it."""
        move = self._expect(Freezing).move
        self._enter(Frozen(move, tuple(output_token_ids), params))

    def not_frozen(self) -> None:
        """Note that the source has not frozen it: it goes on there."""
        self._enter(Decoding(self._expect(Freezing).move.source))

    def unanswered(self) -> None:
        """Note that the source has not answered, so that it may have frozen the request or not."""
        self._enter(Unanswered(self._expect(Freezing).move))

    def land(self) -> None:
        """Go on at the target, since the source's stream has brought its last token."""
        state = self._expect(Frozen)
        self.hop += 1
        self._enter(Landing(state.move, state.params))

    def give_back(self) -> None:
        """Go on at the source, which computes again what it has frozen."""
        state = self._state
        if not isinstance(state, Unanswered):
            state = self._expect(Frozen)
        source = state.move.source
        self.hop += 1
        self._enter(Returned(source))

    def never_froze(self) -> None:
        """Note that its stream ends by itself, whatever became of the unanswered freeze."""
        self._enter(Decoding(self._expect(Unanswered).move.source))

    def turned_away(self) -> None:
        """Wait for another instance than the one that has no room for it."""
        state = self._expect(Placed)
        self.avoid |= {state.instance}
        self._enter(Waiting(None if state.accepted else state.prefill))

    def fail(self, unsent: bool, answered: bool = False) -> Kept | None:
        """Leave the instance that has failed; return what another one keeps in vain.

        A request whose target has generated nothing goes back to its source, if that is in
        service: its prefix cache still holds nearly all of it.

        Args:
            unsent: the instance has never got the request.
            answered: it has answered with an error.
        """
        if not isinstance(self._state, (Landing, Frozen, Placed, Returned)) and not self.generating:
            raise IllegalTransitionError(f"no instance can fail a request that is {self._name}")
        assert self.instance is not None
        state, self.avoid = self._state, frozenset({self.instance})
        if isinstance(state, Landing):
            source = state.move.source
            returns = source.breaker.closed
            self.hop += returns
            self._enter(Returned(source) if returns else Waiting())
            vain = (unsent or answered) and not state.accepted
            return Kept(source, state.move.hop) if vain else None
        if unsent and isinstance(state, Placed):
            self._enter(Waiting(state.prefill))
            return None
        self._enter(Waiting())
        return kept_of(state)

    def finish(self) -> Kept | None:
        """End, whether well or not; return what an instance keeps in vain."""
        state = self._state
        self._enter(Finished())
        return kept_of(state)

    def _trace_place(self, instance: InstanceState, decision: Decision | None) -> None:
        if decision is None:
            now = time.time_ns()
            self.trace.over("place", now, now, instance=instance.name, policy="coordinator")
        else:
            began, ended = decision.began, decision.ended
            self.trace.over("place", began, ended, instance=instance.name, **decision.attributes())

    def _wake(self) -> None:
        if self._next_token is not None:
            self._next_token.set_result(None)
            self._next_token = None

    @property
    def _name(self) -> str:
        return type(self._state).__name__

    def _expect(self, kind: type[S]) -> S:
        if not isinstance(self._state, kind):
            raise IllegalTransitionError(f"the request is {self._name}, not {kind.__name__}")
        return self._state

    def _enter(self, state: RequestState, pause: float | None = None) -> None:
        """Go to another state: the only place where a request's state changes."""
        if type(state) not in TRANSITIONS[type(self._state)]:
            raise IllegalTransitionError(
                f"a request cannot go from {self._name} to {type(state).__name__}"
            )
        self.on_its_way = self.on_its_way and isinstance(state, Placed)
        before, self._state = self._state, state
        left, self.instance = self.instance, instance_of(state)
        if self.instance is not None and self.instance is not left:
            self.incarnation = self.instance.evidence.incarnation
            self._generated_before = self.generated_tokens
        self.destination = (
            state.move.target if isinstance(state, (Copying, Freezing, Frozen)) else self.instance
        )
        self.generating = isinstance(state, (Decoding, Copying, Freezing, Unanswered, Frozen))
        self._placements.put(self, self.instance)
        self._wake()
        if isinstance(before, (Copying, Freezing)) and not isinstance(state, Freezing):
            before.move.answered.set_result(None)
        if isinstance(before, _MOVING) and not isinstance(state, _MOVING):
            before.move.landed.set_result(pause)
