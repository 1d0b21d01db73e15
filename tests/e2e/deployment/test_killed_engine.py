"""What is heard of an engine that is killed and comes back."""

import json
import time
from collections.abc import Callable

import pytest
from forked_vllm import post
from process_groups import processes_in
from running_deployment import RunningDeployment

from rescheduler.monitoring.forecast_quality import ForecastScores
from rescheduler.telemetry.subscriber import TelemetrySubscriber


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def answer(port: int, prompts: list[str], tokens: int) -> None:
    body = {"model": "smollm2", "prompt": prompts, "max_tokens": tokens, "ignore_eos": True}
    with post(port, "/v1/completions", body) as response:
        json.load(response)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_engine_leaves_nothing_and_its_forecasts_are_scored_after_its_restart(
    deployment: RunningDeployment,
) -> None:
    running, instance = deployment.launched, deployment.deployment.decode[1]
    assert instance.telemetry is not None
    with TelemetrySubscriber(instance.telemetry) as telemetry:
        scores = ForecastScores(telemetry)

        def scored(requests: int) -> bool:
            scores.take()
            return scores.quality.scored == requests

        def stale() -> list[bool]:
            with telemetry.lock:
                view, now = telemetry.view, time.monotonic()
                return [view.is_stale(key, now) for key in view.instances]

        wait_until(lambda: stale() == [False], "it never reported")
        answer(instance.port, ["One", "Two", "Three"], 23)
        wait_until(lambda: scored(3), "its requests were never scored")
        group = running.servers[instance.name].pid
        assert group is not None
        assert len(processes_in(group)) > 1, "a server and its engine"
        running.kill(instance.name)
        assert processes_in(group) == []
        with pytest.raises(OSError, match="refused"):
            answer(instance.port, ["Nobody"], 1)
        wait_until(lambda: stale() == [True], "it still reported")
        running.restart(instance.name)
        assert running.take_ended() == []
        wait_until(lambda: stale() == [False], "it never reported again")
        answer(instance.port, ["Four", "Five"], 17)
        wait_until(lambda: scored(5), "its requests were never scored again")
