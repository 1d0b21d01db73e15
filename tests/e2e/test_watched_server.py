"""`headway watch` beside a real vLLM server that is killed and comes back."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from serving import free_port, post, wait_until_ready

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"


@contextmanager
def server(smollm2: Path, folder: Path, telemetry: str, stop: int) -> Iterator[int]:
    """A vLLM server with forecasts; ended by the given signal to its whole group."""
    port, log = free_port(), folder / f"server-{stop}.log"
    section = {
        "k": 5,
        "forecast": {
            "checkpoint": str(CHECKPOINT),
            "telemetry": {"bind": telemetry, "instance": "decode-0"},
        },
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(smollm2), "--served-model-name", "smollm2", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--worker-cls", "predictor.live.vllm_worker.LiveHeadwayWorker"]
    command += ["--scheduler-cls", "predictor.live.vllm_scheduler.LiveHeadwayScheduler"]
    command += ["--additional-config", json.dumps({"headway": section})]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_ready(port, process, log)
        yield port
    finally:
        os.killpg(process.pid, stop)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not among the metrics:\n{text}"
    return float(found.group(1))


def wait_for(port: int, name: str, value: float) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if metric(port, name) == value:
            return
        time.sleep(0.3)
    raise AssertionError(f"{name} is {metric(port, name)}, not {value}")


def answer(port: int, prompts: list[str], tokens: int) -> None:
    body = {"model": "smollm2", "prompt": prompts, "max_tokens": tokens, "ignore_eos": True}
    with post(port, "/v1/completions", body) as response:
        json.load(response)


@pytest.mark.timeout(1200)
def test_watch_scores_forecasts_through_a_killed_and_restarted_engine(
    smollm2: Path, headway_command: list[str], tmp_path: Path
) -> None:
    telemetry, prometheus = f"tcp://127.0.0.1:{free_port()}", free_port()
    log, printed = tmp_path / "finished.jsonl", tmp_path / "watch.txt"
    command = [*headway_command, "watch", "--connect", f'["{telemetry}"]', "--headless", "true"]
    command += ["--log", str(log), "--prometheus_port", str(prometheus)]
    with printed.open("w") as output:
        watch = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    scored = "headway_forecast_scored_requests_total"
    try:
        with server(smollm2, tmp_path, telemetry, signal.SIGKILL) as port:
            answer(port, ["One", "Two", "Three"], 23)
            wait_for(prometheus, scored, 3)
            assert metric(prometheus, "headway_instance_stale") == 0
        wait_for(prometheus, "headway_instance_stale", 1)
        with server(smollm2, tmp_path, telemetry, signal.SIGTERM) as port:
            answer(port, ["Four", "Five"], 17)
            wait_for(prometheus, scored, 5)
            assert metric(prometheus, "headway_instance_stale") == 0
        watch.terminate()
        assert watch.wait(timeout=30) == 0
    finally:
        if watch.poll() is None:
            watch.kill()
            watch.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["total_tokens"] for line in lines) == [17, 17, 23, 23, 23]
    assert {line["instance"] for line in lines} == {"decode-0"}
    assert all(line["cut"] and 0 in line["generated"] for line in lines)
    assert "waiting for telemetry" in printed.read_text()
