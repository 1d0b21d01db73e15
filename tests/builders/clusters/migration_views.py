"""Clusters as migration planners see them: worked by hand, and drawn at random."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from routing_views import cluster, view_of

from predictor.forecasts.forecast import PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import CANNOT_MOVE, NEVER_MOVED, UNLIMITED, ClusterView
from rescheduler.migration import Plan

FREE: dict[str, Any] = {"handshake_seconds": 0.0, "bandwidth": 1e15}
"""Moves that take next to no time."""


def view(*instances: Sequence[tuple[int, float]], **options: Any) -> ClusterView:
    """Instances of requests of (context tokens, tokens to come)."""
    return cluster(instances, [], **options)


def moved(plan: Plan) -> list[tuple[int, int, int]]:
    return [(m.request, m.source, m.target) for m in plan.migrations]


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """A small cluster with memory and slots that may be tight, with curves or point forecasts."""
    g = draw(st.integers(2, 5))
    n = draw(st.integers(0, 14))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    edges = np.array([0, 1, 2, 4, 8, 16, 64, 400])
    forecast: Any = PointForecast.new(generator.integers(1, 40, n).astype(np.float64))
    if draw(st.booleans()):
        hazard = generator.uniform(0.005, 0.4, (n, 1))
        forecast = SurvivalForecast.new(edges, (1 - hazard) ** edges)
        forecast = forecast.aged(generator.integers(0, 6, n)).capped(generator.integers(1, 300, n))
    instance = generator.integers(0, draw(st.integers(1, g)), n)
    prompt, generated = generator.integers(0, 200, n), generator.integers(1, 60, n)
    load = np.bincount(instance, weights=prompt + generated, minlength=g).astype(np.int64)
    room = draw(st.sampled_from([0, 60, 400, int(UNLIMITED)]))
    since = generator.choice([0, 3, 50, int(NEVER_MOVED), int(CANNOT_MOVE)], n)
    return view_of(
        np.bincount(instance, minlength=g) + draw(st.integers(0, 2)),
        instance,
        prompt,
        kv_capacity=load + generator.integers(0, room + 1, g),
        generated_tokens=generated,
        forecast=forecast,
        since_move=since if draw(st.booleans()) else None,
    )
