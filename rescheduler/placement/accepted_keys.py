"""With which keys engines have lately served a request: only these clients are told of others."""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping

__all__ = ["AcceptedKeys"]

_REMEMBERED_SECONDS = 600.0
_MOST = 4_096


class AcceptedKeys:
    """Digests of the ``Authorization`` of requests that an engine has served, the latest last.

    Engines alone know the keys. One that none has served for ten minutes is to be proved anew. The
    digests are salted, so that nobody finds a key by them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._salt = clock, secrets.token_bytes(16)
        self._served: OrderedDict[str, float] = OrderedDict()

    def served(self, headers: Mapping[str, str]) -> None:
        """Note that an engine has served a request with these headers."""
        digest = self.digest(headers.get("Authorization", ""))
        self._served[digest] = self._clock()
        self._served.move_to_end(digest)
        if len(self._served) > _MOST:
            self._served.popitem(last=False)

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether an engine has lately served a request with the same key, or with none."""
        last = self._served.get(self.digest(headers.get("Authorization", "")))
        return last is not None and self._clock() - last <= _REMEMBERED_SECONDS

    def digest(self, text: str) -> str:
        """Return a name for a text that does not tell it."""
        raw = text.encode(errors="surrogatepass")
        return hashlib.blake2b(raw, key=self._salt, digest_size=16).hexdigest()
