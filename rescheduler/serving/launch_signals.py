"""Signals that end a program which has started others, so that it ends those too."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

__all__ = ["ending_signals_held", "ending_signals_raised"]

_ASK_TO_END = (signal.SIGTERM, signal.SIGHUP)


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


@contextmanager
def ending_signals_held() -> Iterator[None]:
    """Let a block end before a Ctrl-C, SIGTERM or SIGHUP that arrived in it is dealt with."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ASK_TO_END)}
    held: list[tuple[int, FrameType | None]] = []
    mine = [number for number, handler in handlers.items() if callable(handler)]
    if current_thread() is not main_thread():
        mine = []
    for number in mine:
        signal.signal(number, lambda which, frame: held.append((which, frame)))
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, handlers[number])
    if held:
        first, frame = held[0]
        handler = handlers[signal.Signals(first)]
        assert callable(handler)
        handler(first, frame)
