"""The memory of request bodies: counted as they arrive, until their requests end."""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rescheduler.openai.openai_request import RequestRefusedError

_IPV6_NETWORK = 64  # what a provider gives to one customer


class FairShares:
    """How much of something clients hold: at most so much together, and a share for each of them.

    Attributes:
        held: by all clients.
    """

    def __init__(self, most: int, share: int) -> None:
        self._most, self._share = most, share
        self.held = 0
        self._of: Counter[str] = Counter()

    def take(self, client: str, count: int = 1) -> bool:
        """Give a client more, or less if negative; return whether it may have that."""
        held, of = self.held + count, self._of[client] + count
        if count > 0 and (held > self._most or of > self._share):
            return False
        self.held = held
        if of:
            self._of[client] = of
        else:
            del self._of[client]
        return True


def client_of(address: object) -> str:
    """Return whom an address of `socket.getpeername` is: a host, or its network of many hosts."""
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    try:
        known = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is not None:
            return str(known.ipv4_mapped)
        return str(ipaddress.ip_network((known, _IPV6_NETWORK), strict=False))
    return host


class KeptBody:
    """A body of which more and more arrives."""

    def __init__(self, shares: FairShares, client: str, largest: int) -> None:
        self._shares = shares
        self._client = client
        self._largest = largest
        self._size = 0

    def grow(self, more: int) -> None:
        """Count bytes that have arrived; raises as `be` does."""
        self.be(self._size + more)

    def be(self, size: int) -> None:
        """Count as many bytes as there are.

        Raises:
            RequestRefusedError: 413, it is too large; 503, all of them together are.
        """
        if size > self._largest:
            raise RequestRefusedError(413, f"the body is larger than {self._largest >> 20} MiB")
        if not self._shares.take(self._client, size - self._size):
            raise RequestRefusedError(
                503, "too many large requests are being served; try again later", retry_after=1
            )
        self._size = size


class BodyMemory:
    """The bodies of all requests that are being served, which are kept to resume them.

    What a client announces and does not send takes nothing from others. The bodies of one client
    may have a share of the memory, and never less than the largest body.
    """

    def __init__(self, largest_mb: int, most_mb: int, share: float) -> None:
        most = most_mb << 20
        self._largest = largest_mb << 20
        self._shares = FairShares(most, max(int(share * most), self._largest))

    @property
    def held(self) -> int:
        """Bytes that are kept now."""
        return self._shares.held

    @contextmanager
    def kept(self, client: str, announced: int | None) -> Iterator[KeptBody]:
        """Count a body until its request ends; `client_of` says whose it is.

        Raises:
            RequestRefusedError: 413, its client announces more than the largest body.
        """
        body = KeptBody(self._shares, client, self._largest)
        try:
            if announced is not None and announced > self._largest:
                body.be(announced)
            yield body
        finally:
            body.be(0)
