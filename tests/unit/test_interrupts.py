"""Ctrl-C waits for the end of a block that holds it, and is not lost."""

import signal
from collections.abc import Iterator
from threading import Thread

import pytest

from rescheduler.commands.event_loop import held_interrupts


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    """Raise KeyboardInterrupt also where the shell that started the tests ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_block_ends_first() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")
    assert done == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_wins() -> None:
    with pytest.raises(ValueError, match="its own"), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("its own")


def test_nothing_happens_without_a_signal() -> None:
    with held_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_holds_nothing() -> None:
    done = []

    def work() -> None:
        with held_interrupts():
            done.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]
