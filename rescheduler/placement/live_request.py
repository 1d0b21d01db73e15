"""One client's request while the proxy holds it."""

import asyncio
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from rescheduler.openai.openai_request import ClientRequest
from rescheduler.openai.openai_stream import StreamSplicer
from rescheduler.placement.instance_state import InstanceState
from rescheduler.transfer.control_messages import Frozen

__all__ = ["LiveRequest", "Move"]

_CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class Move:
    """A freeze that was asked for.

    Attributes:
        source: where the request is.
        target: where it is to go.
        started: seconds on the loop's clock.
        verdict: what the source says: frozen, or None for "nothing has moved". An exception
            if it says nothing.
        landed: whether the target gave the next token.
    """

    source: InstanceState
    target: InstanceState
    started: float
    verdict: asyncio.Future[Frozen | None]
    landed: asyncio.Future[bool]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What is known of a request from its arrival to its end.

    Attributes:
        id: the migration id.
        name: what engines call it, after ``cmpl-`` or ``chatcmpl-``.
        client: what was asked for.
        headers: that every engine gets.
        arrived: seconds on the loop's clock.
        splicer: its tokens and its stream.
        prompt_tokens: exact from its prefill on, guessed from its size before.
        instance: decode instance that it is placed on, if any.
        hop: placements on decode instances so far.
        generating: its present instance has given a token.
        last_token: when its newest token came; 0 before the first.
        waiting_since: when it began to wait for a decode instance.
        untracked: tokens seen of a request whose tokens are not tracked.
        generated_at_move: tokens when it last moved; None: it never has.
        move: under way, until the request's old stream has ended.
        landing: a move whose target has not given a token yet.
        rests_until: it is not moved before, since a move did not succeed.
        avoid: instances that have just failed it, or turned it away.
        prefilled: parameters of its prefill, until a decode instance has them.
        kept_at: the source that keeps its KV cache, until the target has been asked.
    """

    id: str
    name: str
    client: ClientRequest
    headers: dict[str, str]
    arrived: float
    splicer: StreamSplicer
    prompt_tokens: int
    instance: InstanceState | None = None
    hop: int = 0
    generating: bool = False
    last_token: float = 0.0
    waiting_since: float = 0.0
    untracked: int = 0
    generated_at_move: int | None = None
    move: Move | None = None
    landing: Move | None = None
    rests_until: float = 0.0
    avoid: frozenset[InstanceState] = frozenset()
    prefilled: dict[str, Any] | None = None
    kept_at: InstanceState | None = None

    @classmethod
    def new(
        cls,
        id: str,
        name: str,
        client: ClientRequest,
        headers: dict[str, str],
        arrived: float,
        tokenizer: Tokenizer,
        size: int,
    ) -> "LiveRequest":
        """Return a request whose body has ``size`` bytes."""
        splicer = StreamSplicer(client, tokenizer)
        prompt = client.body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            guess = len(prompt)
        else:
            guess = max(1, size // _CHARACTERS_PER_TOKEN)
        return cls(id, name, client, headers, arrived, splicer, guess)

    @property
    def external_id(self) -> str:
        """What its engine calls it, without what the engine appends."""
        return f"{'chatcmpl' if self.client.chat else 'cmpl'}-{self.name}"

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, on all instances."""
        return len(self.splicer.output_token_ids) or self.untracked

    @property
    def can_move(self) -> bool:
        """Whether it can be moved right now."""
        return (
            self.client.movable
            and self.generating
            and self.move is None
            and self.landing is None
            and self.splicer.moves
            and self.generated_tokens > 0
            and self.instance is not None
            and self.instance.control is not None
        )

    def place(self, instance: InstanceState) -> None:
        """Count it on an instance."""
        self.leave()
        self.instance, self.generating = instance, False
        instance.requests[self.id] = self

    def leave(self) -> None:
        """Count it nowhere."""
        if self.instance is not None:
            self.instance.requests.pop(self.id, None)
            self.instance = None

    def land(self, landed: bool) -> None:
        """Say whether the target of its move, if there is one, has given a token."""
        move, self.landing = self.landing, None
        if move is not None:
            move.landed.set_result(landed)
