"""What `benchmarks.barrier` makes of its measurements."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.barrier.engines import contexts_at, read_steps
from benchmarks.barrier.findings import grid_figures, grid_table, ratio_of, routing_table, verdict
from benchmarks.barrier.fit import fits, observed
from benchmarks.barrier.grid import POINTS, Measured
from benchmarks.barrier.routing import asks_of
from benchmarks.support.report import Cells

Seconds = Callable[[float, float], float]


def points_of(seconds: Seconds) -> list[Measured]:
    """All points, with the time of a step as a function of the own load and the other's."""
    found = []
    for point in POINTS:
        requests = [float(load.requests) for load in point.loads]
        context = [float(load.requests * load.prompt) for load in point.loads]
        times = [seconds(*context), seconds(*context[::-1])]
        steps = [40.0 if n else 0.0 for n in requests]
        found.append(Measured(requests, context, times, [0.0, 0.0], steps))
    return found


def behind_a_barrier(own: float, other: float) -> float:
    return 0.02 + 3e-6 * max(own, other) + 1e-6 * (own + other) / 2


def on_their_own(own: float, other: float) -> float:
    return 0.02 + 3e-6 * own + 2e-7 * other


def test_the_fits_find_what_steps_were_made_of() -> None:
    ranks = fits(observed(points_of(behind_a_barrier)))
    found = ranks["max and mean"]
    assert found.coefficients == pytest.approx({"constant": 0.02, "max": 3e-6, "mean": 1e-6})
    assert found.r2 == pytest.approx(1.0)
    simulator = ranks["simulator"]
    expected = {"constant": 0.02, "new": 0.0, "max": 3e-6, "mean": 1e-6}
    assert simulator.coefficients == pytest.approx(expected, abs=1e-9)
    assert ranks["own"].error > 0.05
    lone = fits(observed(points_of(on_their_own)))
    expected = {"constant": 0.02, "own": 3e-6, "other": 2e-7}
    assert lone["own and other"].coefficients == pytest.approx(expected)
    assert lone["max and mean"].error > lone["own and other"].error


def test_the_simulators_model_knows_which_engine_is_slowest() -> None:
    """Two long requests read more than six short ones, which compute more."""

    def seconds(new: float, context: float, new_there: float, context_there: float) -> float:
        slowest = max(2e-3 * new + 1e-6 * context, 2e-3 * new_there + 1e-6 * context_there)
        return 0.01 + slowest

    found = []
    for point in points_of(behind_a_barrier):
        (a, b), (x, y) = point.requests, point.context
        both = seconds(a, x, b, y)
        found.append(Measured([a, b], [x, y], [both, both], [0.0, 0.0], point.steps))
    simulator = fits(observed(found))["simulator"]
    expected = {"constant": 0.01, "new": 2e-3, "max": 1e-6, "mean": 0.0}
    assert simulator.coefficients == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert simulator.r2 == pytest.approx(1.0)


def test_the_verdict_tells_ranks_that_wait_from_engines_that_do_not() -> None:
    waiting, alone = points_of(behind_a_barrier), points_of(on_their_own)
    found = verdict({"ranks": waiting, "lone": alone})
    assert "Ranks of a group step together" in found
    assert "Ranks go by the fullest" in found
    found = verdict({"ranks": alone, "lone": alone})
    assert "Ranks of a group do NOT step together" in found
    assert "Ranks go by their OWN load" in found


def test_all_points_are_shown_and_no_figure_is_missing() -> None:
    grids = {"ranks": points_of(behind_a_barrier), "lone": points_of(on_their_own)}
    assert len(grid_table(grids).splitlines()) == 2 + len(POINTS)
    assert np.isfinite(list(grid_figures(grids).values())).all()


def test_a_ratio_is_of_the_same_rounds() -> None:
    ratio = ratio_of({0: 2.0, 1: 8.0, 2: 400.0}, {0: 1.0, 1: 4.0})
    assert ratio == pytest.approx((2.0, 2.0, 2.0))
    names = ("throughput", "tpot_mean", "tpot_p99", "ttft_mean", "step_mean", "fullest")
    rounds = {
        arm: {i: dict.fromkeys(names, speed * (1.0 + i)) for i in range(3)}
        for arm, speed in (("vllm", 1.0), ("bfio", 1.5))
    }
    assert "| 1.500 (1.500 to 1.500) |" in routing_table(rounds)


def test_every_round_asks_for_requests_of_its_own_again_and_again() -> None:
    assert asks_of(1, 20) == asks_of(1, 20) != asks_of(2, 20)
    assert sum(ask.prompt > 1_000 for ask in asks_of(1, 20)) == 10


def test_a_line_that_is_being_written_is_no_step_yet(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.csv"
    assert len(read_steps(log).begins) == 0
    log.write_text("1.0,2,2,100\n2.0,2,2,102\n2.5,3,9,110\n3.5,0,0,0\n4.5,1,1,5")
    steps = read_steps(log)
    assert steps.seconds(2).tolist() == [1.0, 0.5]
    assert contexts_at(steps, np.array([0.5, 1.0, 2.7, 9.0])).tolist() == [0.0, 100.0, 110.0, 0.0]


def test_results_of_other_settings_are_measured_again(tmp_path: Path) -> None:
    Cells(tmp_path, {"steps": 40}).write("a", [1.0])
    assert Cells(tmp_path, {"steps": 40}).read("a") == [1.0]
    assert Cells(tmp_path, {"steps": 41}).read("a") is None
    assert Cells(tmp_path, {"steps": 40}).read("b") is None
