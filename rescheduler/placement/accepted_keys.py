"""With which keys engines have lately served a request: only these clients are told of others."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from secrets import token_bytes

__all__ = ["AcceptedKeys"]

_REMEMBERED_SECONDS = 600.0
_MOST = 4_096


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
        if len(self._served) > _MOST:
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
