"""Listening sockets that outlive the server that accepts on them.

A launcher opens them and hands them to each of its proxies: a new one accepts beside the old one,
and then in its place, while no client is refused.
"""

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

__all__ = ["BACKLOG", "inherited", "listen", "variables_for"]

BACKLOG = 1024
"""Connections that may wait to be accepted."""
_VARIABLE = "HEADWAY_LISTENING"


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of a host, as asyncio's servers do.

    Raises:
        OSError: there is no such address, or it is in use.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(
                socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=False)
            )
            for family, address in dict.fromkeys((family, at) for family, *_, at in found)
        ]
        stack.pop_all()
    return sockets


def variables_for(sockets: Mapping[str, Iterable[socket.socket]]) -> dict[str, str]:
    """Return what tells a process which sockets it inherits, by what they are for."""
    numbers = {what: [one.fileno() for one in some] for what, some in sockets.items()}
    return {_VARIABLE: json.dumps(numbers)}


def inherited(what: str) -> Sequence[socket.socket]:
    """Return the sockets that this process has inherited for something; empty: none."""
    numbers = json.loads(os.environ.get(_VARIABLE, "{}")).get(what, [])
    return [socket.socket(fileno=number) for number in numbers]
