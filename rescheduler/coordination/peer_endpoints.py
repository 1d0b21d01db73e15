"""Which endpoints of other proxies a proxy may connect to."""

import ipaddress
import re

__all__ = ["PeerEndpointError", "checked_endpoint"]

_ENDPOINT = re.compile(
    r"tcp://(?:(?P<v4>[0-9.]{7,15})|\[(?P<v6>[0-9a-fA-F:.]{2,45})\]):(?P<port>[0-9]{1,5})"
)
_FIRST_PORT, _LAST_PORT = 1024, 65_535

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class PeerEndpointError(ValueError):
    """An endpoint that no proxy listens on."""


def checked_endpoint(endpoint: str, address: str | None, loopback: bool | None = None) -> str:
    """Return an endpoint as every proxy writes it, if a proxy may listen there.

    Only TCP, on an address in numbers, and no port below 1024, where other services listen: a
    proxy must not be made to connect to whatever a peer names.

    Args:
        endpoint: that a proxy names as its own.
        address: that it connects from; None if that is not known.
        loopback: whether it must be, or must not be, of this machine; None if that is not known.

    Raises:
        PeerEndpointError: says what is wrong.
    """
    parts = _ENDPOINT.fullmatch(endpoint)
    if parts is None:
        raise PeerEndpointError("not like tcp://ADDRESS:PORT, with an address in numbers")
    try:
        host = _plain(parts["v4"] or parts["v6"])
    except ValueError as error:
        raise PeerEndpointError("no address of a machine") from error
    port = int(parts["port"])
    if not _FIRST_PORT <= port <= _LAST_PORT:
        raise PeerEndpointError(f"not a port from {_FIRST_PORT} to {_LAST_PORT}")
    if host.is_unspecified or host.is_multicast:
        raise PeerEndpointError("no address of a machine")
    if address is not None and host != _plain(address):
        raise PeerEndpointError(f"not on {address}, which the proxy connects from")
    if loopback is not None and host.is_loopback is not loopback:
        raise PeerEndpointError("on another machine" if loopback else "on the loopback")
    return f"tcp://[{host}]:{port}" if host.version == 6 else f"tcp://{host}:{port}"


def _plain(text: str) -> Address:
    """Return an address, an IPv4 one also where IPv6 writes it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
