"""vLLM in processes of its own, forked from one that has imported it and done nothing else."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chosen_ports import free_port

_MAIN = "vllm.entrypoints.launchers.api_server.entry"
_PRELOADED = [
    _MAIN,
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
]


class Server:
    """A vLLM API server that runs, on a port of the loopback."""

    def __init__(self, port: int, process: BaseProcess, log: Path) -> None:
        self.port, self.log = port, log
        self._process = process

    def wait_until_ready(self) -> None:
        """Wait until it answers."""
        while True:
            assert self._process.is_alive(), self.log.read_text()[-4000:]
            health = f"http://127.0.0.1:{self.port}/health"
            with suppress(OSError), urllib.request.urlopen(health):
                return
            time.sleep(0.1)

    def stop(self) -> None:
        """End it as a user does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGTERM)
        self._process.join()


class Command:
    """A command line of Headway's that runs, and leads a process group."""

    def __init__(self, process: BaseProcess, log: Path) -> None:
        assert process.pid is not None
        self.pid, self.log = process.pid, log
        self._process = process

    def is_running(self) -> bool:
        return self._process.is_alive()

    def end(self) -> tuple[int | None, str]:
        """Wait until it ends; return its status and what it printed."""
        self._process.join()
        return self._process.exitcode, self.log.read_text()


@contextmanager
def running_command(arguments: Sequence[str], log: Path) -> Iterator[Command]:
    """Run `headway` with these arguments, which prints to a log."""
    with _process(_headway, (list(arguments),), log) as process:
        yield Command(process, log)


def server_arguments(
    model: Path, section: dict[str, Any], *flags: str, longest: int = 512
) -> list[str]:
    """Return the command line of a server of the embedded model with a section of Headway's."""
    arguments = ["--model", str(model), "--served-model-name", "smollm2", "--dtype", "float32"]
    arguments += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", str(longest)]
    arguments += ["--max-num-seqs", "8", "--additional-config", json.dumps({"headway": section})]
    return [*arguments, *flags]


@contextmanager
def running_server(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """Serve with vLLM, of whose command line the port is left out; ready in the body."""
    port = free_port()
    with _process(_serve, ([*arguments, "--port", str(port)],), log) as process:
        server = Server(port, process, log)
        server.wait_until_ready()
        yield server
        server.stop()


def ended_server(arguments: Sequence[str], log: Path) -> str:
    """Return what a server printed that refused to start."""
    with _process(_serve, ([*arguments, "--port", str(free_port())],), log) as process:
        process.join()
        assert process.exitcode != 0
    return log.read_text()


def run_forked(
    work: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Return what a function returns in a process that has imported vLLM.

    Raises:
        RuntimeError: it failed; the message is what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder) / "printed", Path(folder) / "result.json"
        with _process(_work, (work, arguments, result), log, environment or {}) as process:
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(log.read_text())
        return json.loads(result.read_text())


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """Open the answer to a request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request)


@contextmanager
def _process(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    log: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[BaseProcess]:
    """Run a function in a process and a group of its own; nothing of it is left after the body."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_in_group, args=(log, dict(environment), work, arguments))
    process.start()
    try:
        yield process
    finally:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _in_group(
    log: Path, environment: Mapping[str, str], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    work(*arguments)


def _serve(arguments: list[str]) -> None:
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["api_server", *arguments]
    main()


def _headway(arguments: list[str]) -> None:
    from rescheduler.commands.command_line import main

    sys.exit(main(arguments))


def _work(work: Callable[..., Any], arguments: tuple[Any, ...], result: Path) -> None:
    try:
        result.write_text(json.dumps(work(*arguments)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
