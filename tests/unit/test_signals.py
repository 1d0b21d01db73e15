"""Signals end what they should, wait where they must, and cut nothing."""

import errno
import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import IO

import pytest
import yaml
from chosen_ports import free_port
from made_up_cluster import MadeUpCluster

from benchmarks.support.server_process import stream_players
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


STREAM = {"model": "m", "prompt": "a", "max_tokens": 40, "stream": True}
VERBS = (
    "serve",
    *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("coordinator", "picker", "replay")),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with stream_players(0.05, "decode-0") as (player,):
        yield player["url"]


@pytest.fixture
def arguments(engine: str, smollm2: Path, tmp_path: Path) -> dict[str, list[str]]:
    """How each server is started."""
    del smollm2  # is prepared
    config, coordinated = tmp_path / "deployment.yaml", tmp_path / "coordinated.yaml"
    values = {
        "model": "smollm2",
        "instances": [{"name": "decode-0", "role": "decode", "url": engine}],
        "proxy": {"port": 0, "admin_port": 0},
    }
    config.write_text(yaml.safe_dump(values))
    values["coordinator"] = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "port": 0}
    coordinated.write_text(yaml.safe_dump(values))
    log = MadeUpCluster(2, 3, 4096).record(tmp_path / "log.gz")
    return {
        "serve": ["serve", "--config", str(config)],
        "coordinator": ["coordinator", "--config", str(coordinated)],
        "picker": ["picker", "--config", str(config), "--port", "0"],
        "replay": ["demo", "--replay", str(log), "--port", "0"],
    }


class Terminal:
    """The terminal of a server: what it says comes here, until it is closed."""

    def __init__(self) -> None:
        here, self.there = pty.openpty()
        self._said = os.fdopen(here, "rb", buffering=0)

    def control(self) -> None:
        """Become the controlling terminal of the process that calls this."""
        fcntl.ioctl(self.there, termios.TIOCSCTTY, 0)

    def line(self) -> str:
        """Return the next line, or nothing where the process has ended."""
        try:
            return self._said.readline().decode().strip()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return ""

    def close(self) -> None:
        self._said.close()


@contextmanager
def in_terminal(
    command: list[str], errors: IO[str]
) -> Iterator[tuple["subprocess.Popen[bytes]", Terminal]]:
    terminal = Terminal()
    process = subprocess.Popen(
        command,
        stdin=terminal.there,
        stdout=terminal.there,
        stderr=errors,
        start_new_session=True,
        preexec_fn=terminal.control,
    )
    os.close(terminal.there)
    try:
        yield process, terminal
    finally:
        terminal.close()
        process.kill()
        process.wait()


@contextmanager
def whole_stream(url: str) -> Iterator[None]:
    """A stream that has begun when the body runs, and that ends as it should."""
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(STREAM).encode(), kind)
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.readline().startswith(b"data: ")
        yield
        assert response.read().endswith(b"data: [DONE]\n\n"), "the stream was cut"


def until_ready(verb: str, read: Callable[[], str]) -> str:
    """Read to the last line that a server says; return the address in the first one."""
    address, last = "", "picking on " if verb == "picker" else "see it"
    while True:
        line = read()
        assert line, "it has ended"
        address = address or line.split()[-1]
        if line.startswith(last):
            return address


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_terminal_ends_a_server_as_sigterm_does(
    headway_command: list[str], arguments: dict[str, list[str]], tmp_path: Path, verb: str
) -> None:
    with (tmp_path / "errors").open("w+") as errors:
        with in_terminal([*headway_command, *arguments[verb]], errors) as (process, terminal):
            url = until_ready(verb, terminal.line)
            with whole_stream(url) if verb == "serve" else nullcontext():
                terminal.close()
            assert process.wait(timeout=120) == 0
        assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["serve", "coordinator", "picker"])
def test_a_service_goes_on_and_says_that_it_reads_nothing_anew(
    headway_command: list[str], arguments: dict[str, list[str]], verb: str
) -> None:
    process = subprocess.Popen(
        [*headway_command, *arguments[verb]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        url = until_ready(verb, process.stdout.readline)
        with whole_stream(url) if verb == "serve" else nullcontext():
            process.send_signal(signal.SIGHUP)
            while "no configuration is read anew" not in (said := process.stderr.readline()):
                assert said
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(
    headway_command: list[str], arguments: dict[str, list[str]], tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child inherits that
    try:
        with (
            (tmp_path / "errors").open("w+") as errors,
            in_terminal([*headway_command, *arguments["serve"]], errors) as (process, terminal),
        ):
            with whole_stream(until_ready("serve", terminal.line)):
                terminal.close()
            assert process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, before)
