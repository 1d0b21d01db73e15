"""A server that an actor keeps, and the actors after it; the servers here are small."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from forked_vllm import free_port
from process_groups import processes_in

from rescheduler.engines.engine_command import EngineCommand, LaunchError
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.on_ray.server_actor import KeptServer, Past

SERVER = """
import http.server, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
FAILS = "raise ValueError('9 blocks are too few')"


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.02)


def server(folder: Path, code: str = SERVER) -> ServerProcess:
    port = free_port()
    command = EngineCommand([sys.executable, "-c", code, str(port)], {})
    url, log = f"http://127.0.0.1:{port}", folder / "decode-0.log"
    return ServerProcess("decode-0", command, url, log, tethered=True)


class Actors:
    """Actors that keep a server, one after the other, as Ray starts them."""

    def __init__(
        self, process: ServerProcess, folder: Path, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.process = process
        self._prepare = prepare
        self._file = folder / "past"
        self.stopped = False
        self.begin()

    def begin(self) -> None:
        self.kept = KeptServer(self.process, self._prepare, 60, self._file, self._ended)

    def _ended(self) -> None:
        if not self.stopped:
            self.begin()

    @property
    def past(self) -> Past:
        return self.kept.past

    def until_ready(self, starts: int) -> None:
        until(lambda: self.past.starts == starts and self.kept.stage == "ready", "ready")

    def close(self) -> None:
        self.stopped = True
        self.kept.stop()


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[Actors]:
    with closing(Actors(server(tmp_path), tmp_path)) as made:
        made.until_ready(starts=1)
        yield made


def test_a_server_that_is_killed_comes_back(actors: Actors) -> None:
    group = actors.process.pid
    assert group is not None and len(processes_in(group)) == 3, "the tether, the server, its child"
    psutil.Process(group).children()[0].kill()
    actors.until_ready(starts=2)
    assert processes_in(group) == []
    assert "decode-0 was killed by SIGKILL" in actors.past.why
    assert actors.past.failures == 0


def test_a_server_is_restarted_and_stopped_as_asked(actors: Actors) -> None:
    first = actors.process.pid
    assert actors.kept.restart() == 1
    actors.until_ready(starts=2)
    second = actors.process.pid
    actors.close()
    assert actors.kept.stage == "stopped" and actors.past.why == ""
    assert first is not None and second is not None and first != second
    assert processes_in(first) == processes_in(second) == []


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why_is_tried_again_and_forgets_it_when_asked(
    tmp_path: Path,
) -> None:
    mended = tmp_path / "mended"
    code = f"import pathlib\nif not pathlib.Path({str(mended)!r}).exists(): {FAILS}\n{SERVER}"
    with closing(Actors(server(tmp_path, code), tmp_path)) as actors:
        until(lambda: actors.past.failures == 2, "tried twice")
        assert "exited with status 1: ValueError: 9 blocks are too few" in actors.past.why
        assert f"{tmp_path}/decode-0.log ends:" in actors.past.why
        mended.touch()
        actors.kept.restart()
        assert actors.past.failures == 0
        until(lambda: actors.kept.stage == "ready", "ready")


@pytest.mark.slow
def test_a_server_without_a_place_for_its_log_is_tried_again(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with closing(Actors(server(logs), logs)) as actors:
        until(lambda: actors.past.failures == 1, "refused")
        assert "decode-0 cannot be started: " in actors.past.why and str(logs) in actors.past.why
        logs.mkdir()
        until(lambda: actors.kept.stage == "ready", "ready")
        shutil.rmtree(logs)
        assert actors.process.pid is not None
        psutil.Process(actors.process.pid).children()[0].kill()
        until(lambda: actors.past.failures == 1, "refused again")
        logs.mkdir()
        until(lambda: actors.kept.stage == "ready", "ready again")


def test_what_must_not_be_started_now_is_not(tmp_path: Path) -> None:
    def refuse() -> None:
        raise LaunchError("the node is gone")

    with closing(Actors(server(tmp_path), tmp_path, refuse)) as actors:
        until(lambda: actors.past.failures == 1, "refused")
        assert actors.past.why == "the node is gone" and actors.past.starts == 0


def test_a_server_ends_with_whoever_keeps_it_however_that_ends(tmp_path: Path) -> None:
    keeping = f"""
import pathlib, time
from rescheduler.engines.engine_command import EngineCommand
from rescheduler.engines.launch_process import ServerProcess
command = EngineCommand([{sys.executable!r}, "-c", {SERVER!r}, "{free_port()}"], {{}})
log = pathlib.Path({str(tmp_path / "log")!r})
server = ServerProcess("x", command, "http://127.0.0.1:1", log, tethered=True)
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""
    keeper = subprocess.Popen([sys.executable, "-c", keeping], stdout=subprocess.PIPE, text=True)
    group = int(keeper.stdout.readline())
    until(lambda: len(processes_in(group)) == 3, "started")
    keeper.kill()
    keeper.communicate()
    until(lambda: not processes_in(group), "ended with its keeper")


SLOW_TO_END = """
import signal, sys, time
def end(number, frame):
    time.sleep(0.5)
    print("ended as asked", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGHUP, lambda *_: None)
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def begun(folder: Path, code: str) -> Iterator[ServerProcess]:
    process = server(folder, code)
    process.start()
    try:
        until_printed(process, "ready")
        yield process
    finally:
        process.kill()


def until_printed(process: ServerProcess, words: str) -> None:
    until(lambda: any(words in line for line in process.last_lines()), words)


def test_a_tether_outlives_what_its_server_does(tmp_path: Path) -> None:
    with begun(tmp_path, SLOW_TO_END) as slow:
        slow.signal(signal.SIGHUP)
        time.sleep(0.2)
        assert slow.is_running
        slow.signal(signal.SIGTERM)
        until_printed(slow, "ended as asked")
        until(lambda: not slow.is_running, "ended")
        assert slow.exit_status == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT, signal.SIGKILL])
def test_a_tether_ends_by_the_signal_that_ended_its_server(
    tmp_path: Path, number: signal.Signals
) -> None:
    with begun(tmp_path, "import time; print('ready', flush=True); time.sleep(600)") as one:
        assert one.pid is not None
        psutil.Process(one.pid).children()[0].send_signal(number)
        until(lambda: not one.is_running, "ended")
        assert one.exit_status == -number
        assert f"decode-0 was killed by {number.name}" in one.why_it_ended()
