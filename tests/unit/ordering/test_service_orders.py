"""The order of service: its keys, fairness between accounts, and the queue inside an engine."""

import logging
import math
import time
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queued_by_vllm import QueuedByVllm, engine_order, names

from data_collection.vllm_adapter.scheduling import arrival, queued_requests
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.engine_command import engine_command
from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.ordering.engine_order import EngineOrder
from rescheduler.ordering.fairness import interleave, slack
from rescheduler.ordering.kernel import HOLDS_BACK, new_waiting, put_in_order, tail_rate
from rescheduler.ordering.service_order import read_engine_order

ORDERS = [
    create_order("shortest"),
    create_order("shortest", by="prompt", starvation=3.0),
    create_order("response_ratio"),
    create_order("boost"),
    create_order("boost", gamma=0.1, starvation=1.5),
    create_order("boost", scale=0.2),
]


@dataclass
class Line:
    """Requests in order of arrival."""

    waited: list[float]
    cost: list[float]
    alone: list[float]
    latest: list[float]

    def served(self, order: ServiceOrder, gamma: float = 0.05) -> tuple[list[int], bool]:
        n = len(self.waited)
        waiting = new_waiting(n + 3)
        for name in ("waited", "cost", "alone", "latest"):
            getattr(waiting, name)[:n] = getattr(self, name)
        alone = put_in_order(order.parameters(), gamma, waiting, n)
        return waiting.order[:n].tolist(), bool(alone)

    def due(self, order: ServiceOrder) -> list[float]:
        """Seconds of waiting after which each is overdue."""
        times = order.parameters().starvation
        return [min(times * e, t) for e, t in zip(self.alone, self.latest, strict=True)]


@st.composite
def lines(draw: st.DrawFn) -> Line:
    n = draw(st.integers(1, 40))
    seconds = st.floats(0.01, 500.0)
    waited = sorted((draw(seconds) for _ in range(n)), reverse=True)
    alone = [draw(seconds) for _ in range(n)]
    cost = [draw(st.sampled_from([0.1, 1.0, 2.0, 70.0])) for _ in range(n)]
    latest = [draw(st.one_of(st.just(math.inf), seconds)) for _ in range(n)]
    return Line(waited, cost, alone, latest)


@given(lines())
def test_without_forecasts_it_is_the_order_of_arrival(line: Line) -> None:
    assert line.served(create_order("fcfs")) == (list(range(len(line.waited))), False)


@given(lines(), st.sampled_from(ORDERS), st.sampled_from([0.0, 0.01, 1.0]))
def test_the_order_is_that_of_the_formulas(line: Line, order: ServiceOrder, gamma: float) -> None:
    n, due = len(line.waited), line.due(order)
    unit = sum(line.alone) / sum(line.cost)
    rate = order.parameters().gamma or order.parameters().scale * gamma

    def key(i: int) -> tuple[int, float]:
        waited, cost, alone = line.waited[i], line.cost[i], line.alone[i]
        if waited >= due[i]:
            return 0, due[i] - waited
        if order.name == "shortest" or not rate > 0:
            return 1, -waited / alone if order.name == "response_ratio" else cost
        if order.name == "response_ratio":
            return 1, -waited / alone
        return 1, -waited + math.log(-math.expm1(-rate * unit * cost)) / rate

    found, alone = line.served(order, gamma)
    assert sorted(found) == list(range(n))
    keys = [key(i) for i in found]
    for (group, a), (later, b) in pairwise(keys):
        assert group < later or (group == later and a <= b + 1e-9 * max(1.0, abs(b)))
    first = found[0]
    assert alone == (line.waited[first] >= max(due[first], HOLDS_BACK * due[first]))


@settings(max_examples=20)
@given(st.sampled_from(ORDERS), st.integers(0, 10_000), st.integers(1, 3))
def test_one_that_is_long_is_served_however_many_short_ones_come(
    order: ServiceOrder, seed: int, each_second: int
) -> None:
    """One server, which is offered more than it can do, and a request that all others pass."""
    generator = np.random.default_rng(seed)
    long, now, waiting = (0.0, 5.0), 0.0, [(0.0, 5.0)]
    bound = order.parameters().starvation * long[1]
    backlog = 0
    while long in waiting:
        waiting += [(now, float(generator.uniform(0.5, 1.5))) for _ in range(each_second)]
        times = [now - arrived for arrived, _ in waiting]
        alone = [length for _, length in waiting]
        if now < bound:
            backlog = len(waiting)
        found, _ = Line(times, alone, alone, [math.inf] * len(waiting)).served(order)
        now += 1.0
        del waiting[found[0]]
        assert now <= bound + backlog + 1, "those that became overdue before it, one a second"


