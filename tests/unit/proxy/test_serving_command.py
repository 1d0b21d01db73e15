"""`headway serve` and `headway drain` as commands: how a proxy begins, ends and starts anew."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chosen_ports import free_port
from running_command import answer, next_line, running
from scripted_cluster import PROMPT, Cluster, tokens_of
from scripted_engine import ScriptedEngine, reference
from tokenizers import Tokenizer

from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import Deployment, read_deployment
from rescheduler.engines.engine_command import EngineCommand
from rescheduler.engines.launch_engines import PROXY, Launched
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.launch_upgrade import Plan, PlannedServer, Requests, ask_to_upgrade
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.serving.admin_client import TOKEN_VARIABLE, listed_instances

pytestmark = pytest.mark.usefixtures("smollm2")  # is prepared
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
        [*command, "drain", *arguments], capture_output=True, text=True, env=os.environ | variables
    )


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_it_serves_without_any_engine_and_ends_when_asked(
    headway_command: list[str], tmp_path: Path, number: signal.Signals
) -> None:
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
    tmp_path: Path, more: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, free_port(), more)
    assert main(["serve", "--config", str(config)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_an_unknown_key_of_a_deployment_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--config", str(write(tmp_path, free_port(), "engines: 3"))])
    *_, error = capsys.readouterr().err.splitlines()
    assert "engines" in error


@pytest.mark.parametrize("option", ["port", "admin_port"])
def test_a_port_in_use_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
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
    with spying(said=answer) as (url, _):
        assert main(["drain", "decode-0", "--url", url]) == 1
    assert "is that Headway's proxy?" in capsys.readouterr().err


class Spy(BaseHTTPRequestHandler):
    """Notes what comes, answers like an empty proxy or else, and may redirect elsewhere."""

    came: list[str | None]
    elsewhere: str | None
    said: bytes

    def answer(self) -> None:
        self.came.append(self.headers["Authorization"])
        self.send_response(200 if self.elsewhere is None else 302)
        if self.elsewhere is not None:
            self.send_header("Location", self.elsewhere + self.path)
        self.end_headers()
        self.wfile.write(self.said)

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def spying(
    elsewhere: str | None = None, said: bytes = b'{"instances": []}'
) -> Iterator[tuple[str, list[str | None]]]:
    """Run such a server; its address, and the tokens that came."""
    came: list[str | None] = []
    kind = type("OneSpy", (Spy,), {"came": came, "elsewhere": elsewhere, "said": said})
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


BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}


async def test_a_request_on_an_open_connection_is_served_while_the_proxy_ends(it: Cluster) -> None:
    async with aiohttp.ClientSession() as kept:
        async with kept.get(it.url + "/health") as response:
            assert "Connection" not in response.headers
        await it.listeners.stop()
        async with kept.post(it.url + "/v1/completions", json=BODY) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Connection"] == "close"
        with pytest.raises(aiohttp.ClientConnectorError):
            await kept.get(it.url + "/health")


async def written(folder: Path, engine: ScriptedEngine) -> tuple[Deployment, str]:
    """Start an engine, and write a deployment of it to a file."""
    proxy = ProxyOptions(port=free_port(), admin_port=free_port(), token_seconds=600.0)
    instances = [await engine.start()]
    deployment = Deployment(
        model="smollm2", served_model_name="m", instances=instances, proxy=proxy
    )
    write_deployment(deployment, folder / "deployment.yaml")
    return deployment, str(folder / "deployment.yaml")


@asynccontextmanager
async def served(
    command: list[str], folder: Path, tokenizer: Tokenizer
) -> AsyncIterator[tuple[ScriptedEngine, str, asyncio.subprocess.Process]]:
    """`headway serve` in front of an engine that stops at its fifth token."""
    engine = ScriptedEngine("decode-0", "decode", tokenizer, {}, stalls_at=5)
    deployment, config = await written(folder, engine)
    process = await asyncio.create_subprocess_exec(
        *(*command, "serve", "--config", config),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"serving on ")
        yield engine, deployment.proxy_url, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await engine.stop()


async def asked_to_end(process: asyncio.subprocess.Process) -> None:
    """Ask a proxy to end, and wait until it says how to end it at once."""
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while b"a second signal ends them at once" not in await process.stderr.readline():
        pass


async def test_a_second_signal_ends_what_runs_at_once(
    headway_command: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    body = {**BODY, "max_tokens": 9, "stream": True}
    async with (
        served(headway_command, tmp_path, tokenizer) as (engine, url, process),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as it,
    ):
        assert (await it.content.readline()).startswith(b"data: ")
        await asked_to_end(process)
        await asyncio.sleep(0.5)
        assert process.returncode is None and engine.running, "ten minutes by default"
        process.send_signal(signal.SIGTERM)
        rest = await it.content.read()
        assert b"shutting down" in rest
        assert await process.wait() == 0


async def test_a_request_that_follows_the_last_one_on_its_connection_is_served(
    headway_command: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with (
        served(headway_command, tmp_path, tokenizer) as (engine, url, process),
        aiohttp.ClientSession() as session,
    ):
        stream = {**BODY, "max_tokens": 9, "stream": True}
        async with session.post(url + "/v1/completions", json=stream) as it:
            assert (await it.content.readline()).startswith(b"data: ")
            await asked_to_end(process)
            engine.stalls_at = 0
            assert (await it.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.sleep(0.2)  # by now nothing runs any more
        async with session.post(url + "/v1/completions", json=BODY) as again:
            assert again.status == 200 and again.headers["Connection"] == "close"
        assert await process.wait() == 0


async def stream(session: aiohttp.ClientSession, tokens: int) -> list[int]:
    """The tokens of a stream that ends as it must."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "stream": True}
    async with session.post("/v1/completions", json={**body, "return_token_ids": True}) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines.pop() == b"data: [DONE]\n"
    return tokens_of([json.loads(line[6:]) for line in lines])


