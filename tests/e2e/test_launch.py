"""`headway launch` with real engines: ready, dying, stopped without a trace."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from process_groups import processes_in
from running_deployment import ENGINE, complete

from rescheduler.engines.launch_local import local_deployment, write_deployment


@contextmanager
def launch(headway_command: list[str], config: Path, *arguments: str) -> Iterator[Any]:
    """The command, in the background; ended by SIGTERM if it still runs."""
    logs = config.parent / "logs"
    command = [*headway_command, "launch", "--config", str(config), "--logs", str(logs), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def read_until(process: Any, words: str) -> str:
    printed = ""
    for line in process.stdout:
        printed += line
        if words in line:
            return printed
    raise AssertionError(f"{words!r} was not printed:\n{printed}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engines_and_proxy_serve_until_one_dies_and_sigterm_stops_the_rest(
    headway_command: list[str], tmp_path: Path
) -> None:
    described = local_deployment("smollm2", ENGINE)
    config = tmp_path / "deployment.yaml"
    write_deployment(described, config)
    with launch(headway_command, config, "--serve", "--only", "prefill-0", "decode-0") as process:
        printed = read_until(process, "Ctrl-C stops them")
        assert "prefill-0, decode-0, proxy: ready" in printed
        shown = re.search(r"(curl http.*?)\nsee it live", printed, re.DOTALL)
        assert shown is not None
        answer = subprocess.run(shown[1], shell=True, capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout)["choices"][0]["text"]
        engines = psutil.Process(process.pid).children()
        assert len(engines) == 3
        engines = [one for one in engines if "serve" not in one.cmdline()]
        groups = {engine.pid: processes_in(engine.pid) for engine in engines}
        assert all(len(group) > 1 for group in groups.values())
        dying = next(e for e in engines if str(described.decode[0].port) in e.cmdline())
        for member in groups[dying.pid]:
            if member.pid != dying.pid:
                with suppress(psutil.NoSuchProcess):  # it has ended with one before
                    member.kill()  # its engine core, as the system does when memory runs out
        assert "decode-0" in read_until(process, "headway launch: ")
        assert complete(described.prefill[0])["choices"][0]["text"]
        process.terminate()
        assert process.wait() == 1, "an engine had ended by itself"
        assert [processes_in(group) for group in groups] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_engine_that_cannot_start_says_why(headway_command: list[str], tmp_path: Path) -> None:
    described = local_deployment("smollm2", replace(ENGINE, kv_blocks=8))
    config = tmp_path / "deployment.yaml"
    write_deployment(described, config)
    command = [*headway_command, "launch", "--config", str(config), "--logs", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "decode-0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    reason = done.stderr[done.stderr.index("headway launch: ") :].splitlines()[0]
    assert reason.startswith("headway launch: decode-0 exited with status 1: ValueError: ")
    assert "max seq len (1024)" in reason
    assert f"{tmp_path}/decode-0.log ends:" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_launch_that_is_stopped_while_loading_leaves_nothing(
    headway_command: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "deployment.yaml"
    write_deployment(local_deployment("smollm2", ENGINE), config)
    with launch(headway_command, config, "--only", "decode-0") as process:
        read_until(process, "decode-0 starting")
        while not (engines := psutil.Process(process.pid).children()):
            time.sleep(0.1)
        (engine,) = engines
        while len(processes_in(engine.pid)) < 2:  # its engine core loads
            time.sleep(0.1)
        process.terminate()
        assert process.wait() == 130
        assert processes_in(engine.pid) == []
