"""Migration planners in the simulator: what they are shown, and what comes of their plans."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rescheduler.migration import Star, Survival
from rescheduler.migration.policy import migration_inputs
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import SimulationConfig, read_config
from rescheduler.simulator.engine.routing_inputs import simulated_migration_inputs
from rescheduler.simulator.forecasts.forecast_sources import create_forecast
from rescheduler.simulator.results.metrics import RunResult, run_metrics
from rescheduler.simulator.simulation import RunSetup, Simulation, create_candidates, run, run_setup

CAPACITY = 8000
COSTS: dict[str, Any] = {
    "handshake_seconds": 0.01,
    "bandwidth": 1e9,
    "kv_bytes_per_token": 10_000.0,
    "step_seconds": 0.02,
}
BALANCES: dict[str, Any] = {"tolerance": 1.0, "crowded": 100.0}  # whatever that does to memory


def config(**changes: Any) -> SimulationConfig:
    """Four instances whose requests differ widely, under a load that fills them by half."""
    trace = {"name": "lognormal", "requests": 300, "output_sigma": 1.5, "output_max": 2000}
    values: dict[str, Any] = {
        "cluster": {"instances": 4, "slots": 40, "kv_capacity": CAPACITY},
        "clock": "independent",
        "dispatch": "instant",
        "step_time": {"name": "batch", "a": 0.01, "b": 1e-5, "c": 1e-5},
        "transfer": {"gigabits_per_second": 8, "bytes_per_token": 10_000},
        "trace": trace | {"prompt_max": 900},
        "arrivals": {"kind": "poisson", "rate": 1.2},
        "policies": ["jsq"],
        "seeds": 1,
    }
    return read_config(values | changes)


def simulate(planner: Any, forecast: dict[str, Any] | None = None) -> RunResult:
    setup = run_setup(config(forecast=forecast or {"name": "oracle"}))
    return run(setup, create_policy("jsq"), 0, planner=planner)


@pytest.mark.parametrize(
    "forecast",
    [{"name": "oracle"}, {"name": "noisy", "sigma": 1.0}, {"name": "kaplan_meier"}],
    ids=lambda forecast: str(forecast["name"]),
)
@pytest.mark.parametrize("points", [[0], [0, 1, 2, 3, 4], [0, 8, 16, 24, 400]])
def test_the_engine_has_the_inputs_of_its_view(forecast: dict[str, Any], points: Any) -> None:
    at = np.array(points)
    simulation = Simulation(run_setup(config(forecast=forecast)), create_policy("jsq"), 0)
    moved = 0
    for until in (5.0, 20.0, 45.0, 70.0):
        simulation.advance(until)
        parts, view = simulation.engine, simulation.view()
        shown, _ = simulated_migration_inputs(parts.rules, simulation.forecast, parts.cluster, at)
        seen = migration_inputs(view, at)
        assert view.since_move is not None
        movable = np.flatnonzero(view.since_move >= 0)
        numbers = simulation.running_numbers()[movable]
        for name in ("load", "room", "free", "points"):
            np.testing.assert_array_equal(getattr(shown, name), getattr(seen, name), name)
        for name in ("source", "context", "since_move"):
            np.testing.assert_array_equal(getattr(shown, name), getattr(seen, name)[movable], name)
        np.testing.assert_allclose(shown.ahead, seen.ahead, rtol=1e-6)
        np.testing.assert_allclose(shown.spread, seen.spread, rtol=1e-5, atol=1e-3)
        steps = np.arange(len(movable), dtype=np.float64)
        one = shown.forecasts_of(np.arange(len(movable)), steps)
        other = seen.forecasts_of(movable, steps)
        np.testing.assert_allclose(one.survival, other.survival, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(one.remaining, other.remaining, rtol=1e-6)
        np.testing.assert_allclose(one.outlives, other.outlives, rtol=1e-6, atol=1e-9)
        for number, source in zip(numbers[:2], shown.source[:2], strict=False):
            simulation.migrate(int(number), int(source + 1) % 4)
            moved += 1
        simulation.advance(until + 1.0)  # they are on their way, or have arrived
    assert moved == 8
    assert simulation.result("").migrations > 0


@pytest.mark.parametrize("make", [partial(Star, prediction=False), Star, Survival])
def test_planners_balance_the_instances(make: Any) -> None:
    nobody, moved = simulate(None), simulate(make(**BALANCES, **COSTS))
    assert nobody.migrations == nobody.plans == 0
    assert moved.migrations > 0
    assert moved.execution_variance < 0.7 * nobody.execution_variance
    assert moved.preemptions <= nobody.preemptions
    for name in ("number", "prompt", "output"):
        assert sorted(getattr(moved.requests, name)) == sorted(getattr(nobody.requests, name))
    assert moved.tokens == nobody.tokens
    assert moved.requests.migrations.sum() == moved.migrations == moved.series.migrations[-1]


def test_without_forecasts_only_planners_that_need_none_run() -> None:
    assert simulate(Star(prediction=False, **COSTS), {"name": "none"}).migrations > 0
    with pytest.raises(ValueError, match="survival needs forecasts, but"):
        simulate(Survival(**COSTS), {"name": "none"})


def test_execution_variance_is_that_of_the_step_times() -> None:
    setup = run_setup(config(step_time={"name": "batch", "a": 0.01, "b": 0.0, "c": 1e-5}))
    result = run(setup, create_policy("jsq"), 0)
    # Steps take 10 ms and 10 µs a token: the variance is (10 µs)² times that of the loads.
    expected = 1e-10 * result.series.load.var(axis=1)
    np.testing.assert_allclose(result.series.execution_variance, expected, rtol=1e-6, atol=1e-15)
    assert result.series.execution_variance.max() > result.execution_variance > 0
    assert run_metrics(result)["execution_variance"] == result.execution_variance
    assert run_metrics(result)["kv_peak"] == result.most_held == result.series.held.max()


def test_a_run_ends_at_max_seconds() -> None:
    whole = simulate(None)
    half = run(run_setup(config(max_seconds=50.0)), create_policy("jsq"), 0)
    assert half.seconds <= 50.0 < whole.seconds
    assert 0 < len(half.requests.number) < len(whole.requests.number)
    ended = whole.requests.end <= 50.0
    np.testing.assert_array_equal(half.requests.number, whole.requests.number[ended])


def migration(*planners: Any, **options: Any) -> dict[str, Any]:
    return {"migration": {"planners": list(planners), **options}}


def candidates(**changes: Any) -> dict[str, Any]:
    return create_candidates(run_setup(config(**changes)))


def test_every_policy_is_compared_with_every_planner() -> None:
    star = {"name": "star", "label": "blind", "prediction": False}
    assert list(candidates(**migration("none", star))) == ["none", "blind"]
    assert list(candidates(policies=["jsq", "fcfs"])) == ["jsq", "fcfs"]
    both = candidates(policies=["jsq", "fcfs"], **migration("none", star))
    assert list(both) == ["jsq, none", "jsq, blind", "fcfs, none", "fcfs, blind"]
    assert both["fcfs, none"].planner is None
    assert both["fcfs, blind"].policy.name == "fcfs"


def test_a_planner_has_the_transfers_costs_and_may_have_its_own_forecasts() -> None:
    star = {"name": "star", "bandwidth": 5.0, "forecast": {"name": "noisy", "sigma": 2.0}}
    made = candidates(**migration("survival", star))
    planner = made["survival"].planner
    assert (planner.bandwidth, planner.kv_bytes_per_token) == (1e9, 10_000)
    assert planner.handshake_seconds == 0.01
    assert made["star"].planner.bandwidth == 5.0
    assert made["star"].setup.forecast == create_forecast("noisy", sigma=2.0)
    assert made["survival"].setup.forecast == create_forecast("oracle")


def test_plans_are_made_every_interval_of_the_mean_instance() -> None:
    setup = run_setup(config(**migration("none", interval=50)))
    result = run(setup, create_policy("jsq"), 0, planner=Star(**COSTS))
    steps = result.plans * 50 * 4
    sparse: RunSetup = replace(setup, config=config(**migration("none", interval=100)))
    fewer = run(sparse, create_policy("jsq"), 0, planner=Star(**COSTS))
    assert steps > 0
    assert 0.4 * result.plans < fewer.plans < 0.6 * result.plans
