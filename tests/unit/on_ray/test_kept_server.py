"""A server that is kept running; the servers here are small."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from forked_vllm import free_port
from process_groups import processes_in

from rescheduler.engines.engine_command import EngineCommand, LaunchError
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.on_ray.kept_server import KeptServer

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


@pytest.fixture
def process(tmp_path: Path) -> ServerProcess:
    return server(tmp_path)


@pytest.fixture
def kept(tmp_path: Path, process: ServerProcess) -> Iterator[KeptServer]:
    made = KeptServer(process, lambda: None, 60, tmp_path / "starts")
    made.begin()
    try:
        until(lambda: made.stage == "ready", "ready")
        yield made
    finally:
        made.stop()


def test_a_server_that_is_killed_comes_back(kept: KeptServer, process: ServerProcess) -> None:
    group = process.pid
    assert group is not None and len(processes_in(group)) == 3, "the tether, the server, its child"
    psutil.Process(group).children()[0].kill()
    until(lambda: kept.starts == 2 and kept.stage == "ready", "back")
    assert processes_in(group) == []
    assert "decode-0 exited with status 137" in kept.why
    assert kept.failures == 0


def test_a_server_is_restarted_and_stopped_as_asked(
    kept: KeptServer, process: ServerProcess
) -> None:
    first = process.pid
    assert kept.restart() == 1
    until(lambda: kept.starts == 2 and kept.stage == "ready", "back")
    second = process.pid
    kept.stop()
    assert kept.stage == "stopped" and kept.why == ""
    assert first is not None and second is not None and first != second
    assert processes_in(first) == processes_in(second) == []


def test_a_server_that_cannot_start_says_why_and_is_tried_again(tmp_path: Path) -> None:
    kept = KeptServer(server(tmp_path, FAILS), lambda: None, 60, tmp_path / "starts")
    kept.begin()
    try:
        until(lambda: kept.failures == 2, "tried twice")
        assert "exited with status 1: ValueError: 9 blocks are too few" in kept.why
        assert f"{tmp_path}/decode-0.log ends:" in kept.why
    finally:
        kept.stop()


def test_a_server_whose_logs_were_removed_comes_back(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    process = server(logs)
    made = KeptServer(process, lambda: logs.mkdir(exist_ok=True), 60, logs / "starts")
    made.begin()
    try:
        until(lambda: made.stage == "ready", "ready")
        shutil.rmtree(logs)
        assert process.pid is not None
        psutil.Process(process.pid).children()[0].kill()
        until(lambda: made.starts == 1 and made.stage == "ready" and bool(made.why), "back")
        assert "decode-0 exited with status 137" in made.why
    finally:
        made.stop()


def test_a_server_without_a_place_for_its_log_is_tried_again(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    kept = KeptServer(server(logs), lambda: None, 60, logs / "starts")
    kept.begin()
    try:
        until(lambda: kept.failures == 1, "refused")
        assert "decode-0 cannot be started: " in kept.why and str(logs) in kept.why
        logs.mkdir()
        until(lambda: kept.stage == "ready", "ready")
    finally:
        kept.stop()


def test_a_restart_forgets_the_failures_before_it(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    code = f"import pathlib\nif not pathlib.Path({str(mended)!r}).exists(): {FAILS}\n{SERVER}"
    kept = KeptServer(server(tmp_path, code), lambda: None, 60, tmp_path / "starts")
    kept.begin()
    try:
        until(lambda: kept.failures == 2, "tried twice")
        mended.touch()
        kept.restart()
        assert kept.failures == 0
        until(lambda: kept.stage == "ready", "ready")
    finally:
        kept.stop()


def test_what_must_not_be_started_now_is_not(tmp_path: Path) -> None:
    def refuse() -> None:
        raise LaunchError("the node is gone")

    kept = KeptServer(server(tmp_path), refuse, 60, tmp_path / "starts")
    kept.begin()
    try:
        until(lambda: kept.failures == 1, "refused")
        assert kept.why == "the node is gone" and kept.starts == 0
    finally:
        kept.stop()


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
    assert keeper.stdout is not None
    group = int(keeper.stdout.readline())
    until(lambda: len(processes_in(group)) == 3, "started")
    keeper.kill()
    keeper.communicate()
    until(lambda: not processes_in(group), "ended with its keeper")
