"""A proxy's request, as the coordinator knows it."""

import asyncio
from dataclasses import dataclass

from rescheduler.coordination.messages import Record
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Decision, MoveOutcome, Placeable, Placements

__all__ = ["Mirror", "Order"]


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
        self.generating, self.on_its_way = record.generating, record.on_its_way
        self.moving, self._can_move = record.moving, record.can_move
        self._prefill_booked = False
        self._waited = record.waited
        self.avoid = frozenset(instances[g] for g in record.avoid)
        self._stand(
            instances[record.instance] if record.instance >= 0 else None,
            instances[record.destination] if record.destination >= 0 else None,
        )
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
