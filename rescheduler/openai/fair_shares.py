"""Limits of which no single client can use up more than its share."""

import ipaddress
from collections import Counter

__all__ = ["FairShares", "client_of"]

_IPV6_NETWORK = 64  # what a provider gives to one customer


class FairShares:
    """A number of something, and how much of it each client holds.

    Args:
        most: that all clients hold together.
        share: that one client holds at most.

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
    """Return whom a socket's address stands for: a host, or its network where that has many.

    Args:
        address: as `socket.getpeername` returns it.
    """
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
