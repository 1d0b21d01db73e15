"""Refusals of a batch's requests that may be the server's fault, and not the requests'."""

from typing import NamedTuple

from rescheduler.batch.batch_input import BatchRequest
from rescheduler.batch.batch_output import Answer

__all__ = ["MOST_REFUSALS", "Refusal", "Refusals", "is_of_the_server"]

MOST_REFUSALS = 5
"""Refusals in a row, of requests to an endpoint and a model, after which no more are sent there."""

_OF_CLIENTS = (401, 402, 407)
"""No change to a request would mend these."""
_OF_ADDRESSES = (403, 404, 405, 410, 421, 426)
"""The key, the model or the address may be wrong; or the request."""


class Refusal(NamedTuple):
    """A request and how it was refused."""

    request: BatchRequest
    answer: Answer


def is_of_the_server(answer: Answer) -> bool:
    """Return whether an answer may say more of the key, the model or the address."""
    return answer.status_code in (*_OF_CLIENTS, *_OF_ADDRESSES)


class Refusals:
    """Holds refusals back until it is known whose fault they are.

    Once the server answers a request to the same endpoint and model, 403, 404 and the like are
    the requests' own. After five in a row the endpoint and model are closed: what was refused has
    no answer, and nothing else is sent there. A wrong key is never a request's own fault.

    Args:
        targets: endpoints and models, by their numbers, of all requests that are to be sent.
    """

    def __init__(self, targets: set[int]) -> None:
        self._targets = targets
        self._held: dict[int, list[Refusal]] = {}
        self._closed: set[int] = set()
        self.last: Refusal | None = None

    @property
    def all_closed(self) -> bool:
        """Whether nothing is left to send."""
        return bool(self._closed) and self._closed >= self._targets

    def is_closed(self, target: int) -> bool:
        """Return whether nothing more is to be sent to an endpoint and model."""
        return target in self._closed

    def hold(self, refusal: Refusal) -> None:
        """Note a refusal, for which `is_of_the_server` holds."""
        target = refusal.request.target
        held = self._held.setdefault(target, [])
        held.append(refusal)
        if len(held) >= MOST_REFUSALS:
            self._closed.add(target)
            self.last = refusal

    def answered(self, target: int) -> list[Refusal]:
        """Return the refusals that are final, now that the server has answered a request."""
        if target in self._closed:
            return []
        return self._final(target)

    def rest(self) -> list[Refusal]:
        """Return the refusals that are final at the end: all were sent, and none was closed."""
        if self._closed:
            return []
        return [refusal for target in list(self._held) for refusal in self._final(target)]

    def _final(self, target: int) -> list[Refusal]:
        held = self._held.pop(target, [])
        for refusal in held:
            if refusal.answer.status_code in _OF_CLIENTS:
                self.last = refusal
        return [refusal for refusal in held if refusal.answer.status_code not in _OF_CLIENTS]
