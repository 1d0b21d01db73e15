"""What is kept of one client: what it has had, and what its claims were worth."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import exp, log
from secrets import token_bytes
from typing import Any

Group = Hashable
"""What stands for the instances for which requests for a model compete."""

_KEPT = 0.95
"""Of what was learnt, with each request that ends: about the last twenty count."""
_PRIOR = 4.0
"""Requests without an error in their forecast that an account begins with."""
_LEAST_CORRECTION, _MOST_CORRECTION = 0.5, 64.0


OTHERS = "others"
"""Account of all clients that have none of their own, since the table is full."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Account:
    """Whoever requests are for, and what they have had, in prompt tokens over its weight.

    Attributes:
        name: of the account: an address, a header's value, or the digest of a key.
        weight: its share, relative to that of others.
        unfinished: requests that have arrived and not ended.
        waiting: those of them that wait for a place, by their group: of the instances that have
            their model.
        strictness: of its promises, by their level.
        settled: virtual service of the requests that have ended, by group: what one model's
            instances have served is no debt to others.
        charges: what each request that has a place is expected to take, not over the weight. The
            group of each is among those of ``settled``.
        begun_at: where it began again after its last pause, by group.
        mean_service: of its requests that have ended; None before any has.
    """

    name: str
    weight: float = 1.0
    unfinished: int = 0
    waiting: Counter[Group] = field(default_factory=Counter)
    strictness: dict[float, float] = field(default_factory=dict)
    settled: dict[Group, float] = field(default_factory=dict)
    charges: dict[Any, float] = field(default_factory=dict)
    begun_at: dict[Group, float] = field(default_factory=dict)
    mean_service: float | None = None
    _error: float = 0.0
    _errors: float = 0.0

    def served(self, group: Group) -> float:
        """Return its virtual service so far, with what requests that run are expected to take."""
        return self.settled.get(group, 0.0) + self._running(group)

    def lift(self, group: Group, virtual_time: float) -> None:
        """Begin again after a pause: what it did not use meanwhile is nobody's debt.

        What runs is part of what it has had: otherwise it would be ahead by that after each pause.
        """
        self.come_up(group, virtual_time)
        self.begun_at[group] = max(self.begun_at.get(group, 0.0), virtual_time)

    def come_up(self, group: Group, virtual_time: float) -> None:
        """Have no claim to what others had until then, while its requests wait.

        Unlike after a pause, what its running requests were charged too much is given back.
        """
        settled = self.settled.get(group, 0.0)
        self.settled[group] = max(settled, virtual_time - self._running(group))

    def _running(self, group: Group) -> float:
        if len(self.settled) == 1 and group in self.settled:  # as of nearly all
            running = sum(self.charges.values())
        else:
            running = sum(one for request, one in self.charges.items() if request.group == group)
        return running / self.weight

    def settle(self, request: Any, service: float) -> None:
        """Charge a request that has ended with what it took.

        What it was charged before, and did not take, is no claim to what others had in a pause.
        """
        self.charges.pop(request, None)
        request.paid = service / self.weight
        self.settled[request.group] = self.settled.get(request.group, 0.0) + request.paid
        self.lift(request.group, self.begun_at.get(request.group, 0.0))

    def take_back(self, request: Any) -> None:
        """Take back what a request was charged at its end: it goes on, and is charged anew."""
        if request.paid:
            self.settled[request.group] -= request.paid

    @property
    def correction(self) -> float:
        r"""By which a forecast of its next request's length is multiplied.

        .. math:: \exp\Big(\sum_i \kappa^i \ln \frac{o_i}{\hat o_i} \Big/
            \big(4 + \sum_i \kappa^i\big)\Big)

        over its requests that have ended, the latest first, with κ = 0.95, within [1/2, 64].
        """
        return min(
            max(exp(self._error / (_PRIOR + self._errors)), _LEAST_CORRECTION), _MOST_CORRECTION
        )

    def learn(self, expected: float, generated: int, by_itself: bool) -> None:
        """Learn from a request's length; one that was cut short tells that it was no shorter."""
        error = log(max(generated, 1) / max(expected, 1.0))
        if by_itself or error > 0.0:
            self._error = _KEPT * self._error + error
            self._errors = _KEPT * self._errors + 1.0


_REMEMBERED_SECONDS = 600.0
_MOST_KEYS = 4_096


class AcceptedKeys:
    """Digests of the ``Authorization`` of requests that an engine has served, the latest last.

    Engines alone know the keys. One that none has served for ten minutes is to be proved anew. The
    digests are salted: nobody finds a key by them.
    """

    def __init__(self, clock: Callable[[], float], salt: bytes = b"") -> None:
        self._clock = clock
        self._salt = hashlib.blake2b(salt, digest_size=32).digest() if salt else token_bytes(32)
        self._served: OrderedDict[str, float] = OrderedDict()

    def served(self, headers: Mapping[str, str]) -> None:
        """Note that an engine has served a request with these headers."""
        digest = self.of(headers)
        self._served[digest] = self._clock()
        self._served.move_to_end(digest)
        if len(self._served) > _MOST_KEYS:
            self._served.popitem(last=False)

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether an engine has lately served a request with the same key, or with none."""
        last = self._served.get(self.of(headers))
        return last is not None and self._clock() - last <= _REMEMBERED_SECONDS

    def of(self, headers: Mapping[str, str]) -> str:
        """Return the digest of a key; engines read its scheme whatever its letters' case."""
        given = headers.get("Authorization") or headers.get("authorization", "")
        scheme, _, key = given.strip().partition(" ")
        return self.digest(f"{scheme.lower()} {key.strip()}")

    def digest(self, text: str) -> str:
        """Return a name for a text that does not tell it."""
        raw = text.encode(errors="surrogatepass")
        return hashlib.blake2b(raw, key=self._salt, digest_size=16).hexdigest()
