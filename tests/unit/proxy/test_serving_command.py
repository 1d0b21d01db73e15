"""`headway serve` and `headway drain` as commands."""

import json
import os
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from chosen_ports import free_port

from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import read_deployment
from rescheduler.serving.admin_client import TOKEN_VARIABLE

DEPLOYMENT = """\
model: smollm2
instances:
  - {{name: prefill-0, role: prefill, url: "http://127.0.0.1:{dead}"}}
  - {{name: decode-0, role: decode, url: "http://127.0.0.1:{dead}/"}}
proxy: {{port: {port}, admin_port: {admin_port}}}
"""


def write(folder: Path, port: int, more: str = "", admin_port: int | None = None) -> Path:
    path = folder / "deployment.yaml"
    ports = {"dead": free_port(), "port": port, "admin_port": admin_port or free_port()}
    path.write_text(DEPLOYMENT.format(**ports) + more)
    return path


@contextmanager
def serving(command: list[str], config: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*command, "serve", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def status(url: str, method: str = "GET", data: bytes | None = None) -> tuple[int, bytes]:
    try:
        request = urllib.request.Request(url, method=method, data=data)
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_without_any_engine_and_ends_when_asked(
    headway_command: list[str], smollm2: Path, tmp_path: Path, number: signal.Signals
) -> None:
    del smollm2  # is prepared
    port = free_port()
    config = write(tmp_path, port)
    with serving(headway_command, config) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"serving on http://127.0.0.1:{port}\n"
        page = f"see it live: {read_deployment(config).admin_url}/ui (its token: "
        assert process.stdout.readline().startswith(page), "the token itself is not for logs"
        url = f"http://127.0.0.1:{port}"
        assert status(url + "/health")[0] == 200
        assert status(url + "/ready")[0] == 503
        assert status(url + "/nowhere")[0] == 404
        body = json.dumps({"model": "m", "prompt": "a"}).encode()
        code, answer = status(url + "/v1/completions", "POST", body)
        assert code == 503
        assert "no decode instance" in json.loads(answer)["error"]["message"]
        metrics = status(url + "/metrics")[1].decode()
        assert 'headway_proxy_instance_up{instance_name="decode-0",role="decode"} 0.0' in metrics
        drained = subprocess.run(
            [*headway_command, "drain", "decode-0", "--config", str(config)],
            capture_output=True,
            text=True,
        )
        assert drained.returncode == 0, drained.stderr
        assert "decode-0 is empty" in drained.stdout
        admin_url = read_deployment(config).admin_url
        unknown = subprocess.run(
            [*headway_command, "drain", "decode-7", "--url", admin_url],
            capture_output=True,
            text=True,
        )
        assert unknown.returncode == 1
        assert "no instance 'decode-7'; there are: prefill-0, decode-0" in unknown.stderr
        stranger = subprocess.run(
            [*headway_command, "drain", "decode-0", "--url", admin_url],
            capture_output=True,
            text=True,
            env=os.environ | {TOKEN_VARIABLE: "another"},
        )
        assert stranger.returncode == 1
        assert f"admin token is required: set {TOKEN_VARIABLE}" in stranger.stderr
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("routing: {name: nearest}", "routing: no routing policy 'nearest'"),
        ("routing: {name: bfio}", "routing.name: bfio requires forecasts"),
        (
            "routing: {name: pab}",
            "routing.name: pab chooses between engines that prefill and decode; here prefill-0",
        ),
        ("migration: {name: survival}", "migration.name: survival requires forecasts"),
        ("migration: {name: star, speed: 3}", "migration: star has no option 'speed'"),
    ],
)
def test_a_deployment_that_cannot_be_served_is_told_in_one_line(
    smollm2: Path, tmp_path: Path, more: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    del smollm2
    config = write(tmp_path, free_port(), more)
    assert main(["serve", "--config", str(config)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_an_unknown_key_of_a_deployment_is_a_usage_error(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del smollm2
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--config", str(write(tmp_path, free_port(), "engines: 3"))])
    *_, error = capsys.readouterr().err.splitlines()
    assert "engines" in error


@pytest.mark.parametrize("option", ["port", "admin_port"])
def test_a_port_in_use_is_told(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    del smollm2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"port": free_port(), option: port}
        assert main(["serve", "--config", str(write(tmp_path, **ports))]) == 1
    printed = capsys.readouterr().err
    assert f"proxy.{option}: cannot listen on 127.0.0.1:{port}" in printed
    assert "Traceback" not in printed


def test_draining_without_a_proxy_says_what_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "decode-0", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "does `headway serve` run on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no json", b'{"name": "decode-0"}'])
def test_draining_at_another_server_says_so(
    capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        assert main(["drain", "decode-0", "--url", f"http://127.0.0.1:{server.server_port}"]) == 1
        serving.join()
    assert "is that Headway's proxy?" in capsys.readouterr().err
