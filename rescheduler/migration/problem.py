"""The arrays a migration planner decides on: loads ahead, and what each request adds to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from predictor.forecasts.expected_load import expected_load
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import NEVER_MOVED, ClusterView

__all__ = ["MigrationProblem", "Outlook", "migration_problem"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Outlook(NamedTuple):
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
class MigrationProblem:
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
        spread: [G, P] :math:`V_g(h) = \sum_i S_i(h)(1 - S_i(h))(c_i + h)^2`.
        source: [n] instance of each running request.
        context: [n] tokens in its KV cache.
        since_move: [n] as in `ClusterView`.
        outlook: of the requests with the given indices, [k], as of now; and whether they outlive
            so many steps, [k].
    """

    load: IntArray
    room: IntArray
    free: IntArray
    points: IntArray
    ahead: FloatArray
    spread: FloatArray
    source: IntArray
    context: IntArray
    since_move: IntArray
    outlook: Callable[[IntArray, FloatArray], Outlook]


def migration_problem(view: ClusterView, points: IntArray) -> MigrationProblem:
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
    spread = np.zeros_like(ahead)
    if len(points) > 1:
        if forecast is None:
            raise ValueError("the planner looks ahead, but there are no forecasts")
        if isinstance(forecast, PointForecast):
            _add_point_loads(forecast.mean(), view.instance, context, points, ahead)
        else:
            expected = expected_load(
                forecast, view.instance, context, view.n_instances, int(points[-1])
            )
            ahead[:], spread[:] = expected.mean[:, points], expected.variance[:, points]
    ahead[:, 0] = load

    def outlook(rows: IntArray, steps: FloatArray) -> Outlook:
        return _outlook(forecast, rows, steps, points)

    return MigrationProblem(
        load=load,
        room=view.kv_capacity.astype(np.int64),
        free=view.slots - view.running,
        points=points,
        ahead=ahead,
        spread=spread,
        source=view.instance.astype(np.int64),
        context=context,
        since_move=np.full(n, NEVER_MOVED) if view.since_move is None else view.since_move,
        outlook=outlook,
    )


def _outlook(
    forecast: Forecast | None, rows: IntArray, steps: FloatArray, points: IntArray
) -> Outlook:
    n = len(rows)
    if forecast is None:
        return Outlook(np.ones((n, len(points))), np.zeros(n), np.ones(n))
    if isinstance(forecast, PointForecast):
        remaining: FloatArray = forecast.select(rows).mean()
        survival = (points < remaining[:, None]).astype(np.float64)
        return Outlook(survival, remaining, (steps < remaining).astype(np.float64))
    if isinstance(forecast, SurvivalForecast):
        found = Outlook(np.empty((n, len(points))), np.empty(n), np.empty(n))
        f, at = forecast, points.astype(np.float64)
        _read_curves(f.edges, f.survival, f.age, f.limit, rows, at, steps, *found)
        return found
    some = forecast.select(rows)
    return Outlook(some.at(points), some.mean(), some.at_each(steps))


@compiled
def _add_point_loads(
    remaining: FloatArray,
    instance: IntArray,
    context: IntArray,
    points: IntArray,
    ahead: FloatArray,
) -> None:
    r"""Add to ``ahead`` what requests hold whose ends are known, in O(n + G P).

    .. math:: \Lambda_g(h) = \sum_{i: R_i > h} c_i + h\,|\{i: R_i > h\}|

    Each request is counted at the last point that it reaches, and sums from the end do the rest.
    """
    n_points = len(points)
    requests = np.zeros(ahead.shape)
    for i in range(len(instance)):
        last = np.searchsorted(points, remaining[i]) - 1  # the last point below R
        if last >= 0:
            ahead[instance[i], last] += context[i]
            requests[instance[i], last] += 1.0
    for g in range(len(ahead)):
        for p in range(n_points - 2, -1, -1):
            ahead[g, p] += ahead[g, p + 1]
            requests[g, p] += requests[g, p + 1]
        for p in range(n_points):
            ahead[g, p] += requests[g, p] * points[p]


@compiled
def _read_curves(
    edges: FloatArray,
    survival: npt.NDArray[np.floating[Any]],
    age: FloatArray,
    limit: FloatArray,
    rows: IntArray,
    points: FloatArray,
    steps: FloatArray,
    at_points: FloatArray,
    remaining: FloatArray,
    outlives: FloatArray,
) -> None:
    r"""Write S(h | age) at the points, [k, P], E[R], [k], and S at each one's steps, [k].

    .. math:: S(h \mid j) = S(j + h) / S(j), \qquad
              E[R] = \int_0^L S + \tfrac12\big(S(0) - S(L^-)\big)

    with L the tokens left to the limit: `SurvivalForecast.at`, ``mean`` and ``at_each`` at once.
    """
    last = len(edges) - 1
    for k in range(len(rows)):
        i = rows[k]
        left = max(min(limit[i], edges[last]) - age[i], 1.0)
        right = max(min(np.searchsorted(edges, age[i], "right"), last), 1)
        low = np.float64(survival[i, right - 1])
        part = min((age[i] - edges[right - 1]) / (edges[right] - edges[right - 1]), 1.0)
        alive = low + part * (np.float64(survival[i, right]) - low)
        at_points[k, 0] = 1.0
        outlives[k] = 1.0 if steps[k] == 0.0 else 0.0
        if not alive > 0.0:
            at_points[k, 1:] = 0.0
            remaining[k] = 1.0
            continue
        inverse = 1.0 / alive
        here, value, area = 0.0, 1.0, 0.0
        p = 1
        while here < left and right <= last:
            end, reached = edges[right] - age[i], np.float64(survival[i, right]) * inverse
            within = here <= steps[k] < end and steps[k] > 0.0
            # Most bins hold no point, and need no slope: a division less.
            if end > left or within or (p < len(points) and points[p] < end):
                slope = (reached - value) / (end - here)
                if end > left:
                    end, reached = left, value + slope * (left - here)
                first = value - slope * here
                while p < len(points) and points[p] < end:
                    at_points[k, p] = first + slope * points[p]
                    p += 1
                if within and steps[k] < end:
                    outlives[k] = first + slope * steps[k]
            area += (value + reached) * (end - here)
            here, value = end, reached
            right += 1
        at_points[k, p:] = 0.0
        remaining[k] = min(max((area + 1.0 - value) / 2, 1.0), left)
