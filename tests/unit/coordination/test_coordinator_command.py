"""`headway coordinator` and several `headway serve` as commands."""

import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from chosen_ports import free_port
from running_command import answer, next_line, running

from rescheduler.commands.command_line import main
from rescheduler.page.snapshot import read_log

DEPLOYMENT = """\
model: smollm2
instances:
  - {{name: decode-0, role: decode, url: "http://127.0.0.1:{dead}"}}
proxy: {{port: 0, admin_port: {admin}}}
"""
COORDINATOR = """\
coordinator: {{endpoint: "tcp://127.0.0.1:{endpoint}", port: {port}, silent_seconds: 30.0}}
"""


def written(folder: Path, more: str = COORDINATOR, **ports: int) -> Path:
    path = folder / "deployment.yaml"
    named = {"dead": free_port(), "endpoint": free_port(), "port": free_port(), "admin": 0} | ports
    path.write_text((DEPLOYMENT + more).format(**named))
    return path


def until_answered(url: str, expected: str) -> None:
    deadline = time.monotonic() + 120
    while expected not in (last := answer(url)[1]):
        assert time.monotonic() < deadline, f"{expected!r} never came: {last}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_it_decides_for_proxies_that_connect_and_ends_when_asked(
    headway_command: list[str], smollm2: Path, tmp_path: Path, number: signal.Signals
) -> None:
    del smollm2  # is prepared
    endpoint, port, admin = free_port(), free_port(), free_port()
    config, log = written(tmp_path, endpoint=endpoint, port=port, admin=admin), tmp_path / "log.gz"
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            running(headway_command, "coordinator", config, "--record", str(log))
        )
        assert next_line(coordinator) == f"coordinating on tcp://127.0.0.1:{endpoint}\n"
        page = f"http://127.0.0.1:{admin}/ui"
        assert next_line(coordinator).startswith(f"see it live: {page} (its token: ")
        assert "<title>" in answer(page)[1]
        url = f"http://127.0.0.1:{port}"
        assert answer(f"{url}/health")[0] == 200
        proxies = [stack.enter_context(running(headway_command, "serve", config)) for _ in range(2)]
        for proxy in proxies:
            assert next_line(proxy).startswith("serving on http://127.0.0.1:")
        until_answered(f"{url}/metrics", "headway_coordinator_num_proxies 2.0")
        assert answer(f"{url}/ready")[0] == 200
        coordinator.send_signal(number)
        assert coordinator.wait(timeout=120) == 0
        for proxy in proxies:
            proxy.send_signal(number)
            assert proxy.wait(timeout=120) == 0
    recorded = read_log(log)
    assert recorded.about.routing == "jsq_load"
    assert recorded.times


def test_a_log_that_exists_is_not_overwritten(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (log := tmp_path / "log.gz").write_bytes(b"mine")
    assert main(["coordinator", "--config", str(written(tmp_path)), "--record", str(log)]) == 1
    assert str(log) in capfd.readouterr().err
    assert log.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("", "coordinator: the deployment has none: add coordinator.endpoint"),
        ("coordinator: {{}}\n", "coordinator: Object missing required field `endpoint`"),
        ('coordinator: {{endpoint: "ipc://a"}}\n', "coordinator.endpoint: 'ipc://a' is not like"),
        ('coordinator: {{endpoint: "tcp://h"}}\n', "coordinator.endpoint: 'tcp://h' is not like"),
        ('coordinator: {{endpoint: "tcp://127.0.0.1:0"}}\n', "'tcp://127.0.0.1:0' is not like"),
        ('coordinator: {{endpoint: "tcp://127.0.0.1:1/a"}}\n', "'tcp://127.0.0.1:1/a' is not like"),
        ('coordinator: {{endpoint: "tcp://10.0.0.1:1"}}\n', "leaves the machine: create keys"),
        (
            'coordinator: {{endpoint: "tcp://127.0.0.1:1", silent_seconds: 0}}\n',
            "coordinator.silent_seconds: Expected `float` >= 0.5",
        ),
    ],
)
def test_a_deployment_that_it_cannot_serve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], more: str, error: str
) -> None:
    assert main(["coordinator", "--config", str(written(tmp_path, more))]) != 0
    assert error in " ".join(capfd.readouterr().err.splitlines()[-3:])


def test_no_instance_seems_empty_before_proxies_have_reported(
    headway_command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port, admin = free_port(), free_port()
    settles = COORDINATOR.replace("silent_seconds: 30.0", "settle_seconds: 3600.0")
    config = written(tmp_path, settles, port=port, admin=admin)
    with running(headway_command, "coordinator", config) as coordinator:
        until_answered(f"http://127.0.0.1:{port}/metrics", "num_proxies 0.0")
        assert answer(f"http://127.0.0.1:{port}/ready")[0] == 503
        assert main(["drain", "decode-0", "--config", str(config)]) == 1
        assert "no answer" in capfd.readouterr().err
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait(timeout=120) == 0


@pytest.mark.parametrize("taken", ["endpoint", "port"])
def test_a_port_in_use(tmp_path: Path, capfd: pytest.CaptureFixture[str], taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = written(tmp_path, **{taken: port})
        assert main(["coordinator", "--config", str(config)]) == 1
    printed = capfd.readouterr().err.splitlines()[-1]
    assert f"coordinator.{taken}: " in printed
    assert str(port) in printed


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_a_port_that_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str], port: str) -> None:
    assert main(["serve", "--config", str(written(tmp_path)), "--port", port]) == 1
    assert "a port is a number from 0 to 65535" in capfd.readouterr().err
