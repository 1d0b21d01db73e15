"""The event loop of a server, and the signals that end it."""

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any

__all__ = ["end_when_asked", "run_server"]

logger = logging.getLogger("headway.serve")


def run_server(server: Coroutine[Any, Any, None]) -> None:
    """Run a server to its end, on uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(server)
    else:
        uvloop.run(server)


def end_when_asked(ended: asyncio.Event) -> None:
    """Set an event at Ctrl-C, at SIGTERM, and at SIGHUP where there is a terminal to be closed.

    A service, which has none, is sent SIGHUP by whoever wants it to read its configuration anew:
    it says that it does not, and goes on. Where SIGHUP is ignored, as under ``nohup``, it stays so.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, ended.set if _has_terminal() else _refuse_to_reload)


def _refuse_to_reload() -> None:
    logger.warning("SIGHUP: no configuration is read anew; restart to change it")


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal, whatever its output goes to."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
