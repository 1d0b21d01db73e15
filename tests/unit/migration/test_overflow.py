"""What planners know of memory: nothing moves to where it overflows, nor where all is full."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from migration_views import FREE, moved, view, views
from reference_planner import Seen
from routing_views import view_of

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.migration import Star, Survival
from rescheduler.migration.overflow import overflow_probabilities
from rescheduler.migration.policy import migration_inputs

QUICK: dict[str, Any] = FREE | {"horizon": 8, "theta": 0.0}
PLANNERS = st.sampled_from([Star, Survival])
EITHER = pytest.mark.parametrize("kind", [Star, Survival])


def test_the_probability_is_near_that_of_requests_drawn_at_random() -> None:
    generator = np.random.default_rng(0)
    n, edges = 40, np.arange(200)
    context, hazard = generator.integers(50, 400, n), generator.uniform(0.001, 0.02, (n, 1))
    survival = (1 - hazard) ** edges
    forecast = SurvivalForecast.new(edges, survival)
    seen = view_of([n], [0] * n, context, kv_capacity=np.array([9000]), forecast=forecast)
    inputs, limits = migration_inputs(seen, np.array([0, 60])), [6000.0, 6500.0, 7000.0, 7500.0]
    runs = generator.random((20_000, n)) < survival[:, 60]
    load = np.where(runs, context + 60, 0).sum(axis=1)
    for limit in limits:
        ahead, spread = inputs.ahead[:, 1:], inputs.spread[:, 1:]
        (found,) = overflow_probabilities(ahead, spread, np.array([limit]))
        assert found == pytest.approx((load > limit).mean(), abs=0.03)
    # The load now is certain, and the likelier of the two points counts.
    assert overflow_probabilities(inputs.ahead, inputs.spread, inputs.ahead[:, 0] - 1) == [1.0]


@given(views(), PLANNERS, st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([0.5, 100.0]))
def test_no_move_makes_an_overflow_likelier(
    cluster: ClusterView, kind: Any, tolerance: float, crowded: float
) -> None:
    planner = kind(**QUICK, tolerance=tolerance, crowded=crowded)
    plan, seen = planner.plan(cluster), Seen(cluster, planner)
    after = cluster.instance.copy()
    for move in plan.migrations:
        after[move.request] = move.target
    targets = np.isin(np.arange(cluster.n_instances), [move.target for move in plan.migrations])
    before, then = seen.overflow(cluster.instance), seen.overflow(after)
    # A source only loses load; the normal approximation says so while it has more room than load.
    checked = targets | (before < 0.5)
    assert (then <= before + tolerance + 1e-9)[checked].all()
    assert (seen.loads(after) <= seen.loads(cluster.instance) + 1e-9)[~targets].all()


@given(views(), PLANNERS, st.sampled_from([0.3, 0.6, 0.8]))
def test_nothing_moves_in_a_crowded_cluster(
    cluster: ClusterView, kind: Any, crowded: float
) -> None:
    if cluster.kv_load.sum() > crowded * cluster.kv_capacity.sum():
        assert not kind(**QUICK, crowded=crowded).plan(cluster).migrations


@EITHER
def test_nothing_moves_for_balance_where_all_are_nearly_full(kind: Any) -> None:
    seen = view([(10, 3), (80, 90)], [(81, 90)], [(73, 90)], capacity=100)
    quick = QUICK | {"horizon": 2}
    made = kind(**quick).plan(seen)
    assert not made.migrations
    assert "81% of the cluster's KV capacity is taken: it is crowded" in made.reason
    assert moved(kind(**quick, crowded=100.0).plan(seen)) == [(0, 0, 2)]


@EITHER
def test_the_one_full_instance_gives_away_where_others_have_room(kind: Any) -> None:
    seen = view([(8, 5), (91, 90)], [(68, 90)], [(72, 90)], capacity=100)
    assert moved(kind(**QUICK | {"horizon": 2}).plan(seen)) == [(0, 0, 1)]


@EITHER
def test_nothing_moves_to_where_it_will_overflow(kind: Any) -> None:
    # 28 tokens and five to come fit beside 60 now; in four steps 72 and 32 are above 95.
    seen = view([(28, 5), (66, 90)], [(20, 90), (20, 90), (20, 90)], capacity=100)
    always = QUICK | {"horizon": 4, "crowded": 100.0}
    assert moved(kind(**always, tolerance=1.0).plan(seen)) == [(0, 0, 1)]
    assert not kind(**always).plan(seen).migrations
