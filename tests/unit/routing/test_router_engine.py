"""Decisions at fixed intervals, and what a policy is shown of lengths."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import ReferenceConfig
from router_tasks import checkpoint, constant_layers, random_layers, small_setup
from routing_views import cluster
from simulated_cases import ByLength, Requests, engine_setup

from predictor.compilation import compiled
from rescheduler.routing import LearnedRouter, Needs, RoutingPolicy, create_policy
from rescheduler.routing.heuristics import JSQTokens
from rescheduler.routing.inputs import RoutingInputs
from rescheduler.simulator.results.metrics import RunResult
from rescheduler.simulator.simulation import run


def test_lengths_of_a_view_are_counted_by_bucket() -> None:
    # Each has generated 1 token: in all, 31 and 101 on the first, 1,001 on the second instance.
    view = cluster([[(50, 30.0), (60, 100.0)], [(70, 1000.0)], []], [(20, 5.0)])
    inputs = ByLength().inputs(view)
    assert inputs.by_length.tolist() == [[0, 0, 2], [0, 0, 1], [0, 0, 0]]
    assert inputs.soonest.tolist() == [30.0, 1000.0, 0.0]
    assert inputs.unanswered.tolist() == [0, 0, 0]


def decided(interval: float, arrivals: list[float]) -> RunResult:
    config = ReferenceConfig(instances=2, slots=64, clock="independent", dispatch="instant", a=0.5)
    requests: Requests = [(time, 3, 4) for time in sorted(arrivals)]
    return run(engine_setup(config, requests), create_policy("max_capacity", every=interval), 0)


@given(st.sampled_from([0.25, 0.5, 0.1]), st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_all_that_wait_are_placed_at_the_next_multiple_of_the_interval(
    interval: float, hundredths: list[int]
) -> None:
    result = decided(interval, [h / 100 for h in hundredths])
    due = np.ceil(result.requests.arrival / interval - 1e-6) * interval
    np.testing.assert_allclose(result.requests.placed, due, atol=1e-9)


def test_a_router_places_one_request_an_interval() -> None:
    to_least_loaded = LearnedRouter(checkpoint(constant_layers(2, 0)))
    result = run(small_setup(), to_least_loaded, seed=0)
    placed = np.sort(result.requests.placed)
    ticks = placed / 0.02
    np.testing.assert_allclose(ticks, np.rint(ticks), atol=1e-6)
    assert len(np.unique(np.rint(ticks))) == len(placed) == 40
    first_two = np.argsort(result.requests.placed)[:2]
    assert result.requests.instance[first_two].tolist() == [0, 1], "equal loads go to the lowest"


def test_a_router_that_would_rather_wait_sends_on_where_nothing_runs() -> None:
    waits = LearnedRouter(checkpoint(constant_layers(2, 2)))
    requests = run(small_setup(), waits, seed=0).requests
    order = np.argsort(requests.placed)
    assert (requests.placed[order][1:] >= requests.end[order][:-1]).all(), "one after the other"


@compiled
def nowhere(
    inputs: RoutingInputs, parameters: npt.NDArray[np.float64], target: npt.NDArray[np.int64]
) -> None:
    """Let everybody wait."""


@dataclass(frozen=True)
class Never(RoutingPolicy):
    """Places nobody, every second."""

    name = "never"
    needs = Needs.COUNTS
    kernel = nowhere

    def decide_every(self) -> float:
        return 1.0


def test_a_policy_that_lets_everybody_wait_forever_is_reported() -> None:
    with pytest.raises(RuntimeError, match="never leaves 40 requests waiting on an idle cluster"):
        run(small_setup(), Never(), seed=0)


def test_where_requests_wait_for_a_place_a_router_keeps_to_it() -> None:
    router = LearnedRouter(checkpoint(random_layers(2)))
    longest_step = 0.02 + 3.2e-4 * (1024 + 2 * 16)
    waits = {}
    for dispatch in ("pool", "instant"):
        requests = run(small_setup(dispatch=dispatch), router, seed=0).requests
        waits[dispatch] = (requests.start - requests.placed).max()
    assert waits["pool"] <= longest_step < waits["instant"]
    full = cluster([[(10, 3.0)] * 2, [(10, 3.0)] * 2], [(5, 2.0)], slots=2, capacity=1000)
    assert router.assign(full).instance.tolist() == [-1]


def test_deciding_at_intervals_is_refused_behind_a_barrier() -> None:
    setup = small_setup(clock="barrier")
    with pytest.raises(ValueError, match=r"max_capacity decides every 1 s.* clock: independent"):
        run(setup, create_policy("max_capacity", every=1.0), seed=0)


def test_a_reserve_is_kept_with_instant_dispatch_too() -> None:
    config = ReferenceConfig(
        instances=1, slots=64, clock="independent", dispatch="instant", a=0.5, capacity=100
    )
    setup = engine_setup(config, [(0.0, 40, 4), (0.1, 30, 4)])
    with pytest.raises(ValueError, match="max_capacity, as configured, lets requests wait"):
        run(setup, create_policy("max_capacity", reserve=0.4), seed=0)
    at_once = run(setup, create_policy("max_capacity", every=0.1), seed=0)
    assert at_once.requests.placed[1] < at_once.requests.end[0]
    waits = run(setup, create_policy("max_capacity", every=0.1, reserve=0.4), seed=0)
    assert waits.requests.placed[1] >= waits.requests.end[0]


def test_tokens_to_process_count_prompts_until_their_first_token() -> None:
    view = cluster([[(50, 30.0)], [(10, 40.0)]], [(20, 5.0)])
    assert JSQTokens().assign(view).instance.tolist() == [0]
    unread = replace(view, generated_tokens=np.array([0, 1]), prompt_tokens=np.array([50, 9]))
    assert JSQTokens().assign(unread).instance.tolist() == [1]


def test_a_configuration_without_lengths_is_refused() -> None:
    setup = small_setup(forecast={"name": "none"})
    with pytest.raises(ValueError, match="rl needs forecasts"):
        run(setup, LearnedRouter(checkpoint(random_layers(2))), seed=0)
