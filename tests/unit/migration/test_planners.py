"""The planners: by hand, against plain Python, and what they never do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import profile_of
from migration_views import FREE, moved, view, views
from reference_planner import best_star_move, survival_moves

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.migration import Plan, Star, Survival, create_migration_policy
from rescheduler.routing import Needs
from rescheduler.step_time.profile import BatchTime, write_profile

TOLERANCES, CROWDED = st.sampled_from([0.0, 0.05, 1.0]), st.sampled_from([0.3, 0.8, 100.0])


def plan(seen: Any, **options: Any) -> Plan:
    return Star(**(FREE | {"theta": 0.0} | options)).plan(seen)


def test_without_prediction_the_loads_now_are_balanced() -> None:
    # 19 and 5 tokens: Var = 49. Moving 10, 5 or 4 leaves 9 : 15, 14 : 10 or 15 : 9.
    seen = view([(10, 9), (5, 9), (4, 9)], [(5, 9)])
    made = plan(seen, prediction=False)
    assert moved(made) == [(1, 0, 1)]
    assert made.migrations[0].gain == pytest.approx(1 - 4 / 49)
    assert "92%" in made.reason or "91.8%" in made.reason


def test_prediction_passes_over_a_request_that_is_about_to_end() -> None:
    # Loads at h = 0, 1, 2: 19, 16, 18 and 5, 6, 7, so that the variances are 49 + 25 + 30.25.
    # The 5 tokens are gone after a step: moving them leaves 4 + 25 + 30.25, moving the 4 tokens
    # leaves 15, 11, 12 and 9, 11, 13: 9 + 0 + 0.25; moving the 10 leaves 9 + 36 + 42.25.
    seen = view([(5, 1), (4, 10), (10, 10)], [(5, 10)])
    ahead = plan(seen, horizon=2, beta=1.0)
    assert moved(ahead) == [(1, 0, 1)]
    assert ahead.migrations[0].gain == pytest.approx(1 - 9.25 / 104.25)
    assert moved(plan(seen, prediction=False)) == [(0, 0, 1)]


def test_a_profile_says_how_long_a_step_is(tmp_path: Path) -> None:
    # A move of 0.11 s is more than the 5 steps left of 0.02 s, and less than one of the profile's.
    write_profile(profile_of(BatchTime(0.2, 1e-3, 1e-3)), tmp_path / "profile.yaml")
    costs = {"handshake_seconds": 0.11, "step_seconds": 0.02, "horizon": 4}
    seen = view([(5, 5), (5, 5)], [(1, 5)])
    assert not plan(seen, **costs).migrations
    assert plan(seen, **costs, profile=str(tmp_path / "profile.yaml")).migrations


def test_what_the_view_says_of_a_step_counts_before_the_option() -> None:
    costs = {"handshake_seconds": 0.11, "step_seconds": 0.02, "horizon": 4}
    seen = view([(5, 5), (5, 5)], [(1, 5)])
    assert not plan(replace(seen, step_seconds=0.02), **costs).migrations
    assert plan(replace(seen, step_seconds=0.2), **costs).migrations


def test_a_request_must_outlast_its_move() -> None:
    # The move takes 0.06 s and 5 tokens at 100 tokens/s, which are 5.5 steps of 0.02 s.
    costs = {
        "handshake_seconds": 0.06,
        "bandwidth": 100.0,
        "kv_bytes_per_token": 1.0,
        "step_seconds": 0.02,
    }
    short = view([(5, 5), (5, 5)], [(1, 5)])
    made = plan(short, horizon=4, **costs)
    assert not made.migrations
    assert "outlasts" in made.reason
    assert len(plan(view([(5, 6), (5, 6)], [(1, 6)]), horizon=4, **costs).migrations) == 1


def test_memory_counts_the_context_that_comes_along() -> None:
    # The target holds 10 of 100 tokens (95 of them may be used); 40 tokens with 60 to come.
    seen = view([(40, 60), (45, 99)], [(10, 99)], capacity=100)
    made = plan(seen, horizon=4)
    assert not made.migrations
    assert "fits" in made.reason and "85" in made.reason
    assert moved(plan(seen, horizon=4, memory="paper")) == [(0, 0, 1)]


def test_nothing_moves_where_no_slot_is_free() -> None:
    made = plan(view([(9, 9), (9, 9)], [(1, 9)], slots=[9, 1]), prediction=False)
    assert not made.migrations
    assert "free slot" in made.reason


@given(views(), st.sampled_from([1, 4]), st.sampled_from([0.9, 1.0]), st.data())
def test_the_move_is_the_best_of_all(
    seen: Any, stride: int, beta: float, data: st.DataObject
) -> None:
    star = Star(
        horizon=8,
        stride=stride,
        beta=beta,
        theta=data.draw(st.sampled_from([0.0, 0.2])),
        prediction=data.draw(st.booleans()),
        underloaded=data.draw(st.sampled_from(["below_mean", "paper"])),
        memory=data.draw(st.sampled_from(["whole", "paper"])),
        handshake_seconds=0.02,
        bandwidth=1e9,
        tolerance=data.draw(TOLERANCES),
        crowded=data.draw(CROWDED),
    )
    made = star.plan(seen)
    left, best = best_star_move(seen, star)
    if made.migrations:
        (move,) = made.migrations
        assert 1 - move.gain == pytest.approx(left, rel=1e-6, abs=1e-9)
        assert (move.request, move.target) in best or move.gain < 1e-6
    else:
        assert left > 1 - 1e-6
    assert made.reason


def test_what_it_needs_of_the_cluster() -> None:
    assert Star().needs == Needs.FORECASTS
    assert Star(prediction=False).needs == Needs.LOADS
    seen = view([(5, 5)], [(1, 1)])
    blind = replace(seen, forecast=None)
    assert isinstance(Star(prediction=False).plan(blind), Plan)
    with pytest.raises(ValueError, match="star needs forecasts"):
        Star().plan(blind)


@given(views(), st.sampled_from([1, 4]), st.sampled_from([1, 4]), st.data())
def test_the_moves_are_the_best_one_after_the_other(
    seen: ClusterView, stride: int, moves: int, data: st.DataObject
) -> None:
    planner = Survival(
        horizon=8,
        stride=stride,
        moves=moves,
        payback=data.draw(st.sampled_from([0.0, 5.0])),
        handshake_seconds=0.01,
        bandwidth=1e9,
        tolerance=data.draw(TOLERANCES),
        crowded=data.draw(CROWDED),
    )
    made, tried = planner.plan(seen), survival_moves(seen, planner)
    gains = [move.gain for move in made.migrations]
    assert gains == pytest.approx([gain for _, _, gain in tried], rel=1e-6, abs=1e-9)
    assert made.reason


def test_a_move_that_costs_more_than_it_brings_is_not_made() -> None:
    seen = view([(101, 30), (5, 30)], [(99, 30)])
    cheap = Survival(**FREE, horizon=4, theta=0.0).plan(seen)
    dear = Survival(handshake_seconds=0.05, bandwidth=1e15, horizon=4, theta=0.0).plan(seen)
    assert len(cheap.migrations) == 1
    assert not dear.migrations
    assert "pay for itself" in dear.reason


def test_all_requests_above_the_mean_have_just_moved() -> None:
    seen = replace(view([(90, 90), (90, 90)], [(1, 90)]), since_move=np.array([0, 2, 0]))
    assert "within their pay-back" in Survival().plan(seen).reason


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("star", {"theta": -1}, "theta must be at least 0"),
        ("star", {"beta": 1.5}, "beta must be at least 0 and at most 1, not 1.5"),
        ("star", {"horizon": 0}, "horizon must be at least 1"),
        ("star", {"horizon": 10, "stride": 4}, "multiple of stride"),
        ("star", {"bandwidth": 0}, "bandwidth must be above 0"),
        ("star", {"memory_share": 1.2}, "memory_share"),
        ("star", {"underloaded": "all"}, "'below_mean' or 'paper', not 'all'"),
        ("star", {"handshake": 1}, "star has no option 'handshake'"),
        ("star", {"profile": "none.yaml"}, r"none\.yaml: no profile"),
        ("survival", {"payback": -1.0}, "payback must be at least 0"),
        ("survival", {"load_share": 0.0}, "load_share"),
        ("survival", {"crowded": 0.0}, "crowded must be above 0"),
        ("star", {"tolerance": 1.5}, "tolerance must be at least 0 and at most 1"),
        ("survival", {"moves": 0}, "moves must be at least 1"),
        ("survival", {"beta": 0.0}, "beta must be above 0"),
        ("magic", {}, "no migration policy 'magic'; known: star, survival"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_migration_policy(name, **options)
