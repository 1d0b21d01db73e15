"""The order of service inside an engine, before a scheduler of which only the queue is real."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from data_collection.vllm_adapter.scheduling import arrival, queued_requests
from predictor.forecasts.forecast import PointForecast, SurvivalForecast
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.engine_command import engine_command
from rescheduler.ordering.engine_order import EngineOrder
from rescheduler.ordering.service_order import read_engine_order


class _Request:
    """What the order reads of vLLM's request."""

    def __init__(self, name: str, prompt: int, most: int, generated: int = 0) -> None:
        self.request_id, self.prompt_token_ids = name, list(range(prompt))
        self.num_tokens, self.num_output_tokens = prompt + generated, generated
        self.max_tokens, self.arrival_time = most, time.time()
        self.sampling_params = SimpleNamespace(temperature=0.8, stop=[])
        self.reason, self.kv_transfer_params = "stop", None

    def get_finished_reason(self) -> str:
        return self.reason


class _Forecasts:
    """What an engine has forecast: the tokens that some requests will still generate."""

    def __init__(self, remaining: dict[str, int]) -> None:
        self._remaining = remaining

    def remaining(self, request: Any) -> SurvivalForecast | None:
        left = self._remaining.get(request.request_id)
        return None if left is None else PointForecast.new([left]).on_grid([0, 1, left, left + 1])


def part(
    *requests: _Request,
    policy: str = "fcfs",
    forecasts: dict[str, int] | None = None,
    **order: Any,
) -> EngineOrder:
    queue = FCFSRequestQueue()
    queue.extend(requests)
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(model="acme/other"),
            additional_config={"headway": {"order": order or {"name": "shortest"}}},
            scheduler_config=SimpleNamespace(policy=policy, max_num_seqs=4),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        ),
        waiting=queue,
        skipped_waiting=[],
        kv_holding_waiting=[],
        running=[],
        part=lambda kind: _Forecasts(forecasts or {}),
        kv_cache_manager=SimpleNamespace(usage=0.5),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        cache_config=SimpleNamespace(num_gpu_blocks=100),
        block_size=16,
    )
    return EngineOrder(scheduler)


def names(part: EngineOrder) -> list[str]:
    return [request.request_id for request in part.scheduler.waiting]


def test_it_is_put_in_order_now_and_then_only() -> None:
    made = part(_Request("a", 10, 90), _Request("b", 10, 5))
    made.before_scheduling()
    made.scheduler.waiting.append(_Request("c", 10, 1))
    made.before_scheduling()
    assert names(made) == ["b", "a", "c"]
    made._order_at -= 10.0
    made.before_scheduling()
    assert names(made) == ["c", "b", "a"]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=40))
def test_nobody_is_lost_and_the_first_come_stay_first_among_equals(
    sizes: list[tuple[int, int]],
) -> None:
    requests = [_Request(str(i), prompt, most) for i, (prompt, most) in enumerate(sizes)]
    made = part(*requests)
    made.before_scheduling()
    assert sorted(names(made), key=int) == [request.request_id for request in requests]
    equal = [name for name in names(made) if sizes[int(name)] == (sizes[0] if sizes else None)]
    assert equal == sorted(equal, key=int)


def test_who_has_waited_far_too_long_goes_first() -> None:
    made = part(_Request("a", 10, 90), _Request("b", 10, 5), _Request("c", 10, 40))
    for request in list(made.scheduler.waiting)[:1]:
        request.headway_arrival = time.monotonic() - 1e5
    made.before_scheduling()
    assert names(made)[0] == "a"


def test_the_time_of_day_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """By days, forwards or back, while requests wait: who has waited longest stays first."""
    requests = [_Request(name, 10, most) for name, most in (("a", 900), ("b", 5), ("c", 40))]
    made = part(*requests)
    clock = time.time
    for days, request in zip((0, 3, -3), requests, strict=True):
        monkeypatch.setattr(time, "time", lambda days=days: clock() + days * 86400)
        request.arrival_time = time.time()
        arrival(request)
    for days in (0, 3, -3):
        monkeypatch.setattr(time, "time", lambda days=days: clock() + days * 86400)
        waited = [time.monotonic() - one.arrived for one in queued_requests(made.scheduler)]
        assert waited == sorted(waited, reverse=True)
        assert max(waited) < 60
    request = _Request("late", 10, 5)
    request.arrival_time -= 3
    assert 3 <= time.monotonic() - arrival(request) < 60, "what it took from the API server counts"
    request = _Request("of another clock", 10, 5)
    request.arrival_time -= 1e6
    assert time.monotonic() - arrival(request) < 70


