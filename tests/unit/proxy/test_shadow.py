"""`routing.shadow`: a second policy that decides, is counted, and changes nothing."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from scripted_cluster import Cluster

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance
from rescheduler.placement.guarded_policy import ShadowPolicy, deployed_shadow
from rescheduler.routing.heuristics import JSQLoad
from rescheduler.routing.policy import Needs, RoutingPolicy, create_policy


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


def view_of(loads: list[list[int]], waiting: int) -> ClusterView:
    """Instances with requests of these tokens, and so many requests that wait."""
    tokens = np.array([one for there in loads for one in there])
    n = len(loads)
    return ClusterView(
        slots=np.full(n, 100),
        kv_capacity=np.full(n, 100_000),
        queued=np.zeros(n, dtype=np.int64),
        instance=np.repeat(np.arange(n), [len(there) for there in loads]),
        prompt_tokens=tokens,
        generated_tokens=np.zeros_like(tokens),
        forecast=None,
        waiting_prompt_tokens=np.full(waiting, 10),
        waiting_generated_tokens=np.zeros(waiting, dtype=np.int64),
        waiting_forecast=None,
        waited_steps=np.zeros(waiting, dtype=np.int64),
    )


def test_each_decision_is_same_other_or_a_wait_and_loads_are_those_of_the_instances() -> None:
    view = view_of([[500, 200], [300], [400]], 5)
    shadow = ShadowPolicy(Chooses((0, 1, -1, 2, -1)), lambda: 0.0)
    shadow.compare(view, [0, 0, 1, 1, -1])
    assert shadow.decisions == {"same": 2, "other": 2, "wait": 1, "none": 0}
    assert (shadow.lighter, shadow.heavier) == (400.0, 100.0)


def test_with_forecasts_what_requests_will_hold_counts() -> None:
    left = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    forecast = SurvivalForecast.new(np.array([0.0, 1000.0]), left, np.full(3, np.inf))
    view = replace(view_of([[100], [300], [200]], 1), forecast=forecast)
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
    shadow.compare(view_of([[500], [300]], 2), [0, 1])
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
