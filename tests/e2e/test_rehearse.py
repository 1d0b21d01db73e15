"""`headway rehearse`: a trace against emulated engines, to its end and until Ctrl-C."""

import csv
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_groups import living

from rescheduler.engines.deployment import EngineOptions
from rescheduler.engines.launch_local import local_deployment, write_deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


TEN_MINUTES = "".join(f"{0.2 * i:.2f},100,10\n" for i in range(3_000))


@pytest.fixture
def rehearsed(headway_command: list[str], tmp_path: Path) -> Any:
    engine = EngineOptions(max_num_seqs=16, max_model_len=2_048)
    write_deployment(local_deployment("smollm2", engine, decode=2, prefill=0), tmp_path / "d.yaml")

    def start(rows: str) -> subprocess.Popen[str]:
        (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
        options = ["--config", str(tmp_path / "d.yaml"), "--emulate", "h100-llama-8b"]
        options += ["--out", str(tmp_path / "out"), "--overwrite"]
        command = [*headway_command, "rehearse", str(tmp_path / "trace.csv"), *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path)

    return start


def until_served(running: Any, folder: Path) -> None:
    """Wait until an engine has computed something."""
    while not any(one.stat().st_size > 5_000 for one in folder.glob("out/steps/*/*.csv")):
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.5)


def test_a_trace_is_served_and_what_clients_saw_is_written(rehearsed: Any, tmp_path: Path) -> None:
    rows = "".join(f"{0.1 * i:.2f},{100 + i},{20 + i}\n" for i in range(30))
    running = rehearsed(rows)
    printed, said = running.communicate(timeout=600)
    assert running.returncode in (0, 1), said  # 1: a machine that did not keep up says so
    assert ("not to be trusted" in said) == (running.returncode == 1)
    assert "time to first token" in printed and "Traceback" not in said
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    figures = found["figures"]
    assert (figures["requests"], figures["failed"], figures["changed"]) == (30, 0, 0)
    assert figures["computed_twice"] == 0
    assert 0 < figures["ttft"] < figures["latency"] <= figures["latency_p99"]
    assert found["_about"]["deployment"]["engine"]["emulate"]["profile"] == "h100-llama-8b"
    with (tmp_path / "out" / "requests.csv").open() as file:
        served = list(csv.DictReader(file))
    assert [int(one["output_tokens"]) for one in served] == list(range(20, 50))
    assert all(float(one["latency_s"]) > 0 and not one["error"] for one in served)


def test_ctrl_c_reports_what_has_been_answered(rehearsed: Any, tmp_path: Path) -> None:
    running = rehearsed(TEN_MINUTES)
    until_served(running, tmp_path)
    engines = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=120)
    assert running.returncode == 130, said
    assert "Interrupted: the figures are of the requests answered until then." in said
    assert "time to first token" in printed and "Traceback" not in said
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert found["ended_early"] == "interrupted" and 0 < found["figures"]["requests"] < 3_000
    assert not living(engines)


def test_engines_end_with_a_rehearsal_that_is_killed(rehearsed: Any, tmp_path: Path) -> None:
    running = rehearsed(TEN_MINUTES)
    until_served(running, tmp_path)
    servers = psutil.Process(running.pid).children(recursive=True)
    assert len(servers) >= 8, "two engines and a proxy with their tethers, and two cores"
    running.kill()
    running.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while living(servers):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.1)


def test_a_rehearsal_whose_proxy_dies_ends_and_says_so(rehearsed: Any, tmp_path: Path) -> None:
    running = rehearsed(TEN_MINUTES)
    until_served(running, tmp_path)
    servers = psutil.Process(running.pid).children(recursive=True)
    ties = [one for one in servers if one.ppid() == running.pid]
    (proxy,) = [one for one in ties if {"serve", "--config"} <= set(one.cmdline())]
    proxy.children()[0].kill()
    printed, said = running.communicate(timeout=120)
    assert running.returncode == 1, said
    assert "proxy was killed by SIGKILL" in said and "Traceback" not in said
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert found["ended_early"] == "proxy ended" and found["figures"]["moves"] is None
    assert "unknown" in printed
    assert not living(servers)