async def test_a_proxy_starts_anew_and_no_client_is_refused_or_cut(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    engine = ScriptedEngine("decode-0", "decode", tokenizer, {}, token_seconds=0.05)
    deployment, config = await written(tmp_path, engine)
    command = [sys.executable, "-m", "rescheduler", "serve", "--config", config]
    url = deployment.proxy_url
    proxy = ServerProcess(PROXY, EngineCommand(command, {}), url, tmp_path / "proxy.log")
    launched = Launched(deployment, tmp_path, [proxy], lambda name, stage: None)
    plan = Plan([PlannedServer(PROXY, command, {}, url, sys.executable)])
    said: list[str] = []
    ended = asyncio.Event()
    expected = reference(tokenizer.encode(PROMPT).ids, 600)

    def watch(requests: Requests) -> None:
        request = None
        while request is None:
            request = requests.wait(0.1)
        launched.upgrade(request)

    async def ask(**how: Any) -> int:
        """Ask one thing after another, on connections of its own or on one that stays open."""
        count = 0
        async with aiohttp.ClientSession(url, **how) as session:
            while not ended.is_set():
                assert await stream(session, 2) == expected[:2]
                count += 1
        return count

    try:
        await asyncio.to_thread(launched.start_all, None)
        with Requests.heard(tmp_path) as requests:
            async with aiohttp.ClientSession(url) as session:
                long = asyncio.create_task(stream(session, 600))
                fresh = asyncio.create_task(ask(connector=aiohttp.TCPConnector(force_close=True)))
                kept = asyncio.create_task(ask())
                watching = asyncio.create_task(asyncio.to_thread(watch, requests))
                asked = asyncio.to_thread(ask_to_upgrade, tmp_path, plan, said.append)
                upgrade = asyncio.create_task(asked)
                while not any("the new proxy serves" in line for line in said):
                    assert not upgrade.done(), upgrade.result()
                    await asyncio.sleep(0.05)
                assert not long.done(), "the old one has something to end"
                (listed,) = await asyncio.to_thread(listed_instances, deployment.admin_url)
                assert listed.name == "decode-0", "an operator reaches the new one"
                engine.token_seconds = 0.002
                assert await long == expected
                assert await upgrade == {PROXY}
                await watching
                ended.set()
                assert await fresh > 10 and await kept > 10
        assert proxy.exit_status == 0 and launched.servers[PROXY] is not proxy
    finally:
        await asyncio.to_thread(launched.close)
        await engine.stop()
