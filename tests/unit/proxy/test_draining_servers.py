"""Servers that are drained before they end: by a signal to one, or to their launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from chosen_ports import free_port
from draining_server import busy, draining_server

from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.launch_upgrade import Load, load_of


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.02)


@contextmanager
def serving(folder: Path, requests: int, **options: float) -> Iterator[ServerProcess]:
    busy(folder / "decode-0.left", requests)
    server = draining_server(folder, free_port(), **options)  # type: ignore[arg-type]
    server.start()
    try:
        until(server.is_healthy, "healthy")
        yield server
    finally:
        server.kill()


def drains(server: ServerProcess) -> bool:
    assert server.drain is not None
    return Path(server.drain.file).exists()


def test_one_that_is_asked_to_end_ends_once_nothing_runs_there(tmp_path: Path) -> None:
    with serving(tmp_path, requests=2) as server:
        assert not drains(server) and server.drain is not None
        assert f"serves {server.drain.file}" in server.last_lines(), "it is told of the file"
        server.begin_to_end()
        until(lambda: drains(server), "draining")
        time.sleep(1.0)
        assert server.is_running and "asked to end" not in server.last_lines()
        busy(tmp_path / "decode-0.left", 0)
        until(lambda: not server.is_running, "ended")
        assert server.last_lines()[-1] == "asked to end"
        assert not drains(server), "the next one takes requests"


def test_what_it_keeps_for_other_engines_is_waited_for_until_it_expires(tmp_path: Path) -> None:
    with serving(tmp_path, requests=0, kept_seconds=600.0) as server:
        busy(tmp_path / "decode-0.left", 0, holds=0.1)
        server.begin_to_end()
        time.sleep(1.5)
        assert server.is_running
        busy(tmp_path / "decode-0.left", 0)
        until(lambda: not server.is_running, "ended")


def test_a_grace_period_has_an_end(tmp_path: Path) -> None:
    with serving(tmp_path, requests=2, seconds=1.0) as server:
        server.begin_to_end()
        until(lambda: not server.is_running, "ended")
        assert "headway: stopped after 1 s, with 2 requests" in server.last_lines()


def test_asked_twice_it_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, requests=2) as server:
        server.begin_to_end()
        until(lambda: drains(server), "draining")
        server.begin_to_end()
        until(lambda: not server.is_running, "ended")
        assert "headway: stopped in a hurry, with 2 requests" in server.last_lines()


def test_a_signal_to_all_of_its_processes_ends_it_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, requests=2) as server:
        server.signal(signal.SIGTERM)
        until(lambda: not server.is_running, "ended")
        assert not drains(server)


def test_one_that_does_not_serve_yet_ends_at_once(tmp_path: Path) -> None:
    server = draining_server(tmp_path, free_port())  # without its file it cannot answer
    server._command.arguments[2] = "import time; print('loads', flush=True); time.sleep(600)"
    server.start()
    try:
        until(lambda: "loads" in server.last_lines(), "loading")
        server.begin_to_end()
        until(lambda: not server.is_running, "ended")
    finally:
        server.kill()


def test_a_signal_that_comes_before_it_has_begun_is_heard(tmp_path: Path) -> None:
    busy(tmp_path / "decode-0.left", 0)
    for _ in range(3):
        server = draining_server(tmp_path, free_port())
        server.start()
        assert server.pid is not None
        handled = Path(f"/proc/{server.pid}/status")

        def is_handled(handled: Path = handled) -> bool:
            (line,) = [line for line in handled.read_text().splitlines() if "SigCgt" in line]
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

        until(is_handled, "listening to signals")
        server.begin_to_end()
        until(lambda one=server: not one.is_running, "ended")  # type: ignore[misc]
        assert not psutil.pid_exists(server.pid) or not server._group_exists()


def test_a_load_is_what_the_metrics_say(tmp_path: Path) -> None:
    with serving(tmp_path, requests=3) as server:
        assert load_of(server.url) == Load(3, holds=False)
        busy(tmp_path / "decode-0.left", 0, holds=0.02)
        assert load_of(server.url) == Load(0, holds=True)
        (tmp_path / "decode-0.left").write_text("nonsense")
        assert load_of(server.url) is None
    with pytest.raises(ConnectionRefusedError):
        load_of(server.url)


LAUNCHER = """
import sys
import threading
from contextlib import closing
from pathlib import Path
from chosen_ports import free_port
from draining_server import draining_server
from rescheduler.commands.event_loop import ending_signals_raised
from rescheduler.engines.deployment import EngineOptions
from rescheduler.engines.launch_engines import Launched, watch
from rescheduler.engines.launch_local import local_deployment
from rescheduler.engines.launch_upgrade import Requests
folder = Path(sys.argv[1])
named = zip(sys.argv[2::2], sys.argv[3::2])
servers = [draining_server(folder, int(port), name) for name, port in named]
report = lambda name, stage: print(name, stage, flush=True)
running = Launched(local_deployment("smollm2", EngineOptions()), folder, servers, report)
with ending_signals_raised(), closing(running):
    running.start(list(running.servers))
    with Requests.heard(folder) as requests:
        said = threading.Timer(0.5, lambda: print("all ready", flush=True))
        said.start()  # once it watches: a signal before that is one while engines load
        sys.exit(watch(running, requests))
"""


@contextmanager
def launcher(folder: Path, **requests: int) -> Iterator["subprocess.Popen[str]"]:
    """A launcher of servers with so many requests each."""
    named = []
    for name, count in requests.items():
        busy(folder / f"{name}.left", count)
        named += [name, str(free_port())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), *named],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    printed = ""
    assert process.stdout is not None
    for line in process.stdout:
        printed += line
        if words in line:
            return printed
    raise AssertionError(f"{words!r} was not printed:\n{printed}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_waits_for_what_runs_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    with launcher(tmp_path, idle=0, works=3) as process:
        read_until(process, "all ready")
        process.send_signal(number)
        said = read_until(process, "waiting for works (3 requests) to finish")
        assert "idle draining" in said and "works draining" in said and "idle stopped" in said
        assert "Ctrl-C again stops all at once" in said
        busy(tmp_path / "works.left", 0)
        read_until(process, "works stopped")
        assert process.wait() == 0


def test_a_second_signal_to_a_launcher_stops_all_at_once(tmp_path: Path) -> None:
    with launcher(tmp_path, works=3) as process:
        read_until(process, "all ready")
        process.send_signal(signal.SIGTERM)
        read_until(process, "waiting for works (3 requests) to finish")
        process.send_signal(signal.SIGTERM)
        read_until(process, "works stopped")
        assert process.wait() == 0
        assert "asked to end" in (tmp_path / "works.log").read_text()