def test_a_preempted_request_is_expected_to_generate_what_is_left() -> None:
    """By its forecast, or by what was expected of it less what it has generated."""
    old = _Request("old", 10, 1000, generated=240)
    forecast = _Request("forecast", 10, 1000, generated=20)
    made = part(_Request("new", 10, 1000), forecast, old, forecasts={"forecast": 90})
    made.before_scheduling()
    assert names(made) == ["old", "forecast", "new"]


def test_prompts_are_forecast_a_few_at_a_time() -> None:
    requests = [_Request(str(i), 10 + i, 2000) for i in range(150)]
    checkpoint = "checkpoints/smollm2-135m-instruct-prompt"
    made = part(*requests, name="shortest", prompt_checkpoint=checkpoint)
    for known in (64, 128, 150):
        made._order_at = -np.inf
        made.before_scheduling()
        assert len(made._expected) == known
    made.ended(requests[0])
    assert len(made._expected) == 149


def test_lengths_and_steps_are_learned() -> None:
    made = part(_Request("a", 10, 10_000), _Request("b", 10, 10_000))
    ended = _Request("c", 10, 100, generated=8)
    for _ in range(300):
        made.ended(ended)
    assert made._mean == pytest.approx(8, abs=2)
    ended.reason, ended.num_output_tokens = "abort", 10_000
    made.ended(ended)
    assert made._mean == pytest.approx(8, abs=2), "who leaves says nothing of lengths"
    ended.sampling_params.stop, ended.num_output_tokens = ["\n"], 2
    for _ in range(300):
        made.ended(ended)
    assert made._mean == pytest.approx(2, abs=1), "a stop string ends a request like the model"
    ended.reason, ended.num_output_tokens = "length", 1
    for _ in range(300):
        made.ended(ended)
    assert made._mean > 1.5, "what was cut would have been longer"
    made.scheduler.running = [ended]
    made.updated(None, None)
    made._stepped_at -= 0.5
    made.updated(None, None)
    assert made._step.seconds > 0.051


def test_a_prompt_that_cannot_be_forecast_does_not_end_the_order_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = [_Request("a", 10, 90), _Request("b", 10, 5), _Request("c", 10, 3)]
    queue[0].prompt_token_ids = [2**70]
    made = part(
        *queue, name="shortest", prompt_checkpoint="checkpoints/smollm2-135m-instruct-prompt"
    )
    with caplog.at_level(logging.ERROR, "vllm.headway.order"):
        made.before_scheduling()
    assert names(made) == ["c", "b", "a"]
    assert made._expected["a"] == made._mean and len(made._expected) == 3


def test_an_engine_does_not_end_by_what_cannot_be_ordered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = part(_Request("a", 10, 90), _Request("b", 10, 5))
    monkeypatch.setattr(EngineOrder, "_expected_left", lambda part, queue: 1 / 0)
    with caplog.at_level(logging.ERROR, "vllm.headway.order"):
        for _ in range(3):
            made._order_at = -np.inf
            made.before_scheduling()
    assert names(made) == ["a", "b"]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({}, "no order's name"),
        ({"name": 5}, "no order's name"),
        ({"name": "shortes"}, r"headway.order: no order of service 'shortes'"),
        ({"name": "boost", "gama": 1}, "boost has no option 'gama'"),
        ({"name": "boost", "prompt_checkpoint": 5}, "prompt_checkpoint: a folder"),
        ({"name": "fcfs", "fairness": 1}, "order.fairness: an engine does not know who sent its"),
    ],
)
def test_an_invalid_order_is_refused(order: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_engine_order({"headway": {"order": order}})


def test_vllms_own_priorities_and_an_order_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="both say who goes first"):
        part(policy="priority", name="boost")


def test_engines_are_launched_with_it() -> None:
    values: dict[str, Any] = {
        "model": "m",
        "instances": [{"name": "d", "role": "decode", "url": "http://d:1"}],
        "engine": {"order": {"name": "boost"}},
    }
    deployment = Deployment.from_values(values)
    command = engine_command(deployment, deployment.decode[0], "m", None).shell()
    assert "rescheduler.ordering.vllm_scheduler.OrderedHeadwayScheduler" in command
    assert '{"headway": {"order": {"name": "boost"}}}' in command
    for engine, message in (
        ({"order": {"name": "boots"}}, r"engine\.order: no order of service 'boots'"),
        ({"order": {"name": "boost"}, "batching": {"formation": "vllm"}}, "drop one"),
    ):
        with pytest.raises(DeploymentError, match=message):
            Deployment.from_values(values | {"engine": engine})
