"""What is kept of one client: what it has had, and what its claims were worth."""

from math import exp, log
from typing import Any

__all__ = ["Account"]

_KEPT = 0.95
"""Of what was learnt, with each request that ends: about the last twenty count."""
_PRIOR = 4.0
"""Requests without an error in their forecast that an account begins with."""
_LEAST, _MOST = 0.5, 64.0


class Account:
    """Whoever requests are for, and what they have had, in prompt tokens over its weight.

    Attributes:
        name: of the account: an address, a header's value, or the digest of a key.
        weight: its share, relative to that of others.
        unfinished: requests that have arrived and not ended.
        waiting: those of them that wait for a place.
        strictness: of its promises, by their level.
        settled: virtual service of the requests that have ended.
        charges: what each request that has a place is expected to take, not over the weight.
    """

    __slots__ = (
        "__weakref__",
        "_error",
        "_errors",
        "charges",
        "name",
        "settled",
        "strictness",
        "unfinished",
        "waiting",
        "weight",
    )

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name, self.weight = name, weight
        self.unfinished = self.waiting = 0
        self.strictness: dict[float, float] = {}
        self.settled = 0.0
        self.charges: dict[Any, float] = {}
        self._error = self._errors = 0.0

    @property
    def served(self) -> float:
        """Virtual service so far, with what its requests that run are expected to take."""
        return self.settled + sum(self.charges.values()) / self.weight

    def lift(self, virtual_time: float) -> None:
        """Begin again after a pause: what it did not use meanwhile is nobody's debt."""
        self.settled = max(self.settled, virtual_time)

    def settle(self, request: Any, service: float) -> None:
        """Charge a request that has ended with what it took."""
        self.charges.pop(request, None)
        self.settled += service / self.weight

    @property
    def correction(self) -> float:
        r"""By which a forecast of its next request's length is multiplied.

        .. math:: \exp\Big(\sum_i \kappa^i \ln \frac{o_i}{\hat o_i} \Big/
            \big(4 + \sum_i \kappa^i\big)\Big)

        over its requests that have ended, the latest first, with κ = 0.95, within [1/2, 64].
        """
        return min(max(exp(self._error / (_PRIOR + self._errors)), _LEAST), _MOST)

    def learn(self, expected: float, generated: int, by_itself: bool) -> None:
        """Learn from a request's length; one that was cut short tells that it was no shorter."""
        error = log(max(generated, 1) / max(expected, 1.0))
        if by_itself or error > 0.0:
            self._error = _KEPT * self._error + error
            self._errors = _KEPT * self._errors + 1.0
