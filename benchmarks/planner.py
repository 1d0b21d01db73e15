"""How long the migration planners take to decide.

    python -m benchmarks.planner [--quick] --json OUT

256, 32 and 8 instances with 64 requests each on average, placed at random, so that many instances
are overloaded and the search is wide; contexts lognormal, of 900 tokens on average; a look at
every step to H = 128; a survival curve of 57 edges a request, its hazard lognormal around 1/300
a token (``_point``: the true lengths instead, as STAR's regressor gives them).

``decision_ms_256`` is a decision on loads that are added up already, as STAR's workers report
them, the dearer of the two planners: from the arrays to the plan with its reason, the curves of
the requests that may move read on the way. ``plan_ms`` is the whole of it, from the view of the
cluster to the plan, which ``aggregate_ms`` of adding up the loads ahead is part of. Medians of
this thread's CPU time, with compiled code in place.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.support.report import arguments, report
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.migration import create_migration_policy
from rescheduler.migration.policy import migration_inputs

REQUESTS, HORIZON, MEAN_LENGTH = 64, 128, 300
AGE = 20  # tokens since a forecast, at most


def main() -> None:
    options = arguments("time of a migration planner's decision").parse_args()
    figures: dict[str, float] = {}
    for n_instances in (8, 32, 256):
        for kind, curves in (("", True), ("_point", False)):
            figures |= times(n_instances, curves, kind, 3 if options.quick else 25)
        figures[f"decision_ms_{n_instances}"] = max(
            figures[f"{name}_decision_ms_{n_instances}"] for name in ("star", "survival")
        )
    report("planner", figures, options.json)


def times(n_instances: int, curves: bool, kind: str, repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in ("star", "survival"):
        planner = create_migration_policy(name, horizon=HORIZON)
        aggregate, decision, plan = [], [], []
        for seed in range(repeats):
            view = cluster(np.random.default_rng(seed), n_instances, curves)
            if seed == 0:
                planner.plan(view)
            inputs = migration_inputs(view, planner.points())
            aggregate.append(seconds(migration_inputs, view, planner.points()))
            decision.append(seconds(planner.decide, inputs))
            plan.append(seconds(planner.plan, view))
        for what, took in (("aggregate", aggregate), ("decision", decision), ("plan", plan)):
            figures[f"{name}_{what}_ms_{n_instances}{kind}"] = 1e3 * float(np.median(took))
    return figures


def seconds(function: Callable[..., Any], *given: Any) -> float:
    begun = time.thread_time()
    function(*given)
    return time.thread_time() - begun


def cluster(generator: np.random.Generator, n_instances: int, curves: bool) -> ClusterView:
    n = n_instances * REQUESTS
    none = np.empty(0, dtype=np.int64)
    context = np.maximum(generator.lognormal(6.3, 1.0, n), 1.0).astype(np.int64)
    return ClusterView(
        slots=np.full(n_instances, 4 * REQUESTS),
        kv_capacity=np.full(n_instances, UNLIMITED),
        queued=np.zeros(n_instances, dtype=np.int64),
        instance=generator.integers(0, n_instances, n),
        prompt_tokens=context,
        generated_tokens=np.zeros(n, dtype=np.int64),
        forecast=forecast(generator, n, curves),
        waiting_prompt_tokens=none,
        waiting_generated_tokens=none,
        waiting_forecast=None,
        waited_steps=none,
    )


def forecast(generator: np.random.Generator, n: int, curves: bool) -> Forecast:
    """Return curves of constant hazards, predicted up to 20 tokens ago, or true lengths."""
    if not curves:
        return PointForecast.new(generator.geometric(1 / MEAN_LENGTH, n).astype(np.float64))
    edges = np.unique(np.concatenate([np.arange(16), np.geomspace(16, 4096, 44).astype(np.int64)]))
    hazard = np.clip(generator.lognormal(0.0, 1.0, n) / MEAN_LENGTH, 1e-5, 0.5)
    survival = ((1 - hazard[:, None]) ** edges).astype(np.float32)
    return SurvivalForecast.new(edges, survival).aged(generator.integers(0, AGE, n))


if __name__ == "__main__":
    main()
