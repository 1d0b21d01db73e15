"""The arrays a routing policy decides on, and the bookkeeping of one placement."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled, compiled_core
from predictor.forecasts.curve import add_load
from predictor.forecasts.expected_load import expected_load
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView

__all__ = [
    "NO_EDGES",
    "RoutingProblem",
    "best_by_load",
    "full",
    "length_bucket",
    "place",
    "place_least",
    "routing_problem",
]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
NO_EDGES: IntArray = np.empty(0, dtype=np.int64)


class RoutingProblem(NamedTuple):
    r"""One decision, as arrays that compiled policies work on (and use up).

    G instances, P horizon points, n waiting requests in order of arrival. All arrays are
    C-contiguous. A policy may change them: `place` keeps them up to date while it assigns one
    request after another.

    Attributes:
        load: [G] context tokens on each instance now.
        running: [G] requests there, started or not.
        queued: [G] of those, requests that have not started.
        slots: [G] requests that may still be placed there; `UNLIMITED` for instant dispatch.
        room: [G] context tokens that may still be placed there, likewise.
        capacity: [G] tokens that the KV cache holds.
        work: [G] tokens still expected from the requests there, summed; for
            policies that need lengths, else 0.
        budget: [G] prompt tokens that each instance could compute in time, as it last reported,
            less those of requests placed there since; for policies that need budgets, else 0.
        points: [P] decode steps h ahead, ascending from 0; empty for policies without a horizon.
        growth: [P] tokens that a request gains until each point: h, or a drift's sum.
        ahead: [G, P] Λ_g(h), the expected load at each point.
        spread: [G, P] V_g(h), the variance of the load, or [G, 0].
        size: [n] context tokens that each waiting request brings.
        survival: [n, P] S_i(h) of each waiting request.
        remaining: [n] tokens it is expected to generate; likewise.
        waited: [n] steps it has waited.
        dispatched: [1] requests routed before; `place` counts on.
        unanswered: [G] prompt tokens of the requests there that have no token yet; for policies
            that need lengths, else 0.
        edges: [K] output tokens from which buckets of requests begin, ascending from 0; empty for
            policies without buckets.
        by_length: [G, K] requests there that have a token, by the bucket of the output that is
            expected of them in all.
        soonest: [G] least number of tokens that is expected yet of one of those; 0 without any,
            and for policies without buckets.
    """

    load: IntArray
    running: IntArray
    queued: IntArray
    slots: IntArray
    room: IntArray
    capacity: IntArray
    work: FloatArray
    budget: FloatArray
    points: IntArray
    growth: FloatArray
    ahead: FloatArray
    spread: FloatArray
    size: IntArray
    survival: FloatArray
    remaining: FloatArray
    waited: IntArray
    dispatched: IntArray
    unanswered: IntArray
    edges: IntArray
    by_length: IntArray
    soonest: FloatArray


@compiled_core
def length_bucket(edges: IntArray, tokens: float) -> int:
    """Return the bucket of an output, of those that begin at edges [K], ascending from 0."""
    bucket = len(edges) - 1
    while bucket > 0 and tokens < edges[bucket]:
        bucket -= 1
    return bucket


@compiled
def full(problem: RoutingProblem) -> bool:
    """Say whether no instance has a slot left."""
    slots = problem.slots
    for g in range(len(slots)):  # noqa: SIM110, any() does not compile
        if slots[g] > 0:
            return False
    return True


@compiled
def best_by_load(problem: RoutingProblem, i: int, score: FloatArray) -> int:
    """Return the instance that fits i and has the least of [G] scores, or -1.

    Ties go to the lowest load, then to the lowest index.
    """
    load, slots, room = problem.load, problem.slots, problem.room
    size = problem.size[i]
    best = -1
    for g in range(len(load)):
        if slots[g] <= 0 or room[g] < size:
            continue
        if best < 0 or score[g] < score[best] or (score[g] == score[best] and load[g] < load[best]):
            best = g
    return best


@compiled
def place_least(problem: RoutingProblem, target: IntArray, measure: IntArray) -> None:
    """Place each request, in order of arrival, where a measure [G] of `problem` is least.

    `place` keeps the measure up to date. Ties go to the lowest index.
    """
    slots, room = problem.slots, problem.room
    for i in range(len(problem.size)):
        size = problem.size[i]
        best = -1
        for g in range(len(measure)):
            if slots[g] > 0 and room[g] >= size and (best < 0 or measure[g] < measure[best]):
                best = g
        if best >= 0:
            place(problem, target, i, best)
        elif full(problem):
            return


@compiled
def place(problem: RoutingProblem, target: IntArray, i: int, g: int) -> None:
    """Assign waiting request i to instance g and count it there, in its load ahead too."""
    target[i] = g
    size = problem.size[i]
    problem.load[g] += size
    problem.running[g] += 1
    problem.slots[g] -= 1
    problem.room[g] -= size
    problem.work[g] += problem.remaining[i]
    problem.budget[g] -= size
    problem.dispatched[0] += 1
    add_load(size, problem.survival[i], problem.growth, problem.ahead[g], problem.spread[g])


def routing_problem(
    view: ClusterView,
    points: IntArray,
    with_spread: bool,
    with_work: bool = False,
    edges: IntArray = NO_EDGES,
) -> RoutingProblem:
    """Return the arrays of a decision on a cluster as it is.

    Args:
        view: of the cluster; with forecasts if there are points.
        points: [P] decode steps ahead at which expected loads are needed.
        with_spread: compute their variance too.
        with_work: compute expected lengths, which take a mean of every forecast.
        edges: [K] output tokens from which buckets of requests begin, which take the same.

    Raises:
        ValueError: horizon points, or expected lengths, without forecasts.
    """
    load, running = view.kv_load, view.running
    n_points, n_instances = len(points), view.n_instances
    ahead = np.zeros((n_instances, n_points))
    spread = np.zeros((n_instances, n_points if with_spread else 0))
    survival = np.ones((view.n_waiting, n_points))
    if n_points:
        if view.forecast is None or view.waiting_forecast is None:
            raise ValueError("the policy looks ahead, but there are no forecasts")
        expected = expected_load(
            view.forecast, view.instance, view.context_tokens, n_instances, int(points[-1])
        )
        ahead[:] = expected.mean[:, points]
        if with_spread:
            spread[:] = expected.variance[:, points]
        survival = np.ascontiguousarray(view.waiting_forecast.at(points))
    work, remaining = np.zeros(n_instances), np.zeros(view.n_waiting)
    unanswered = np.zeros(n_instances, dtype=np.int64)
    by_length = np.zeros((n_instances, len(edges)), dtype=np.int64)
    soonest = np.zeros(n_instances)
    if with_work:
        if view.forecast is None or view.waiting_forecast is None:
            raise ValueError("the policy goes by lengths, but there are no forecasts")
        expected_yet = view.forecast.mean()
        np.add.at(work, view.instance, expected_yet)
        remaining = view.waiting_forecast.mean()
        silent = view.generated_tokens == 0
        np.add.at(unanswered, view.instance[silent], view.prompt_tokens[silent])
        if len(edges):
            _count_lengths(view, ~silent, expected_yet, edges, by_length, soonest)
    budget = np.zeros(n_instances)
    if view.prefill_budget is not None:
        budget[:] = view.prefill_budget
    unlimited = np.full(n_instances, UNLIMITED)
    return RoutingProblem(
        load=load,
        running=running,
        queued=view.queued.astype(np.int64),
        slots=unlimited if view.instant else view.slots - running,
        room=unlimited.copy() if view.instant else view.kv_capacity - load,
        capacity=view.kv_capacity.astype(np.int64),
        work=work,
        budget=budget,
        points=points,
        growth=points.astype(np.float64),
        ahead=ahead,
        spread=spread,
        size=view.waiting_prompt_tokens + view.waiting_generated_tokens,
        survival=survival,
        remaining=remaining,
        waited=view.waited_steps.astype(np.int64),
        dispatched=np.array([view.dispatched], dtype=np.int64),
        unanswered=unanswered,
        edges=edges,
        by_length=by_length,
        soonest=soonest,
    )


def _count_lengths(
    view: ClusterView,
    speaking: npt.NDArray[np.bool_],
    expected_yet: FloatArray,
    edges: IntArray,
    by_length: IntArray,
    soonest: FloatArray,
) -> None:
    """Sort the requests that have a token into buckets, and find which ends first."""
    where, left = view.instance[speaking], expected_yet[speaking]
    tokens = view.generated_tokens[speaking] + left
    bucket = np.maximum(np.searchsorted(edges, tokens, "right") - 1, 0)
    np.add.at(by_length, (where, bucket), 1)
    least = np.full(view.n_instances, np.inf)
    np.minimum.at(least, where, left)
    soonest[:] = np.where(np.isinf(least), 0.0, least)


def empty_target(problem: RoutingProblem) -> npt.NDArray[Any]:
    """Return [n] instances, all -1: nothing assigned yet."""
    return np.full(len(problem.size), -1, dtype=np.int64)
