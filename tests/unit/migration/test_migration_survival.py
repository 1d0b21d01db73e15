"""The survival planner: against plain Python, and what it never does."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from migration_views import FREE, view, views
from reference_planner import survival_moves

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.migration import Survival, create_migration_policy


def with_fields(seen: ClusterView, **changes: Any) -> ClusterView:
    return ClusterView(**{name: getattr(seen, name) for name in seen.__slots__} | changes)


@given(views(), st.sampled_from([1, 4]), st.sampled_from([1, 4]), st.sampled_from([0.0, 5.0]))
def test_the_moves_are_the_best_one_after_the_other(
    seen: ClusterView, stride: int, moves: int, payback: float
) -> None:
    planner = Survival(
        horizon=8,
        stride=stride,
        moves=moves,
        payback=payback,
        handshake_seconds=0.01,
        bandwidth=1e9,
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
    seen = with_fields(view([(90, 90), (90, 90)], [(1, 90)]), since_move=np.array([0, 2, 0]))
    assert "within their pay-back" in Survival().plan(seen).reason


def test_a_cluster_that_is_full_as_a_whole_may_be_left_alone() -> None:
    seen = view([(50, 90), (30, 90)], [(1, 90)], capacity=200)  # 81 of 400 tokens
    assert Survival(**FREE, horizon=4, crowded=0.21).plan(seen).migrations
    made = Survival(**FREE, horizon=4, crowded=0.2).plan(seen)
    assert not made.migrations
    assert "20% of the cluster's KV capacity is taken" in made.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"payback": -1.0}, "payback must be at least 0"),
        ({"load_share": 0.0}, "load_share"),
        ({"crowded": 0.0}, "crowded must be above 0"),
        ({"moves": 0}, "moves must be at least 1"),
        ({"beta": 0.0}, "beta must be above 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_migration_policy("survival", **options)
