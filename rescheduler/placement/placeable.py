"""What placing and moving need to know of a request, whichever process carries its stream."""

import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.ordering.fairness import OUTPUT_WEIGHT
from rescheduler.placement.account import Account, Group
from rescheduler.placement.instance_state import InstanceState
from rescheduler.tracing.span import Attribute

Source = Literal["prompt", "past", "both"]
"""What forecasts the length of an answer as its request arrives."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of a routing policy about requests that waited, in nanoseconds since 1970."""

    policy: str
    instances: Sequence[InstanceState]
    view: ClusterView
    began: int
    ended: int

    def attributes(self) -> dict[str, Attribute]:
        """Return what a trace says of it; lists are by instance."""
        capacity = self.view.kv_capacity
        known = bool((capacity < UNLIMITED).all())
        budget = self.view.prefill_budget
        return {
            "policy": self.policy,
            "waiting": self.view.n_waiting,
            "instances": [instance.name for instance in self.instances],
            "requests": self.view.running.tolist(),
            "kv_tokens": self.view.kv_load.tolist(),
            "kv_capacity_tokens": capacity.tolist() if known else None,
            "prefill_budget_tokens": budget.tolist() if budget is not None else None,
        }


class MoveOutcome(NamedTuple):
    """How a move ended, well or not.

    Attributes:
        outcome: ``moved``, or why the request stays; `docs/serve.md` lists them.
        pause: seconds from the last token at the source to the first at the target; None if it
            did not move.
    """

    outcome: str
    pause: float | None = None


