"""`headway watch` beside an engine that is killed and comes back."""

import json
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from chosen_ports import free_port
from forked_vllm import post
from process_groups import processes_in
from running_deployment import RunningDeployment

from rescheduler.demo.demo_load import metric_by

SCORED = "headway_forecast_scored_requests_total"


def wait_for(port: int, name: str, value: float) -> None:
    """Wait until a metric has a value."""
    deadline, found = time.monotonic() + 300, dict[str, float]()
    while True:
        assert time.monotonic() < deadline, f"{name} was never {value:g}: {found}"
        with suppress(OSError):  # it has just been started
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                found = metric_by(response.read().decode(), name, "instance_name")
            if list(found.values()) == [value]:
                return
        time.sleep(0.2)


def answer(port: int, prompts: list[str], tokens: int) -> None:
    body = {"model": "smollm2", "prompt": prompts, "max_tokens": tokens, "ignore_eos": True}
    with post(port, "/v1/completions", body) as response:
        json.load(response)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_engine_leaves_nothing_and_its_forecasts_are_scored_after_its_restart(
    deployment: RunningDeployment, headway_command: list[str], tmp_path: Path
) -> None:
    running, instance, prometheus = (
        deployment.launched,
        deployment.deployment.decode[1],
        free_port(),
    )
    log = tmp_path / "finished.jsonl"
    command = [*headway_command, "watch", "--connect", json.dumps([instance.telemetry])]
    command += ["--headless", "true", "--log", str(log), "--prometheus_port", str(prometheus)]
    with (tmp_path / "watch.txt").open("w") as output:
        watch = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(prometheus, "headway_instance_stale", 0)
        answer(instance.port, ["One", "Two", "Three"], 23)
        wait_for(prometheus, SCORED, 3)
        group = running.servers[instance.name].pid
        assert group is not None
        assert len(processes_in(group)) > 1, "a server and its engine"
        running.kill(instance.name)
        assert processes_in(group) == []
        with pytest.raises(OSError, match="refused"):
            answer(instance.port, ["Nobody"], 1)
        wait_for(prometheus, "headway_instance_stale", 1)
        running.restart(instance.name)
        assert running.take_ended() == []
        wait_for(prometheus, "headway_instance_stale", 0)
        answer(instance.port, ["Four", "Five"], 17)
        wait_for(prometheus, SCORED, 5)
        watch.terminate()
        assert watch.wait() == 0
    finally:
        if watch.poll() is None:
            watch.kill()
            watch.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["total_tokens"] for line in lines) == [17, 17, 23, 23, 23]
    assert {line["instance"] for line in lines} == {instance.name}
    assert all(line["cut"] and 0 in line["generated"] for line in lines)
