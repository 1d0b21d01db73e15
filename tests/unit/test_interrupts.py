"""Signals wait for the end of a block that holds them, and are not lost."""

import signal
from collections.abc import Iterator
from threading import Thread

import pytest

from rescheduler.commands.event_loop import (
    ending_signals_held,
    ending_signals_raised,
    held_interrupts,
)


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Handle signals as an ordinary process does: a test run may ignore or raise them."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigterm_is_like_ctrl_c_where_asked_for() -> None:
    with pytest.raises(KeyboardInterrupt), ending_signals_raised():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_held_signal_comes_when_the_block_has_ended(number: int) -> None:
    steps = []
    with ending_signals_raised(), pytest.raises(KeyboardInterrupt):
        with ending_signals_held():
            signal.raise_signal(number)
            signal.raise_signal(number)
            steps.append("ended")
        steps.append("never")
    assert steps == ["ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_wins() -> None:
    with pytest.raises(ValueError, match="its own"), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("its own")


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_signals_are_left_alone() -> None:
    handlers = []

    def work() -> None:
        with ending_signals_raised(), ending_signals_held(), held_interrupts():
            handlers.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler, signal.SIG_DFL]
