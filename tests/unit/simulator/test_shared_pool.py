"""A pool that accounts share: what each has had decides who goes next."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import ReferenceConfig
from simulated_cases import ListedTrace, Requests, engine_setup, reference_cases

from rescheduler.ordering import create_order
from rescheduler.ordering.fairness import OUTPUT_WEIGHT, slack
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import read_config
from rescheduler.simulator.forecasts.forecast_sources import ForecastSource, KaplanMeier, Oracle
from rescheduler.simulator.results.metrics import RunResult
from rescheduler.simulator.simulation import create_candidates, run, run_setup

ONE = ReferenceConfig(
    instances=1, slots=1, capacity=1000, clock="independent", dispatch="pool", pool_limit=100
)


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


@pytest.mark.parametrize(
    ("order", "dispatch", "message"),
    [
        ({"name": "fcfs", "fairness": 0.5}, "instant", "no request waits at the router"),
        ({"name": "fcfs", "fairness": 0.5}, "pool", "fcfs needs forecasts"),
        ({"name": "boost", "fairness": 1.5}, "pool", "boost: fairness must be .* at most 1"),
    ],
)
def test_fairness_that_cannot_be_is_refused(
    order: dict[str, object], dispatch: str, message: str
) -> None:
    values = {
        "orders": [order],
        "dispatch": dispatch,
        "arrivals": {"kind": "poisson", "rate": 1},
        "trace": {"name": "geometric", "requests": 5},
        "policies": "jsq",
        "forecast": {"name": "none"},
    }
    with pytest.raises(ValueError, match=message):
        (candidate,) = create_candidates(run_setup(read_config(values))).values()
        run(candidate.setup, candidate.policy, 0, order=candidate.order)