@dataclass(eq=False, slots=True)
class Placeable:
    """A request that counts on its instance, and can be placed and moved; equal to itself only.

    Attributes:
        external_id: what engines call it, without what they append.
        prompt_tokens: an estimate until an engine reports the exact number.
        media_tokens: of that estimate, what is by the bytes of pictures and the like.
        max_tokens: most that it may generate, as far as its client said.
        expected_tokens: that it is expected to generate by its prompt; None if nothing is known.
        generated_at_move: tokens when it last moved; None if it has not.
        destination: instance that it is on, or on its way to.
        generating: whether its present instance has generated a token.
        prompt_is_known: an engine has reported the exact number of its prompt's tokens.
        fewest_tokens: that it will generate, whatever is forecast.
        id: the migration id.
        name: what its client calls it.
        model: that it is for; empty if no instance can be chosen by it.
        movable: whether it can ever move.
        several: whether its tokens cannot be counted as they come, as of several answers.
        answers: that it asks for, to all of its prompts.
        background: it is served after all that are not.
        slow_client: its client reads so slowly that its tokens have waited for it.
        instance: that it is on; None while it waits for one.
        on_its_way: its decode instance has not accepted it yet.
        avoid: instances that have just failed it, or turned it away.
        arrived: when it came, in seconds on the event loop's clock.
        waiting_since: when it began to wait for a decode instance, likewise.
        finish_by: when it has been promised to finish, likewise; infinite without a promise.
        start_by: when it should start to keep the promise, likewise.
        promised_level: probability with which it was to be kept.
        account: whom it is for.
        group: stands for the instances that have its model, see `Accounts`.
        had_decode_place: it has been given a place on a decode instance.
        refused: an engine has refused it, as invalid or not allowed.
        foreseen_tokens: that it was expected to generate when it was last ordered; 0 before.
        length_forecasts: tokens that each source forecast as it arrived, by the source's name.
        counted: service that its engine has counted at its end; None if it has not.
        paid: virtual service that its account was charged at its end.
    """

    external_id: str
    prompt_tokens: int = 0
    max_tokens: int | None = None
    expected_tokens: int | None = None
    generated_at_move: int | None = None
    destination: InstanceState | None = None
    generating: bool = False
    prompt_is_known: bool = False
    media_tokens: int = 0
    fewest_tokens: int = 0
    id: str = ""
    name: str = ""
    model: str = ""
    movable: bool = False
    several: bool = False
    answers: int = 1
    background: bool = False
    slow_client: bool = False
    instance: InstanceState | None = None
    on_its_way: bool = False
    avoid: frozenset[InstanceState] = frozenset()
    arrived: float = 0.0
    waiting_since: float = 0.0
    finish_by: float = inf
    start_by: float = inf
    promised_level: float = 0.0
    account: Account = field(default_factory=partial(Account, ""))
    group: Group = None
    had_decode_place: bool = False
    refused: bool = False
    foreseen_tokens: float = 0.0
    length_forecasts: dict[Source, int] = field(default_factory=dict)
    counted: float | None = None
    counted_tokens: int = 0
    paid: float = 0.0
    _generated: int = 0
    _rests_until: float = 0.0

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, on all instances."""
        return self._generated

    @property
    def context_tokens(self) -> int:
        """Tokens of its prompt and generated so far."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def was_cut(self) -> bool:
        """Whether its ``max_tokens`` ends it: its answer would have been longer."""
        return self.max_tokens is not None and self.generated_tokens >= self.max_tokens

    @property
    def can_move(self) -> bool:
        """Whether it can be moved right now."""
        return False

    def rests(self, now: float) -> bool:
        """Return whether it is not to be moved yet, since its last move did not succeed."""
        return now < self._rests_until

    def rest(self, until: float) -> None:
        """Do not move it before a time."""
        self._rests_until = max(self._rests_until, until)

    def wait(self, now: float) -> None:
        """Begin to wait for a decode instance."""
        self.waiting_since = now

    def begin_prefill(self, instance: InstanceState) -> None:
        """Occupy a place on a prefill instance."""
        raise NotImplementedError

    def prefill_failed(self) -> object:
        """Leave a prefill instance."""
        raise NotImplementedError

    def place(self, instance: InstanceState, decision: Decision | None = None) -> None:
        """Occupy a place on the decode instance that was chosen; no decision: elsewhere."""
        raise NotImplementedError

    @property
    def can_give_way(self) -> bool:
        """Whether it can leave its decode instance now and be resumed later."""
        return False

    @property
    def gives_way(self) -> bool:
        """Whether it is about to leave its decode instance."""
        return False

    def give_way(self) -> None:
        """Leave the decode instance, and wait for one again."""
        raise NotImplementedError

    def reported(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Note what its engine says of a stream that is passed through as it is.

        Of several prompts or answers it says this one by one, which is not their sum.
        """
        if not self.several:
            self.prompt_tokens, self.prompt_is_known = prompt_tokens, True
            self._generated = max(self._generated, generated_tokens)

    def was_counted(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Note what its engine says in its answer, of all prompts and answers together."""
        self.reported(prompt_tokens, generated_tokens)
        self.counted = prompt_tokens + OUTPUT_WEIGHT * generated_tokens
        self.counted_tokens = generated_tokens


_KEPT_MOVES, _LATEST_ANSWERS = 50, 500


@dataclass(frozen=True, slots=True)
class EndedMove:
    """A move that has ended, well or not.

    Attributes:
        time: when, seconds since 1970.
        source: name of the instance that it left, or was to leave.
        target: name of the instance that it was to go to.
        tokens: that it had generated by then.
        pause: as in `MoveOutcome`.
    """

    time: float
    id: str
    name: str
    source: str
    target: str
    tokens: int
    reason: str
    outcome: str
    pause: float | None


class MoveHistory:
    """Keeps the latest moves, oldest first."""

    def __init__(self) -> None:
        self.latest: deque[EndedMove] = deque(maxlen=_KEPT_MOVES)

    def ended(
        self,
        request: Placeable,
        source: InstanceState,
        target: InstanceState,
        reason: str,
        ended: MoveOutcome,
    ) -> None:
        """Note how a move of a request has ended."""
        now, tokens = time.time(), request.generated_tokens
        of = now, request.id, request.name, source.name, target.name, tokens, reason
        self.latest.append(EndedMove(*of, *ended))


class LengthFactors:
    """Keeps how many times as long as forecast answers were, or as short.

    Attributes:
        latest: of each source that forecasts lengths as requests arrive, the factors of the latest
            500 answers.
    """

    def __init__(self) -> None:
        self.latest: dict[Source, deque[float]] = {
            source: deque(maxlen=_LATEST_ANSWERS) for source in get_args(Source)
        }

    def ended(self, request: Placeable) -> dict[Source, float]:
        """Note the factors of a request that has ended by itself; return them, by source."""
        if request.several or request.was_cut:
            return {}
        factors: dict[Source, float] = {}
        for source, forecast in request.length_forecasts.items():
            ratio = max(request.generated_tokens, 1) / max(forecast, 1)
            factors[source] = max(ratio, 1 / ratio)
            self.latest[source].append(factors[source])
        return factors


R = TypeVar("R", bound=Placeable)

Mover = Callable[[R, InstanceState, str], Coroutine[Any, Any, MoveOutcome]]
"""Moves a request to an instance, for a reason; it ends once the request runs there, or stays."""


class Placements(Generic[R]):
    """The requests on each instance; a request is on one instance at most.

    Requests keep this up to date themselves, with each change of their state.
    """

    def __init__(self) -> None:
        self._on: dict[InstanceState, dict[R, None]] = {}
        self._at: dict[R, InstanceState] = {}

    def on(self, instance: InstanceState) -> Collection[R]:
        """Return the requests on an instance, in the order in which they came."""
        return self._on.get(instance, {}).keys()

    def put(self, request: R, instance: InstanceState | None) -> None:
        """Note where a request is now; None: on no instance."""
        before = self._at.get(request)
        if before is instance:
            return
        if before is not None:
            del self._on[before][request], self._at[request]
        if instance is not None:
            self._at[request] = instance
            self._on.setdefault(instance, {})[request] = None
