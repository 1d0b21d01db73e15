"""The event loop of a server, and the signals that end it."""

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

__all__ = [
    "end_when_asked",
    "ending_signals_held",
    "ending_signals_raised",
    "held_interrupts",
    "raise_open_files",
    "run_server",
]


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
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


_ASK_TO_END = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_interrupts(*others: signal.Signals) -> Iterator[None]:
    """Defer a Ctrl-C that arrives in a block until the block ends.

    A `KeyboardInterrupt` may be raised between any two Python instructions: while a row group is
    written, or where numba turns arguments into pointers, which replaces it by a `TypeError`.
    Only the main thread receives it, so that elsewhere there is nothing to hold, nor where a
    signal is ignored. Other signals are held likewise.
    """
    handlers = {}
    if current_thread() is main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, *others)}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    held: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda which, frame: held.append((which, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if held:
        first, frame = held[0]
        handlers[signal.Signals(first)](first, frame)


@contextmanager
def ending_signals_held() -> Iterator[None]:
    """Defer a Ctrl-C, SIGTERM or SIGHUP that arrives in a block until the block ends."""
    with held_interrupts(*_ASK_TO_END):
        yield


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """Raise `KeyboardInterrupt` also for SIGTERM, and for SIGHUP when the terminal goes away.

    By default they end a process without a chance to stop what it has started. A signal that
    is ignored, as under ``nohup``, or has a handler is left alone, and so is all where this is
    not the main thread.
    """
    raised = [
        number
        for number in _ASK_TO_END
        if current_thread() is main_thread() and signal.getsignal(number) == signal.SIG_DFL
    ]
    try:
        for number in raised:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in raised:
            signal.signal(number, signal.SIG_DFL)


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # some systems forbid what they name
            logger.warning("the limit of open files stays at %d: %s", soft, error)
        else:
            return hard
    return soft