def test_of_equal_costs_the_first_to_come_goes_first() -> None:
    line = Line([9.0, 5.0, 3.0, 1.0], [2.0, 1.0, 2.0, 1.0], [100.0] * 4, [math.inf] * 4)
    assert line.served(create_order("shortest"))[0] == [1, 3, 0, 2]


def test_the_rate_of_a_tail_is_estimated() -> None:
    seen = np.random.default_rng(0).exponential(20.0, 1000)
    scratch = np.zeros((2, 1000), dtype=np.int64)
    assert tail_rate(seen, 1000, *scratch) == pytest.approx(1 / 20, rel=0.1)
    assert tail_rate(seen, 3, *scratch) == 0.0
    assert tail_rate(np.ones(1000), 1000, *scratch) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shortes", {}, "no order of service 'shortes'; known: boost, fcfs, .*'shortest'"),
        ("fcfs", {"starvation": 3}, "fcfs has no option 'starvation'; it takes: fairness"),
        ("fcfs", {"fairness": -0.1}, "fcfs: fairness must be at least 0 and at most 1, not -0"),
        ("boost", {"fairness": "even"}, "boost: fairness must be a number"),
        ("shortest", {"starvation": 1}, "shortest: starvation must be above 1, not 1"),
        ("shortest", {"starvation": "much"}, "shortest: starvation must be a number"),
        ("boost", {"gamma": 0.0}, "boost: gamma must be above 0, not 0.0"),
        ("boost", {"scale": 0.0}, "boost: scale must be above 0, not 0.0"),
        ("boost", {"scale": 0.5, "gamma": 0.1}, "boost: scale is of the gamma that is estimated"),
        ("boost", {"by": "age"}, "boost: by is 'forecast' or 'prompt', not 'age'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_order(name, **options)


LINES = st.lists(st.tuples(st.integers(0, 4), st.floats(1.0, 1000.0)), max_size=60)


def shared_out(
    accounts: list[int], service: list[float], ahead: float, served: list[float]
) -> list[int]:
    n = len(accounts)
    order = np.arange(n)
    interleave(
        order,
        np.array(accounts, dtype=np.int64),
        np.array(served),
        np.array(service, dtype=np.float64),
        ahead,
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(len(served), dtype=np.int64),
        n,
    )
    return order.tolist()


@given(LINES, st.floats(0.0, 5000.0), st.lists(st.floats(0.0, 2000.0), min_size=5, max_size=5))
def test_no_account_that_waits_falls_behind_by_more_than_the_slack_and_a_request(
    line: list[tuple[int, float]], ahead: float, served: list[float]
) -> None:
    accounts, service = [account for account, _ in line], [tokens for _, tokens in line]
    order = shared_out(accounts, service, ahead, served)
    assert sorted(order) == list(range(len(line)))
    left = {account: accounts.count(account) for account in accounts}
    had = list(served)
    for i in order:
        least = min(had[account] for account, count in left.items() if count)
        assert had[accounts[i]] <= least + ahead, "who is further ahead waits"
        had[accounts[i]] += service[i]
        left[accounts[i]] -= 1
    for account in set(accounts):
        of_it = [i for i in order if accounts[i] == account]
        assert of_it == sorted(of_it), "an account's own requests keep their order"


@given(LINES)
def test_one_account_alone_is_served_in_the_order_of_service(line: list[tuple[int, float]]) -> None:
    service = [tokens for _, tokens in line]
    assert shared_out([0] * len(line), service, 0.0, [7.0]) == list(range(len(line)))


def test_a_flood_takes_every_second_place_from_one_that_asks_as_much() -> None:
    order = shared_out([0] * 8 + [1] * 4, [10.0] * 12, 0.0, [0.0, 0.0])
    assert [int(i >= 8) for i in order] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0]


def test_twice_the_weight_is_twice_the_places() -> None:
    order = shared_out([0] * 6 + [1] * 6, [10.0] * 6 + [5.0] * 6, 0.0, [0.0, 0.0])
    assert [int(i >= 6) for i in order[:6]].count(1) == 4


@pytest.mark.parametrize(("fairness", "ahead"), [(0.0, inf), (1.0, 0.0), (0.5, 30.0)])
def test_half_fair_is_a_request_ahead(fairness: float, ahead: float) -> None:
    assert slack(fairness, 30.0) == ahead


