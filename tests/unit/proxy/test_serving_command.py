"""`headway serve` and `headway drain` as commands."""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from chosen_ports import free_port
from running_command import answer, next_line, running

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


def drained(
    command: list[str], *arguments: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*command, "drain", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_it_serves_without_any_engine_and_ends_when_asked(
    headway_command: list[str], smollm2: Path, tmp_path: Path, number: signal.Signals
) -> None:
    del smollm2  # is prepared
    port = free_port()
    config = write(tmp_path, port)
    with running(headway_command, "serve", config) as process:
        assert next_line(process) == f"serving on http://127.0.0.1:{port}\n"
        page = f"see it live: {read_deployment(config).admin_url}/ui (its token: "
        said = next_line(process)
        assert said.startswith(page), "the token itself is not for logs"
        token = Path(said.removeprefix(page).strip().removesuffix(")"))
        assert token.stat().st_mode & 0o077 == 0
        url = f"http://127.0.0.1:{port}"
        statuses = [answer(f"{url}/{path}")[0] for path in ("health", "ready", "nowhere")]
        assert statuses == [200, 503, 404]
        code, said = answer(url + "/v1/completions", b'{"model": "m", "prompt": "a"}')
        assert code == 503
        assert "no decode instance" in json.loads(said)["error"]["message"]
        metrics = answer(url + "/metrics")[1]
        assert 'headway_proxy_instance_up{instance_name="decode-0",role="decode"} 0.0' in metrics
        done = drained(headway_command, "decode-0", "--config", str(config))
        assert done.returncode == 0, done.stderr
        assert "decode-0 is empty" in done.stdout
        address = ["--url", read_deployment(config).admin_url]
        unknown = drained(headway_command, "decode-7", *address)
        assert unknown.returncode == 1
        assert "no instance 'decode-7'; there are: prefill-0, decode-0" in unknown.stderr
        stranger = drained(headway_command, "decode-0", *address, **{TOKEN_VARIABLE: "another"})
        assert stranger.returncode == 1
        assert f"admin token is required: set {TOKEN_VARIABLE}" in stranger.stderr
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert not token.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("routing: {name: nearest}", "routing: no routing policy 'nearest'"),
        ("routing: {name: bfio}", "routing.name: bfio requires forecasts"),
        ("routing: {name: bfio, solver: exact}", "routing: solver: exact may take seconds"),
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


class Spy(BaseHTTPRequestHandler):
    """Notes what comes, answers like an empty proxy, and may redirect elsewhere."""

    came: list[str | None]
    elsewhere: str | None = None

    def answer(self) -> None:
        self.came.append(self.headers["Authorization"])
        self.send_response(200 if self.elsewhere is None else 302)
        if self.elsewhere is not None:
            self.send_header("Location", self.elsewhere + self.path)
        self.end_headers()
        self.wfile.write(b'{"instances": []}')

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def spying(elsewhere: str | None = None) -> Iterator[tuple[str, list[str | None]]]:
    """Run such a server; its address, and the tokens that came."""
    came: list[str | None] = []
    kind = type("OneSpy", (Spy,), {"came": came, "elsewhere": elsewhere})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", came
        server.shutdown()
        serving.join()


def test_the_token_goes_to_no_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with spying() as (url, asked), spying() as (proxy, read):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        assert main(["drain", "--list", "--url", url]) == 0
    assert (asked, read) == (["Bearer secret"], [])


@pytest.mark.parametrize("what", ["--list", "decode-0"])
def test_the_token_follows_no_redirect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with spying() as (other, read), spying(other) as (url, asked):
        assert main(["drain", what, "--url", url]) == 1
    assert (asked, read) == (["Bearer secret"], [])
    assert "HTTP 302: is that Headway's proxy?" in capsys.readouterr().err
