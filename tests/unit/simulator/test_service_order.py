"""A pool that is served in order, and one that accounts share, in the simulator."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import ReferenceConfig
from simulated_cases import (
    InPython,
    ListedTrace,
    Requests,
    assert_decided_alike,
    engine_setup,
    reference_cases,
)

from rescheduler.ordering import ServiceOrder, create_order
from rescheduler.ordering.fairness import OUTPUT_WEIGHT, slack
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import read_config
from rescheduler.simulator.experiments.workers import groups
from rescheduler.simulator.forecasts.forecast_sources import ForecastSource, KaplanMeier, Oracle
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
    asked = run(setup, InPython(create_policy("jsq_load")), 0, order=order)
    assert_decided_alike(compiled, asked)
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


# A pool that accounts share: what each has had decides who goes next.


def shared(
    requests: Requests,
    clients: list[int],
    fairness: float,
    name: str = "fcfs",
    config: ReferenceConfig = ONE,
    forecast: ForecastSource | None = None,
) -> RunResult:
    setup = engine_setup(config, requests, forecast or Oracle())
    setup = replace(setup, trace=ListedTrace(requests, clients=clients))
    return run(setup, create_policy("jsq"), 0, order=create_order(name, fairness=fairness))


def senders(result: RunResult) -> list[int]:
    """Return whose requests were placed, one after the other."""
    requests = result.requests
    return requests.client[np.lexsort((requests.number, requests.placed))].tolist()


def test_a_flood_does_not_keep_others_out() -> None:
    requests: Requests = [(0.0, 1, 5)] * 20 + [(0.5, 1, 5)] * 4
    clients = [0] * 20 + [1] * 4
    assert senders(shared(requests, clients, 0.0)) == clients
    assert senders(shared(requests, clients, 1.0))[1:9] == [1, 0, 1, 0, 1, 0, 1, 0]
    half = senders(shared(requests, clients, 0.5))
    assert half[:9] == [0, 0, 1, 0, 1, 0, 1, 0, 1], "at most a request ahead"


def test_nobody_saves_up_service_for_later() -> None:
    """The second client comes when the first has been served alone for long."""
    requests: Requests = [(0.0, 1, 5)] * 40 + [(60.5, 1, 5)] * 10
    placed = senders(shared(requests, [0] * 40 + [1] * 10, 1.0))
    assert placed.index(1) in (13, 14)
    assert placed[14:22].count(1) == 4


def test_an_account_pays_for_what_its_requests_have_truly_taken() -> None:
    """Both have the same forecasts; the first client's requests take ten times as much."""
    requests: Requests = [(0.0, 1, (40, 4)[i % 2]) for i in range(100)]
    placed = senders(shared(requests, [i % 2 for i in range(100)], 1.0, forecast=KaplanMeier()))
    assert placed[:33].count(1) >= 28


def test_one_holds_back_others_only_where_it_goes_first() -> None:
    """The second is long overdue, and has no room until the first has ended at 400 s.

    The second client has had less. Its cheaper request goes first and has no room either; the
    other one has.
    """
    requests: Requests = [(0.0, 500, 400), (1.0, 900, 5), (250.0, 600, 5), (250.0, 50, 100)]
    config = replace(ONE, slots=4)

    def placed(fairness: float) -> float:
        result = shared(requests, [0, 0, 1, 1], fairness, "boost", config)
        return float(result.requests.placed[result.requests.number == 3][0])

    assert placed(0.0) >= 400
    assert placed(1.0) == 250


@given(
    reference_cases(drift=(1,)),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from(["fcfs", "boost", "shortest"]),
)
def test_one_client_is_served_as_without_fairness(
    case: tuple[ReferenceConfig, Requests], fairness: float, name: str
) -> None:
    config, requests = case
    setup = engine_setup(config, requests)
    if setup.config.dispatch == "instant":
        return
    plain, fair = (
        run(setup, create_policy("jsq_load"), 0, order=create_order(name, fairness=amount))
        for amount in (0.0, fairness)
    )
    for field in plain.requests._fields:
        np.testing.assert_array_equal(
            getattr(plain.requests, field), getattr(fair.requests, field), err_msg=field
        )


SENT = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 8), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)


@given(SENT, st.sampled_from([0.2, 0.5, 0.9, 1.0]))
def test_whoever_goes_next_is_whom_the_definition_names(
    sent: list[tuple[int, int, int, int]], fairness: float
) -> None:
    """One place, exact forecasts: the accounts are kept here again, placement by placement."""
    sent.sort(key=lambda request: request[0])
    clients = [client for *_, client in sent]
    result = shared([(0.5 * at, p, o) for at, p, o, _ in sent], clients, fairness).requests
    by_number = np.argsort(result.number)
    end, placed = result.end[by_number], result.placed[by_number]
    service = [p + OUTPUT_WEIGHT * o for _, p, o, _ in sent]
    served, lifted_to = dict.fromkeys(clients, 0.0), 0.0
    come, gone = 0, set[int]()
    for number in np.argsort(placed, kind="stable").tolist():
        now = placed[number]
        while come < len(sent) and 0.5 * sent[come][0] <= now:
            client = clients[come]
            if client not in {clients[i] for i in range(come) if i not in gone}:
                served[client] = max(served[client], lifted_to)
            come += 1
        waiting = [i for i in range(come) if i not in gone]
        ended = [service[i] for i in gone if end[i] <= now]
        mean = float(np.mean(ended or [service[i] for i in waiting]))
        least = min(served[clients[i]] for i in waiting)
        allowed = least + slack(fairness, 1.0) * mean
        assert number == next(i for i in waiting if served[clients[i]] <= allowed)
        lifted_to = max(lifted_to, least)
        served[clients[number]] += service[number]
        gone.add(number)
