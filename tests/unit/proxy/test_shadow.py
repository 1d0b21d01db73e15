"""Shadows of routing, order and moves: they decide, are counted, and change nothing."""

import asyncio
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from routing_views import view_of
from scripted_cluster import PROMPT, Cluster, until

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.emulation.emulate_options import EmulateOptions
from rescheduler.engines.deployment import Deployment, DeploymentError, EngineOptions, Instance
from rescheduler.engines.emulated_deployment import in_real_time
from rescheduler.migration import Migration, Plan
from rescheduler.ordering import create_order
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.placement.guarded_policy import (
    deployed_planner,
    deployed_shadow,
    deployed_shadow_order,
)
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable
from rescheduler.placement.shadows import ShadowOrder, ShadowPlans, ShadowPolicy
from rescheduler.placement.waiting_line import WaitingLine
from rescheduler.routing.heuristics import JSQLoad
from rescheduler.routing.policy import Needs, RoutingPolicy, create_policy
from rescheduler.step_time.profile import MeanStepTime


@dataclass(frozen=True)
class Chooses(RoutingPolicy):
    """Chooses what it was told, or raises."""

    name: ClassVar[str] = "chooses"
    needs: ClassVar[Needs] = Needs.COUNTS
    instances: tuple[int, ...] = ()

    def assign(self, view: ClusterView) -> Assignment:
        if not self.instances:
            raise ValueError("nothing was told")
        return Assignment(np.array(self.instances))


def shown(loads: list[list[int]], waiting: int) -> ClusterView:
    """Instances with requests of these tokens, and so many requests that wait."""
    tokens = [one for there in loads for one in there]
    where = np.repeat(np.arange(len(loads)), [len(there) for there in loads])
    return view_of([100] * len(loads), where, tokens, [10] * waiting)


def test_each_decision_is_same_other_or_a_wait_and_loads_are_those_of_the_instances() -> None:
    view = shown([[500, 200], [300], [400]], 5)
    shadow = ShadowPolicy(Chooses((0, 1, -1, 2, -1)), lambda: 0.0)
    shadow.compare(view, [0, 0, 1, 1, -1])
    assert shadow.decisions == {"same": 2, "other": 2, "wait": 1, "none": 0}
    assert (shadow.lighter, shadow.heavier) == (400.0, 100.0)


def test_with_forecasts_what_requests_will_hold_counts() -> None:
    left = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    forecast = SurvivalForecast.new(np.array([0.0, 1000.0]), left, np.full(3, np.inf))
    view = replace(shown([[100], [300], [200]], 1), forecast=forecast)
    shadow = ShadowPolicy(Chooses((2,)), lambda: 0.0)
    shadow.compare(view, [1])
    expected = 100.0 + forecast.mean()[1] - forecast.mean()[2]
    assert shadow.lighter == pytest.approx(expected)
    longer = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.9]])
    forecast = SurvivalForecast.new(np.array([0.0, 1000.0]), longer, np.full(3, 3000.0))
    assert forecast.mean()[2] > forecast.mean()[1] + 100, "the emptier one will be the fuller one"
    shadow = ShadowPolicy(Chooses((2,)), lambda: 0.0)
    shadow.compare(replace(view, forecast=forecast), [1])
    assert shadow.lighter == 0
    assert shadow.heavier == pytest.approx(forecast.mean()[2] - forecast.mean()[1] - 100)


def test_a_shadow_that_raises_has_decided_nothing() -> None:
    shadow = ShadowPolicy(Chooses(), lambda: 0.0)
    shadow.compare(shown([[500], [300]], 2), [0, 1])
    assert shadow.decisions == {"same": 0, "other": 0, "wait": 0, "none": 2}


@pytest.mark.cluster(routing={"name": "jsq_load", "shadow": {"name": "jsq"}})
async def test_requests_go_where_the_policy_sends_them_whatever_the_shadow_says(
    it: Cluster,
) -> None:
    for _ in range(4):
        await it.answered(3)
    policies = {"policy": "jsq"}
    decided = "headway_proxy_shadow_decisions_total"
    assert await it.metric(decided, **policies) == 4
    assert await it.metric(decided, outcome="same", **policies) == 4, "one at a time: no load"
    shadow = it.proxy.cluster.dispatcher.shadow
    assert shadow is not None
    shadow._decides.policy = shadow.policy = Chooses((1,))
    before = [len(engine.bodies) for engine in it.decodes]
    for _ in range(3):
        await it.answered(3)
    assert [len(engine.bodies) for engine in it.decodes] == [before[0] + 3, before[1]]
    assert await it.metric(decided, outcome="other") == 3
    shadow._decides.policy = shadow.policy = Chooses((1, 1, 1))  # more than there are to place
    await it.answered(3)
    assert await it.metric(decided, outcome="none") == 1
    assert it.in_service


