"""Ports for servers that a test starts later, or that must stay closed."""

import itertools
import os
import socket

_FIRST, _EACH, _WORKERS = 10_000, 1_250, 8
"""Below the ports that the system gives to whoever wants any, and those of `local_deployment`."""
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_NUMBERS = itertools.count(os.getpid())


def free_port() -> int:
    """Return a port of the loopback that nothing listens on and no other process will take.

    Each worker of a test run has ports of its own, and gives all of them before one again.
    """
    for number in itertools.islice(_NUMBERS, _EACH):
        port = _FIRST + _EACH * _WORKER + number % _EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"none of {_EACH} ports from {_FIRST + _EACH * _WORKER} is free")
