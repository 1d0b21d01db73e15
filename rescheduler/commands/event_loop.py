"""What all servers share: the event loop, its signals, sockets that outlive it, the log."""

import asyncio
import json
import logging
import os
import re
import resource
import signal
import socket
import warnings
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

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


LOG_FORMAT, LOG_TIME = "%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%d %H:%M:%S"

# Of ASCII and Latin-1, and what else ends a line, reverses it, or is no character.
_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escaped(text: str) -> str:
    """Return text of somebody else, each line without what a terminal would obey."""
    return "\n".join(_CONTROLS.sub(_escape, line) for line in text.split("\n"))


class EscapingFormatter(logging.Formatter):
    """Writes a message in one line, however many its parts have.

    Names, reasons and errors come from clients, engines and peers: none of them can write a line
    of its own, or what a terminal obeys. A traceback, which is ours, keeps its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line, with escapes in place of control characters."""
        return _CONTROLS.sub(_escape, super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return a traceback, with escapes in place of control characters within its lines."""
        return escaped(super().formatException(ei))


def log_serving(verbose: bool) -> None:
    """Write to standard error what servers log, with the time; if ``verbose``, debugging too."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter(LOG_FORMAT, LOG_TIME))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("headway.serve").setLevel(logging.DEBUG if verbose else logging.INFO)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LOGGERS = ("lightning.pytorch", "lightning.fabric")


def quieten(verbose: bool) -> None:
    """Silence the notices of vLLM, Lightning, Hugging Face and others, unless ``verbose``.

    What the environment sets already is kept. Call it before these libraries are imported.
    """
    if verbose:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")


def quieten_loggers(verbose: bool) -> None:
    """Silence loggers that set their own level when they are imported, unless ``verbose``."""
    for name in () if verbose else _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
