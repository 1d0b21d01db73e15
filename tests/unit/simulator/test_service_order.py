"""A pool that is served in order, in the simulator."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import ReferenceConfig
from simulated_cases import Requests, engine_setup, reference_cases

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.routing import Needs, RoutingPolicy, create_policy
from rescheduler.simulator.config.simulation_config import read_config
from rescheduler.simulator.experiments.workers import groups
from rescheduler.simulator.forecasts.forecast_sources import NoForecast, Oracle
from rescheduler.simulator.results.metrics import RunResult
from rescheduler.simulator.simulation import create_candidates, run, run_setup

RECORDING = str(Path(__file__).parents[3] / "recordings" / "smollm2-135m-instruct.parquet")
ONE = ReferenceConfig(
    instances=1, slots=1, capacity=1000, clock="independent", dispatch="pool", pool_limit=100
)
SHORTEST = create_order("shortest", starvation=1e9)


def served(requests: Requests, order: ServiceOrder, config: ReferenceConfig = ONE) -> list[int]:
    """Return the numbers of the requests in the order in which they were placed."""
    result = run(engine_setup(config, requests, Oracle()), create_policy("jsq"), 0, order=order)
    return result.requests.number[np.argsort(result.requests.placed, kind="stable")].tolist()


def test_those_that_cost_least_go_first() -> None:
    """The first is alone when it comes; the others wait for it. Memory × time decides."""
    requests: Requests = [(0.0, 1, 50), (0.0, 1, 9), (0.0, 1, 3), (0.0, 1, 6), (0.0, 1, 3)]
    assert served(requests, create_order("fcfs")) == [0, 1, 2, 3, 4]
    found = served(requests, SHORTEST)
    assert found[-1] in (0, 1)
    assert [i for i in found if i] == [2, 4, 3, 1]
    large: Requests = [(0.0, 1, 50), (0.0, 1, 60), (1.5, 900, 3), (1.5, 1, 4)]
    two = replace(ONE, slots=2)
    assert served(large, SHORTEST, two) == [0, 1, 3, 2], "few tokens, but all of the memory"


def test_nobody_starves() -> None:
    """A long request among short ones, more than one slot can serve: steps take a second."""
    short: Requests = [(1.9 * i, 1, 2) for i in range(400)]
    requests: Requests = [short[0], (0.5, 1, 40), *short[1:]]
    assert served(requests, SHORTEST)[-1] == 1
    bounded = served(requests, create_order("shortest", starvation=2.0))
    assert 30 < bounded.index(1) < 60, "it goes first once it has waited for 80 s"


def test_one_that_has_waited_too_long_holds_back_the_others() -> None:
    """It needs the whole memory, of which somebody always has a part."""
    many: Requests = [(0.0, 300, 30), *((0.01 * i, 300, 30) for i in range(200))]
    requests: Requests = [*many[:3], (0.015, 900, 5), *many[3:]]
    config = replace(ONE, slots=4, pool_limit=300)
    number = 3
    patient = served(requests, create_order("fcfs"), config)
    bounded = served(requests, create_order("shortest", starvation=3.0), config)
    assert patient.index(number) > 190
    assert bounded.index(number) < 100


class InPython(RoutingPolicy):
    """A policy that the engine asks in Python, and what it was shown."""

    name = "in_python"
    needs = Needs.LOADS

    def assign(self, view: ClusterView) -> Assignment:
        return create_policy("jsq_load").assign(view)


@given(
    reference_cases(drift=(1,)),
    st.sampled_from(
        [
            create_order("boost", gamma=0.5, starvation=3.0),
            create_order("shortest", starvation=1.5),
            create_order("response_ratio"),
        ]
    ),
)
def test_policies_in_python_are_shown_the_same_order(
    case: tuple[ReferenceConfig, Requests], order: ServiceOrder
) -> None:
    config, requests = case
    setup = engine_setup(config, requests, Oracle())
    if setup.config.dispatch == "instant":
        return
    compiled = run(setup, create_policy("jsq_load"), 0, order=order)
    asked = run(setup, InPython(), 0, order=order)
    for field in ("number", "instance", "placed", "end"):
        np.testing.assert_array_equal(
            getattr(compiled.requests, field), getattr(asked.requests, field), err_msg=field
        )
    assert sorted(compiled.requests.number) == list(range(len(requests)))


def replayed(prefill: dict[str, Any], forecast: dict[str, Any], order: str) -> RunResult:
    """Requests of a real model, on two instances whose memory is short."""
    config = read_config(
        {
            "cluster": {"instances": 2, "slots": 64, "kv_capacity": 5000},
            "clock": "independent",
            "prefill": prefill,
            "step_time": {"name": "batch", "a": 0.02, "b": 3.2e-4, "c": 0.0},
            "trace": {"name": "replay", "recording": RECORDING, "requests": 300},
            "arrivals": {"kind": "poisson", "rate": 30.0},
            "forecast": forecast,
            "policies": "max_capacity",
            "orders": [{"name": order, "starvation": 1e9}],
        }
    )
    (candidate,) = create_candidates(run_setup(config)).values()
    policy, planner, setup, made = candidate
    return run(setup, policy, 0, planner=planner, order=made)


def test_hidden_states_forecast_nothing_before_the_prompt_is_computed() -> None:
    """Then a request is known by the lengths of others, and after a prefill instance by its own."""
    recorded = {"name": "replay", "recording": RECORDING}
    chunked, stage = {"kind": "chunked"}, {"kind": "stage", "instances": 4}
    by_age = {"name": "kaplan_meier"}

    def order(prefill: dict[str, Any], forecast: dict[str, Any]) -> list[int]:
        requests = replayed(prefill, forecast, "shortest").requests
        return requests.number[np.argsort(requests.placed, kind="stable")].tolist()

    assert order(chunked, recorded) == order(chunked, by_age)
    assert order(stage, recorded) != order(stage, by_age)


def test_orders_are_compared_and_varied() -> None:
    values = {
        "policies": "fcfs,jsq",
        "orders": ["fcfs", {"name": "boost", "label": "b"}],
        "seeds": 1,
    }
    config = read_config(values)
    labels = ["fcfs, fcfs", "fcfs, b", "jsq, fcfs", "jsq, b"]
    assert list(create_candidates(run_setup(config))) == labels
    found = groups(config, {"orders.b.gamma": [0.1, 0.2]})
    assert [group.policy for group in found] == 2 * labels
    assert found[1].cells[0].config["orders"] == [{"name": "boost", "gamma": 0.1}]
    assert len({cell.key for group in found for cell in group.cells}) == 6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"orders": "shortes"}, "orders.0: no order of service 'shortes'"),
        ({"orders": [{"name": "boost", "gamma": -1}]}, "orders.0: boost: gamma must be above 0"),
        ({"orders": "boost,boost"}, "orders"),
        (
            {"orders": "boost", "dispatch": "instant", "arrivals": {"kind": "poisson", "rate": 1}},
            "orders: with dispatch instant no request waits at the router",
        ),
    ],
)
def test_orders_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_candidates(run_setup(read_config(values)))


def test_an_order_needs_forecasts() -> None:
    setup = engine_setup(ONE, [(0.0, 1, 2)], NoForecast())
    with pytest.raises(ValueError, match=r"shortest needs forecasts.*or another order"):
        run(setup, create_policy("jsq"), 0, order=SHORTEST)
    assert run(setup, create_policy("jsq"), 0).requests.number.tolist() == [0]
