"""STAR's planner: Algorithm 1 by hand, against plain Python, and what it never does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import profile_of
from migration_views import FREE, moved, view, views
from reference_planner import best_star_move

from rescheduler.migration import Plan, Star, create_migration_policy
from rescheduler.routing import Needs
from rescheduler.step_time.profile import BatchTime, write_profile


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
    with pytest.raises(ValueError, match=r"none\.yaml: no profile"):
        Star(profile=str(tmp_path / "none.yaml"))


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
    blind = type(seen)(
        **{name: getattr(seen, name) for name in seen.__slots__} | {"forecast": None}
    )
    assert isinstance(Star(prediction=False).plan(blind), Plan)
    with pytest.raises(ValueError, match="star needs forecasts"):
        Star().plan(blind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": -1}, "theta must be at least 0"),
        ({"beta": 1.5}, "beta must be at least 0 and at most 1, not 1.5"),
        ({"horizon": 0}, "horizon must be at least 1"),
        ({"horizon": 10, "stride": 4}, "multiple of stride"),
        ({"bandwidth": 0}, "bandwidth must be above 0"),
        ({"memory_share": 1.2}, "memory_share"),
        ({"underloaded": "all"}, "'below_mean' or 'paper', not 'all'"),
        ({"handshake": 1}, "star has no option 'handshake'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_migration_policy("star", **options)


def test_an_unknown_planner_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no migration policy 'magic'; known: star, survival"):
        create_migration_policy("magic")