def test_it_is_put_in_order_now_and_then_only() -> None:
    made = engine_order(QueuedByVllm("a", 10, 90), QueuedByVllm("b", 10, 5))
    made.before_scheduling()
    made.scheduler.waiting.append(QueuedByVllm("c", 10, 1))
    made.before_scheduling()
    assert names(made) == ["b", "a", "c"]
    made._order_at -= 10.0
    made.before_scheduling()
    assert names(made) == ["c", "b", "a"]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=40))
def test_nobody_is_lost_and_the_first_come_stay_first_among_equals(
    sizes: list[tuple[int, int]],
) -> None:
    requests = [QueuedByVllm(str(i), prompt, most) for i, (prompt, most) in enumerate(sizes)]
    made = engine_order(*requests)
    made.before_scheduling()
    assert sorted(names(made), key=int) == [request.request_id for request in requests]
    equal = [name for name in names(made) if sizes[int(name)] == (sizes[0] if sizes else None)]
    assert equal == sorted(equal, key=int)


def test_who_has_waited_far_too_long_goes_first() -> None:
    made = engine_order(
        QueuedByVllm("a", 10, 90), QueuedByVllm("b", 10, 5), QueuedByVllm("c", 10, 40)
    )
    for request in list(made.scheduler.waiting)[:1]:
        request.headway_arrival = time.monotonic() - 1e5
    made.before_scheduling()
    assert names(made)[0] == "a"


def test_the_time_of_day_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """By days, forwards or back, while requests wait: who has waited longest stays first."""
    requests = [QueuedByVllm(name, 10, most) for name, most in (("a", 900), ("b", 5), ("c", 40))]
    made = engine_order(*requests)
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
    request = QueuedByVllm("late", 10, 5)
    request.arrival_time -= 3
    assert 3 <= time.monotonic() - arrival(request) < 60, "what it took from the API server counts"
    request = QueuedByVllm("of another clock", 10, 5)
    request.arrival_time -= 1e6
    assert time.monotonic() - arrival(request) < 70


def test_a_preempted_request_is_expected_to_generate_what_is_left() -> None:
    """By its forecast, or by what was expected of it less what it has generated."""
    old = QueuedByVllm("old", 10, 1000, generated=240)
    forecast = QueuedByVllm("forecast", 10, 1000, generated=20)
    made = engine_order(QueuedByVllm("new", 10, 1000), forecast, old, forecasts={"forecast": 90})
    made.before_scheduling()
    assert names(made) == ["old", "forecast", "new"]


def test_prompts_are_forecast_a_few_at_a_time() -> None:
    requests = [QueuedByVllm(str(i), 10 + i, 2000) for i in range(150)]
    checkpoint = "checkpoints/smollm2-135m-instruct-prompt"
    made = engine_order(*requests, name="shortest", prompt_checkpoint=checkpoint)
    for known in (64, 128, 150):
        made._order_at = -np.inf
        made.before_scheduling()
        assert len(made._expected) == known
    made.ended(requests[0])
    assert len(made._expected) == 149


def test_lengths_and_steps_are_learned() -> None:
    made = engine_order(QueuedByVllm("a", 10, 10_000), QueuedByVllm("b", 10, 10_000))
    ended = QueuedByVllm("c", 10, 100, generated=8)
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
    queue = [QueuedByVllm("a", 10, 90), QueuedByVllm("b", 10, 5), QueuedByVllm("c", 10, 3)]
    queue[0].prompt_token_ids = [2**70]
    made = engine_order(
        *queue, name="shortest", prompt_checkpoint="checkpoints/smollm2-135m-instruct-prompt"
    )
    with caplog.at_level(logging.ERROR, "vllm.headway.order"):
        made.before_scheduling()
    assert names(made) == ["c", "b", "a"]
    assert made._expected["a"] == made._mean and len(made._expected) == 3


def test_an_engine_does_not_end_by_what_cannot_be_ordered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine_order(QueuedByVllm("a", 10, 90), QueuedByVllm("b", 10, 5))
    monkeypatch.setattr(EngineOrder, "_expected_left", lambda part, queue: 1 / 0)
    with caplog.at_level(logging.ERROR, "vllm.headway.order"):
        for _ in range(3):
            made._order_at = -np.inf
            made.before_scheduling()
    assert names(made) == ["a", "b"]
    assert made.scheduler.failures == 3


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
        engine_order(policy="priority", name="boost")


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
