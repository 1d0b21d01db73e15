"""A launcher that starts its servers anew, one at a time, when a second command asks it to."""

import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from chosen_ports import free_port
from draining_server import BUSY, busy, draining_server
from msgspec.structs import replace

from rescheduler.engines.deployment import EngineOptions, Instance
from rescheduler.engines.engine_command import EngineCommand, LaunchError
from rescheduler.engines.launch_engines import PROXY, Launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.launch_upgrade import (
    Plan,
    PlannedServer,
    Requests,
    ask_to_upgrade,
    refuse_other_addresses,
)

PROXY_SERVER = """
import signal, socket, sys, threading, time
from rescheduler.commands.event_loop import inherited
word, (listening,) = sys.argv[1], inherited("clients")
streams, ending = [], threading.Event()
def end(*_):
    ending.set()
    listening.close()
signal.signal(signal.SIGTERM, end)
def stream(client):
    while client.recv(1):  # as long as its client asks
        client.sendall(word.encode())
    client.close()
listening.settimeout(0.2)
print("serving on", word, flush=True)
while not ending.is_set():
    try:
        client = listening.accept()[0]
    except (TimeoutError, OSError):
        continue
    client.settimeout(None)
    streams.append(threading.Thread(target=stream, args=(client,)))
    streams[-1].start()
for one in streams:
    one.join()
"""
"""Answers a letter with its word, on connections that last; at SIGTERM it takes no more of them."""


def planned(server: ServerProcess, code: str, *arguments: str) -> PlannedServer:
    command = [sys.executable, "-c", code, *arguments]
    return PlannedServer(server.name, command, {}, server.url, sys.executable, server.drain)


class Deployed:
    """Two engines, and perhaps a proxy, of a launcher in a thread of its own."""

    def __init__(self, folder: Path, proxy_port: int | None = None) -> None:
        self.folder, self.stages = folder, list[tuple[str, str]]()
        servers = []
        for name in ("decode-0", "decode-1"):
            busy(folder / f"{name}.left", 0)
            servers.append(draining_server(folder, free_port(), name))
        deployment = local_deployment("smollm2", EngineOptions())
        options = replace(deployment.proxy, breaker_seconds=0.01, probe_seconds=0.01)
        if proxy_port is not None:
            options = replace(options, host="127.0.0.1", port=proxy_port, admin_port=0)
            command = EngineCommand([sys.executable, "-c", PROXY_SERVER, "old"], {})
            url, log = f"http://127.0.0.1:{proxy_port}", folder / "proxy.log"
            servers.append(ServerProcess(PROXY, command, url, log, ready_line="serving on"))
        deployment = replace(deployment, proxy=options)
        self.launched = Launched(deployment, folder, servers, self._report)

    def _report(self, name: str, stage: str) -> None:
        self.stages.append((name, stage))

    @property
    def plan(self) -> Plan:
        """All anew, with another word."""
        servers = []
        for name, server in self.launched.servers.items():
            if name == PROXY:
                servers.append(planned(server, PROXY_SERVER, "new"))
            else:
                port, left = server.url.rpartition(":")[2], str(self.folder / f"{name}.left")
                servers.append(planned(server, BUSY, port, left, "new"))
        return Plan(servers)

    def words(self) -> list[str]:
        """What each engine answers; empty where none does."""
        found = []
        for name, server in self.launched.servers.items():
            if name != PROXY:
                try:
                    with urllib.request.urlopen(server.url + "/version", timeout=10) as answer:
                        found.append(answer.read().decode())
                except OSError:
                    found.append("")
        return found


@contextmanager
def deployed(folder: Path, proxy_port: int | None = None) -> Iterator[Deployed]:
    it = Deployed(folder, proxy_port)
    try:
        it.launched.start_all(None)
        with Requests.heard(folder) as requests, ThreadPoolExecutor(1) as threads:
            watching = threads.submit(_watch_until_closed, it.launched, requests)
            try:
                yield it
            finally:
                it.launched.close()
            watching.result()
    finally:
        it.launched.close()


def _watch_until_closed(launched: Launched, requests: Requests) -> None:
    """As a launcher's loop, which a signal ends."""
    while launched.is_running:
        request = requests.wait(0.1)
        if request is not None:
            launched.upgrade(request)


def test_engines_start_anew_one_after_the_other_once_they_are_empty(tmp_path: Path) -> None:
    with deployed(tmp_path) as it:
        busy(tmp_path / "decode-0.left", 2)
        it.stages.clear()
        said: list[str] = []
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(ask_to_upgrade, tmp_path, it.plan, said.append)
            while "decode-0 drains (2 requests)" not in said:
                assert not asked.done(), asked.result()
                time.sleep(0.05)
            assert it.words() == ["old", "old"], "it goes on while it drains"
            busy(tmp_path / "decode-0.left", 0)
            assert asked.result() == {"decode-0", "decode-1"}
        assert it.words() == ["new", "new"]
        assert it.stages == [
            (name, stage)
            for name in ("decode-0", "decode-1")
            for stage in ("draining", "stopped", "starting", "ready")
        ]
        assert said[-1] == "decode-1 serves"


