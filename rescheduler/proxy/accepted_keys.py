"""With which keys engines have lately served a request: only these clients are told of others."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping

__all__ = ["AcceptedKeys"]

_REMEMBERED_SECONDS = 600.0
_MOST = 4_096


class AcceptedKeys:
    """Digests of the ``Authorization`` of requests that an engine has served, the latest last.

    Engines alone know the keys. One that none has served for ten minutes is to be proved anew.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._served: OrderedDict[bytes, float] = OrderedDict()

    def served(self, headers: Mapping[str, str]) -> None:
        """Note that an engine has served a request with these headers."""
        digest = _digest(headers)
        self._served[digest] = self._clock()
        self._served.move_to_end(digest)
        if len(self._served) > _MOST:
            self._served.popitem(last=False)

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether an engine has lately served a request with the same key, or with none."""
        last = self._served.get(_digest(headers))
        return last is not None and self._clock() - last <= _REMEMBERED_SECONDS


def _digest(headers: Mapping[str, str]) -> bytes:
    key = headers.get("Authorization", "").encode(errors="surrogateescape")
    return hashlib.blake2b(key, digest_size=16).digest()