async def test_without_a_shadow_there_are_no_such_metrics(it: Cluster) -> None:
    assert "shadow" not in await it.text("/metrics")


def deployment_of(**shadow: object) -> Deployment:
    decode = Instance("d", "decode", "http://127.0.0.1:1")
    routing = {"name": "jsq_load", "shadow": shadow}
    return Deployment(model="m", instances=[decode], routing=routing)


@pytest.mark.parametrize(
    ("shadow", "message"),
    [
        ({}, r"routing\.shadow\.name: the policy's name is required"),
        ({"name": "nobody"}, r"routing\.shadow: .*nobody"),
        ({"name": "bfio", "solver": "exact"}, r"routing\.shadow: solver: exact"),
        ({"name": "pab"}, r"routing\.shadow\.name: pab requires the prefill budget"),
        ({"name": "headroom"}, r"routing\.shadow\.name: headroom requires forecasts"),
        ({"name": "jsq", "shadow": {"name": "jsq"}}, r"routing\.shadow: .*shadow"),
    ],
)
def test_a_shadow_that_cannot_be_is_refused(shadow: dict[str, object], message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        deployed_shadow(deployment_of(**shadow))


def test_a_shadow_has_the_options_of_its_policy() -> None:
    shadow = deployed_shadow(deployment_of(name="bfio", horizon=0))
    assert shadow == create_policy("bfio", horizon=0)
    assert deployed_shadow(Deployment(model="m", routing={"name": JSQLoad.name})) is None


def waiting_line(order: str, forecasts: LiveForecasts | None = None) -> WaitingLine[Placeable]:
    deployment = Deployment(model="m")
    decode = InstanceState(Instance("d", "decode", "http://127.0.0.1:1"), deployment.proxy, None)
    step = MeanStepTime()
    return WaitingLine(create_order(order), [decode], forecasts, step, lambda: 0.0, 600.0)


def asked(*lengths: int) -> list[Placeable]:
    return [Placeable(f"r{i}", expected_tokens=n) for i, n in enumerate(lengths)]


def test_two_orders_are_compared_by_the_tokens_before_a_request() -> None:
    now = 0.0
    shadow = ShadowOrder(waiting_line("shortest"), "shortest", lambda: now, lambda: 0.0)
    requests = asked(400, 10, 100)
    shadow.compare(requests, requests)
    assert shadow.rounds == {"same": 0, "other": 1, "none": 0}
    assert shadow.ahead["actual"] == pytest.approx((0 + 400 + 410) / 3, rel=0.15)
    assert shadow.ahead["shadow"] == pytest.approx((0 + 10 + 110) / 3, rel=0.15)
    assert {one.foreseen_tokens for one in requests} == {0.0}, "it changes nothing"
    shadow.compare(requests, requests)
    assert sum(shadow.rounds.values()) == 1, "ten times a second at most"
    now = 0.1
    shadow.compare(requests, [requests[1], requests[0], requests[2]])
    assert shadow.rounds["same"] == 1
    now = 0.2
    shadow.compare(requests[:1], requests[:1])
    assert sum(shadow.rounds.values()) == 2, "one alone is in order"


def test_an_order_that_fails_or_computes_for_long_is_asked_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    times = iter([0.0, 0.5, 1.0, 1.0])
    shadow = ShadowOrder(waiting_line("boost"), "boost", lambda: now, lambda: next(times))
    requests = asked(400, 10)
    monkeypatch.setattr(WaitingLine, "in_order", lambda *_: 1 / 0)
    shadow.compare(requests, requests)
    assert shadow.rounds["none"] == 1
    now = 9.9
    shadow.compare(requests, requests)
    assert shadow.rounds["none"] == 1, "half a second of a processor is 5% of ten"
    now = 10.0
    shadow.compare(requests, requests)
    assert shadow.rounds["none"] == 2


@pytest.mark.cluster(order={"name": "fcfs", "shadow": {"name": "shortest"}}, prefill_concurrency=1)
async def test_requests_go_in_their_order_whatever_the_shadow_says(it: Cluster) -> None:
    assert it.proxy.cluster.line is None
    it.engines["prefill-0"].hangs = True
    body = {"model": "m", "prompt": PROMPT}
    tasks = []
    for i, most in enumerate((300, 200, 100)):
        tasks.append(asyncio.create_task(it.post({**body, "max_tokens": most})))
        await until(lambda i=i: it.proxy.cluster.dispatcher.waiting_for_prefill == i)  # type: ignore[misc]
    it.engines["prefill-0"].hangs = False
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3
    shadow = {"order": "shortest"}
    rounds = "headway_proxy_shadow_order_rounds_total"
    assert await it.metric(rounds, **shadow, outcome="other") >= 1
    assert await it.metric(rounds, **shadow, outcome="none") == 0
    ahead = "headway_proxy_shadow_order_tokens_ahead_total"
    actual = await it.metric(ahead, **shadow, by="actual")
    assert actual > await it.metric(ahead, **shadow, by="shadow") > 0
    started = [one["max_tokens"] for engine in it.decodes for one in engine.bodies]
    assert sorted(started, reverse=True) == [300, 200, 100]


@pytest.mark.parametrize(
    ("shadow", "message"),
    [
        ({}, r"order\.shadow\.name: the order's name is required"),
        ("boost", r"order\.shadow\.name: the order's name is required"),
        ({"name": "nobody"}, r"order\.shadow: .*nobody"),
        ({"name": "boost", "fairness": 1.0}, r"order\.shadow\.fairness: only the order that acts"),
        ({"name": "boost", "gamma": -1.0}, r"order\.shadow: .*gamma"),
        ({"name": "boost", "shadow": {"name": "boost"}}, r"order\.shadow: .*shadow"),
    ],
)
def test_a_shadow_order_that_cannot_be_is_refused(shadow: object, message: str) -> None:
    order = {"name": "fcfs", "shadow": shadow}
    with pytest.raises(DeploymentError, match=message):
        deployed_shadow_order(Deployment(model="m", order=order))


def test_the_rate_of_a_shadow_is_dilated_with_the_engines() -> None:
    order = {"name": "fcfs", "shadow": {"name": "boost", "gamma": 2.0}}
    engine = EngineOptions(emulate=EmulateOptions(profile="h100-llama-8b", dilation=4.0))
    slowed = in_real_time(Deployment(model="m", order=order, engine=engine)).order
    assert slowed == {"name": "fcfs", "shadow": {"name": "boost", "gamma": 0.5}}


def test_a_move_that_is_proposed_again_counts_once() -> None:
    shadow = ShadowPlans("star")
    first, second = requests = asked(400, 10)
    first.prompt_tokens, second.prompt_tokens = 30, 7

    def plan(*moves: tuple[int, int]) -> Plan:
        return Plan([Migration(request, 0, target, 1.0) for request, target in moves], "made up")

    for _ in range(3):
        shadow.count(plan((0, 1)), requests, ["a", "b", "c"])
    assert (shadow.moves, shadow.tokens) == (1, first.context_tokens)
    shadow.count(plan((0, 2), (1, 1)), requests, ["a", "b", "c"])
    assert shadow.moves == 3
    shadow.count(plan(), [second], ["a", "b", "c"])
    assert first not in shadow._counted, "it has ended"


@pytest.mark.cluster(
    prefix_caching=False,
    migration={"name": "star", "prediction": False, "interval_seconds": 0.02, "shadow": True},
)
async def test_a_planner_in_the_shadow_moves_nothing(it: Cluster) -> None:
    assert it.proxy.cluster.planner is not None
    dispatcher = it.proxy.cluster.dispatcher
    it.proxy.cluster.instances["decode-1"].drained = True
    tasks = [asyncio.create_task(it.answered(600)) for _ in range(4)]
    await until(lambda: len(it.engines["decode-0"].running) == 4)
    it.proxy.cluster.instances["decode-1"].drained = False
    dispatcher.wake()
    moves = {"planner": "star"}
    while not await it.metric("headway_proxy_shadow_moves_total", **moves):
        assert not all(task.done() for task in tasks)
    await asyncio.gather(*tasks)
    assert await it.metric("headway_proxy_shadow_moved_tokens_total", **moves) > 0
    assert not it.engines["decode-1"].bodies
    assert LiveSnapshots(it.proxy.cluster).about.migration == "star (shadow)"


def test_whether_a_planner_acts_is_true_or_false() -> None:
    migration = {"name": "star", "prediction": False, "shadow": "yes"}
    with pytest.raises(DeploymentError, match=r"migration\.shadow: true or false, not 'yes'"):
        deployed_planner(Deployment(model="m", migration=migration))
