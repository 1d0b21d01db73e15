"""What every routing policy keeps to, whatever the cluster, and how policies are named."""

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_views import cluster, placed

from predictor.compilation import compiled
from predictor.forecasts.forecast import PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, Assignment, ClusterView
from rescheduler.routing import (
    BFIO,
    JSQ,
    Needs,
    RoutingPolicy,
    create_policy,
    policy_names,
    routing_policy,
)
from rescheduler.routing.inputs import RoutingInputs, empty_target
from rescheduler.routing.policy import Kernel, kernel_of

NAMES = [name for name in policy_names() if name != "rl"]  # which is trained for one size
SHORT = {"brh": {"horizon": 12}, "overflow": {"horizon": 12}, "bfio": {"horizon": 12}}
EDGES = [0, 1, 4, 20, 200]


@compiled
def call(
    kernel: Kernel,
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Call a kernel from compiled code, as the simulator does."""
    kernel(inputs, parameters, target)


@st.composite
def clusters(draw: st.DrawFn, *, limited: bool | None = None) -> ClusterView:
    n_instances = draw(st.integers(1, 4))
    slots = draw(st.lists(st.integers(0, 5), min_size=n_instances, max_size=n_instances))
    request = st.tuples(st.integers(1, 400), st.integers(1, 150))
    instances = [draw(st.lists(request, max_size=n)) for n in slots]
    waiting = draw(st.lists(request, max_size=8))
    capacity = int(UNLIMITED)
    if draw(st.booleans()) if limited is None else limited:
        capacity = draw(st.integers(400, 2500))
    queued = [draw(st.integers(0, len(instance))) for instance in instances]
    view = cluster(
        instances,
        waiting,
        slots=slots,
        capacity=capacity,
        queued=queued,
        dispatched=draw(st.integers(0, 50)),
        budget=[draw(st.integers(-500, 2000)) for _ in slots],
    )
    return view if draw(st.booleans()) else with_curves(view)


def with_curves(view: ClusterView) -> ClusterView:
    """The same cluster with survival curves whose means are about those of its points."""

    def curves(points: object) -> SurvivalForecast:
        assert isinstance(points, PointForecast)
        survival = np.exp(-np.outer(1 / points.mean(), EDGES))
        return SurvivalForecast.new(EDGES, survival.reshape(len(points), len(EDGES)))

    return replace(
        view, forecast=curves(view.forecast), waiting_forecast=curves(view.waiting_forecast)
    )


def new(name: str) -> RoutingPolicy:
    return create_policy(name, **SHORT.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
@given(clusters())
def test_nothing_goes_where_no_slot_or_kv_room_is(name: str, view: ClusterView) -> None:
    instance = new(name).assign(view).instance
    assert instance.shape == (view.n_waiting,)
    assert ((instance >= -1) & (instance < view.n_instances)).all()
    sizes = view.waiting_prompt_tokens + view.waiting_generated_tokens
    for g in range(view.n_instances):
        new_here = instance == g
        assert new_here.sum() <= max(view.slots[g] - view.running[g], 0)
        if new_here.any():
            assert view.kv_load[g] + sizes[new_here].sum() <= view.kv_capacity[g]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"dedicated_small_large"}))
@given(clusters(limited=False))
def test_every_slot_is_used_when_memory_is_no_limit(name: str, view: ClusterView) -> None:
    free = int((view.slots - view.running).sum())
    assert (new(name).assign(view).instance >= 0).sum() == min(free, view.n_waiting)


@pytest.mark.parametrize("name", NAMES)
@given(clusters())
def test_the_same_view_gives_the_same_assignment_compiled_or_not(
    name: str, view: ClusterView
) -> None:
    policy = new(name)
    first = policy.assign(view).instance
    np.testing.assert_array_equal(new(name).assign(view).instance, first)
    inputs = policy.inputs(view)
    target = empty_target(inputs)
    kernel = kernel_of(policy)
    assert kernel is not None
    call(kernel, inputs, policy.parameters(), target)
    np.testing.assert_array_equal(target, first)


@pytest.mark.parametrize("name", NAMES)
def test_a_request_always_goes_somewhere_when_instances_queue(name: str) -> None:
    busy = [[(300, 20)] * 80, [(200, 10)] * 70, [(100, 400)] * 90]
    view = cluster(busy, [(50, 30)], instant=True)
    assert placed(name, view)[0] >= 0


@pytest.mark.parametrize("name", NAMES)
def test_policies_that_need_forecasts_refuse_a_cluster_without(name: str) -> None:
    view = cluster([[(10, 5)], []], [(10, 5)])
    blind = replace(view, forecast=None, waiting_forecast=None)
    policy = new(name)
    if policy.needs >= Needs.LENGTHS:
        with pytest.raises(ValueError, match="forecasts"):
            policy.assign(blind)
    else:
        assert policy.assign(blind).instance.tolist() == policy.assign(view).instance.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_policies_that_go_by_budgets_refuse_engines_that_report_none(name: str) -> None:
    view = replace(cluster([[(10, 5)], []], [(10, 5)]), prefill_budget=None)
    if new(name).needs_budget:
        with pytest.raises(ValueError, match="pab needs prefill budgets"):
            new(name).assign(view)
    else:
        new(name).assign(view)


def test_pab_sends_each_prompt_to_the_greatest_budget_and_counts_it_there() -> None:
    # 500, 700, 650: the second, which then has 400; the third, 250; the first, 200; the second.
    waiting = [(300, 5), (400, 5), (300, 5), (10, 5)]
    view = cluster([[], [(80, 5)], []], waiting, budget=[500, 700, 650])
    assert placed("pab", view) == [1, 2, 0, 1]
    # Equal budgets: the least load, then the lowest index.
    view = cluster([[(50, 5)], [(40, 5)], [(40, 5)]], [(10, 5)], budget=[9, 9, 9])
    assert placed("pab", view) == [1]
    # Without any to spare it still goes where it is least late.
    view = cluster([[], []], [(10, 5)], budget=[-500, -400])
    assert placed("pab", view) == [1]


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"no routing policy 'sjf'; known: .*fcfs.*jsq"):
        create_policy("sjf")


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="already is a routing policy 'jsq'"):
        routing_policy("jsq")(JSQ)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("brh", {"delta": 1}, "brh has no option 'delta'.*alpha, beta, gamma"),
        ("fcfs", {"seed": 1}, "fcfs has no option 'seed'; it takes: none"),
        ("headroom", {"epsilon": "a"}, "headroom: epsilon must be a number, not 'a'"),
        ("headroom", {"epsilon": True}, "headroom: epsilon must be a number, not True"),
        ("headroom", {"starvation": 1.5}, "headroom: starvation must be a whole number, not 1.5"),
        ("max_capacity", {"reserve": None}, "max_capacity: reserve must be a number, not None"),
        ("max_capacity", {"every": inf}, "every must be at least 0, not inf"),
        ("bfio", {"solver": "simplex"}, "solver is 'fast' or 'exact', not 'simplex'"),
        ("bfio", {"horizon": -1}, "horizon must be at least 0, not -1"),
        ("bfio", {"horizon": True}, "horizon must be a whole number, not True"),
        ("bfio", {"time_limit": 0}, "time_limit must be above 0, not 0"),
        ("vllm", {"version": "0.11"}, "0.32"),
        ("dedicated_small_large", {"heavy_tokens": 0}, "heavy_tokens"),
        ("dedicated_small_large", {"share": 1}, "share"),
        ("brh", {"gamma": 1.5}, "gamma must be above 0 and at most 1, not 1.5"),
        ("headroom", {"epsilon": 0}, "epsilon must be above 0, not 0"),
        ("headroom", {"prefill_cost": -1}, "prefill_cost must be above 0, not -1"),
        ("headroom", {"starvation": -1}, "starvation must be at least 0, not -1"),
        ("max_capacity", {"reserve": 1}, "reserve must be at least 0 and below 1, not 1"),
        ("brh", {"beta": -1}, "beta must be at least 0, not -1"),
        ("brh", {"horizon": -1}, "horizon"),
        ("brh", {"steps": [0, 5, 5]}, "ascend from 0"),
        ("brh", {"steps": [0, 2.5]}, "whole"),
        ("overflow", {"horizon": -1}, "horizon"),
        ("fast_phi", {"k": 0}, "k must be at least 1"),
        ("fast_phi", {"steps": [5, 10]}, "ascend from 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create_policy(name, **options)


def test_policies_without_a_kernel_of_ours_are_asked_in_python() -> None:
    @dataclass(frozen=True)
    class LastInstance(RoutingPolicy):
        name = "last_instance"
        needs = Needs.COUNTS

        def assign(self, view: ClusterView) -> Assignment:
            return Assignment(np.full(view.n_waiting, view.n_instances - 1))

    assert kernel_of(LastInstance()) is None
    assert kernel_of(BFIO(solver="exact")) is None
    assert all(kernel_of(new(name)) for name in NAMES)
