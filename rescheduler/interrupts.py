"""Ctrl-C, kept away from work that must not be left in the middle."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

__all__ = ["held_interrupts"]


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Let a block end before a Ctrl-C that arrived in it is dealt with as ever.

    A `KeyboardInterrupt` may be raised between any two Python instructions: while a row group is
    written, or where numba turns arguments into pointers, which replaces it by a `TypeError`.
    Only the main thread receives it, so that elsewhere there is nothing to hold.
    """
    handler = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(signal.SIGINT, held[-1])