def test_a_failure_stops_an_upgrade_and_leaves_the_rest_serving(tmp_path: Path) -> None:
    with deployed(tmp_path) as it:
        first, second = it.plan.servers
        broken = replace(first, arguments=[sys.executable, "-c", "raise ValueError('no blocks')"])
        with pytest.raises(LaunchError) as raised:
            ask_to_upgrade(tmp_path, Plan([broken, second]), lambda line: None)
        said = str(raised.value)
        assert said.startswith("stopped at decode-0, the others go on as they are: ")
        assert "ValueError: no blocks" in said
        assert it.words() == ["", "old"]
        # Put right, it goes on: what is down comes first.
        assert ask_to_upgrade(tmp_path, it.plan, lambda line: None) == {"decode-0", "decode-1"}
        assert it.words() == ["new", "new"]


def test_one_engine_is_left_alone_while_another_is_down(tmp_path: Path) -> None:
    with deployed(tmp_path) as it:
        it.launched.kill("decode-1")
        with pytest.raises(LaunchError, match=r"stopped at decode-0.*decode-1 does not serve"):
            ask_to_upgrade(tmp_path, Plan(it.plan.servers[:1]), lambda line: None)
        assert it.words() == ["old", ""]


def test_whoever_asked_may_leave_and_it_stops_after_the_engine_at_hand(tmp_path: Path) -> None:
    class LeftError(Exception):
        pass

    def leave(line: str) -> None:
        raise LeftError

    with deployed(tmp_path) as it:
        with pytest.raises(LeftError):
            ask_to_upgrade(tmp_path, it.plan, leave)
        while it.stages[-1] != ("decode-0", "ready"):
            time.sleep(0.05)
        time.sleep(0.5)
        assert it.words() == ["new", "old"]


def test_a_new_proxy_takes_over_while_no_client_is_refused_or_cut(tmp_path: Path) -> None:
    port = free_port()
    with deployed(tmp_path, port) as it:
        ended, words = threading.Event(), list[str]()

        def connect() -> None:
            while not ended.is_set():
                with socket.create_connection(("127.0.0.1", port), 60) as client:
                    client.sendall(b"?")
                    words.append(client.recv(3).decode())

        with ThreadPoolExecutor(2) as threads:
            connecting = threads.submit(connect)
            with socket.create_connection(("127.0.0.1", port), 60) as streaming:
                streaming.sendall(b"?")
                assert streaming.recv(3) == b"old"
                said: list[str] = []
                plan = Plan(it.plan.servers[2:])
                asked = threads.submit(ask_to_upgrade, tmp_path, plan, said.append)
                while "new" not in words[-3:] or "old" in words[-3:]:
                    assert not asked.done(), asked.result()
                    time.sleep(0.05)
                streaming.sendall(b"?")
                assert streaming.recv(3) == b"old", "its stream ends where it runs"
                assert not asked.done()
            assert asked.result() == {PROXY}
            ended.set()
            connecting.result()
        assert set(words) == {"old", "new"}
        assert said[-1] == "the old proxy has ended"


def test_a_new_proxy_that_fails_leaves_the_old_one_serving(tmp_path: Path) -> None:
    port = free_port()
    with deployed(tmp_path, port) as it:
        (proxy,) = it.plan.servers[2:]
        broken = replace(proxy, arguments=[sys.executable, "-c", "raise ValueError('no policy')"])
        with pytest.raises(LaunchError, match=r"(?s)stopped at proxy.*ValueError: no policy"):
            ask_to_upgrade(tmp_path, Plan([broken]), lambda line: None)
        with socket.create_connection(("127.0.0.1", port), 60) as client:
            client.sendall(b"?")
            assert client.recv(3) == b"old"


def test_nobody_to_ask_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "launch-1.sock"))  # left behind by one that was killed
    with pytest.raises(LaunchError, match="no `headway launch` of this user has its logs in"):
        ask_to_upgrade(tmp_path, Plan([]), lambda line: None)
    assert not list(tmp_path.iterdir())


def test_nonsense_does_not_end_a_launcher(tmp_path: Path) -> None:
    with deployed(tmp_path) as it:
        (path,) = tmp_path.glob("launch-*.sock")
        assert path.stat().st_mode & 0o077 == 0
        for nonsense in (b"", b"\xff\n", b'{"servers": 3}\n'):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(nonsense)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b""
        assert ask_to_upgrade(tmp_path, it.plan, lambda line: None) == {"decode-0", "decode-1"}


def test_addresses_stay_as_they_are() -> None:
    running = local_deployment("smollm2", EngineOptions())
    refuse_other_addresses(running, replace(running, engine=EngineOptions(k=3), model="other"))
    first, *others = running.instances
    moved = replace(first, url="http://127.0.0.1:1")
    for changed, named in [
        (replace(running, instances=[moved, *others]), "prefill-0: an upgrade keeps"),
        (replace(running, instances=others), "prefill-0: an upgrade keeps"),
        (replace(running, proxy=replace(running.proxy, port=1)), "the proxy: an upgrade keeps"),
        (
            replace(
                running, instances=[*running.instances, Instance("more", "decode", "http://a")]
            ),
            "more: an upgrade keeps",
        ),
    ]:
        with pytest.raises(LaunchError, match=named):
            refuse_other_addresses(running, changed)


def test_a_folder_that_holds_no_socket_keeps_no_launcher_from_its_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"launch-{os.getpid()}.sock" / "in the way").mkdir(parents=True)
    with Requests.heard(tmp_path) as requests:
        assert requests.wait(0.01) is None
    assert ".sock: " in capsys.readouterr().err
