"""The inputs of a migration decision: loads ahead, and what each request adds to them.

`migration_inputs` reads a `ClusterView`; the simulator fills the same `MigrationInputs` from its
engine's arrays, with the same functions of `predictor.forecasts.curve`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from predictor.forecasts.curve import aged_mean, aged_survival, load_of_known_ends, tokens_left
from predictor.forecasts.expected_load import expected_load
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import NEVER_MOVED, ClusterView
from rescheduler.routing.inputs import FloatArray, IntArray

__all__ = ["MigrationInputs", "RequestForecasts", "migration_inputs"]


class RequestForecasts(NamedTuple):
    """What is forecast of some requests, [k].

    Attributes:
        survival: [k, P] S(h) at the points ahead.
        remaining: [k] E[R], the tokens each is expected to generate yet.
        outlives: [k] S at a number of steps of each request's own.
    """

    survival: FloatArray
    remaining: FloatArray
    outlives: FloatArray


@dataclass(frozen=True, slots=True)
class MigrationInputs:
    r"""One decision, as arrays. G instances, P points ahead, n requests.

    The loads ahead are added up once, as STAR's workers do it, so that a move is judged by the
    two rows that it changes (Wang et al. 2026, §5.2). Most requests are never looked at: what is
    forecast of one is computed only when it is asked for.

    Attributes:
        load: [G] context tokens on each instance now, those on their way to it included.
        room: [G] KV capacity less what is held beside that (contexts on their way out).
        free: [G] slots without a request.
        points: [P] decode steps h ahead, ascending from 0.
        ahead: [G, P] :math:`\Lambda_g(h) = \sum_i S_i(h)(c_i + h)`; the load now at h = 0.
        source: [n] instance of each running request.
        context: [n] tokens in its KV cache.
        since_move: [n] as in `ClusterView`.
        forecasts_of: returns what is forecast of the requests with the given indices, [k], and
            whether they outlive so many steps, [k].
    """

    load: IntArray
    room: IntArray
    free: IntArray
    points: IntArray
    ahead: FloatArray
    source: IntArray
    context: IntArray
    since_move: IntArray
    forecasts_of: Callable[[IntArray, FloatArray], RequestForecasts]


def migration_inputs(view: ClusterView, points: IntArray) -> MigrationInputs:
    """Return the arrays of a decision on a cluster as it is.

    Args:
        view: of the cluster; with forecasts if a point is past 0.
        points: [P] decode steps ahead, ascending from 0.

    Raises:
        ValueError: points ahead without forecasts.
    """
    context, n = view.context_tokens, len(view.instance)
    load, forecast = view.kv_load, view.forecast
    ahead = np.zeros((view.n_instances, len(points)))
    if len(points) > 1:
        if forecast is None:
            raise ValueError("the planner looks ahead, but there are no forecasts")
        if isinstance(forecast, PointForecast):
            load_of_known_ends(
                forecast.mean(),
                view.instance,
                context,
                points,
                growth=points.astype(np.float64),
                ending=np.empty((2, view.n_instances, len(points) + 1)),
                ahead=ahead,
                alive=np.empty((view.n_instances, 0)),
            )
        else:
            expected = expected_load(
                forecast, view.instance, context, view.n_instances, int(points[-1])
            )
            ahead[:] = expected.mean[:, points]
    ahead[:, 0] = load

    def forecasts_of(rows: IntArray, steps: FloatArray) -> RequestForecasts:
        return _request_forecasts(forecast, rows, steps, points)

    return MigrationInputs(
        load=load,
        room=view.kv_capacity.astype(np.int64),
        free=view.slots - view.running,
        points=points,
        ahead=ahead,
        source=view.instance.astype(np.int64),
        context=context,
        since_move=np.full(n, NEVER_MOVED) if view.since_move is None else view.since_move,
        forecasts_of=forecasts_of,
    )


def _request_forecasts(
    forecast: Forecast | None, rows: IntArray, steps: FloatArray, points: IntArray
) -> RequestForecasts:
    n = len(rows)
    if forecast is None:
        return RequestForecasts(np.ones((n, len(points))), np.zeros(n), np.ones(n))
    if isinstance(forecast, PointForecast):
        remaining: FloatArray = forecast.select(rows).mean()
        survival = (points < remaining[:, None]).astype(np.float64)
        return RequestForecasts(survival, remaining, (steps < remaining).astype(np.float64))
    if isinstance(forecast, SurvivalForecast):
        found = RequestForecasts(np.empty((n, len(points))), np.empty(n), np.empty(n))
        _write_forecasts(*forecast.arrays(), rows, points, steps, *found)
        return found
    some = forecast.select(rows)
    return RequestForecasts(some.at(points), some.mean(), some.at_each(steps))


@compiled
def _write_forecasts(
    edges: FloatArray,
    survival: npt.NDArray[np.floating[Any]],
    age: FloatArray,
    limit: FloatArray,
    rows: IntArray,
    points: IntArray,
    steps: FloatArray,
    at_points: FloatArray,
    remaining: FloatArray,
    outlives: FloatArray,
) -> None:
    """Write the `RequestForecasts` of the requests in the given rows."""
    for k in range(len(rows)):
        i = rows[k]
        one = slice(k, k + 1)
        aged_survival(edges, survival[i], age[i], limit[i], points, at_points[k])
        aged_survival(edges, survival[i], age[i], limit[i], steps[one], outlives[one])
        mean = aged_mean(edges, survival[i], age[i], limit[i])
        remaining[k] = min(mean, tokens_left(edges, age[i], limit[i]))
