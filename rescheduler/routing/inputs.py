"""The inputs of a routing decision, live and simulated, and the bookkeeping of one placement.

`routing_inputs` reads a `ClusterView`; the simulator's engine writes the same arrays straight from
its own, with the same functions.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled, compiled_core, compiled_inline
from predictor.forecasts.curve import TILTS, add_load, aged_survival, no_load
from predictor.forecasts.expected_load import expected_load
from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
NO_EDGES: IntArray = np.empty(0, dtype=np.int64)

MOST_PASSED = 64
"""Requests that are passed in one decision at most, so that long queues cost no more time."""


class RoutingInputs(NamedTuple):
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
        excess: [G, P, TILTS] :math:`E\big[e^{\theta_k (L_g(h) / K_g - 1)}\big]` at θ = 2, 4 ..,
            each at least the probability that the load passes the capacity; or [G, P, 0].
        alive: [G, P] N_g(h), requests expected to be there still, or [G, 0].
        dispatched: [1] requests routed before; `place` counts on.
        unanswered: [G] prompt tokens of the requests there that have no token yet; for policies
            that need lengths, else 0.
        edges: [K] output tokens from which buckets of requests begin, ascending from 0; empty for
            policies without buckets.
        by_length: [G, K] requests there that have a token, by the bucket of the output that is
            expected of them in all.
        soonest: [G] least number of tokens that is expected yet of one of those; 0 without any,
            and for policies without buckets.
        size: [n] context tokens that each waiting request brings.
        survival: [n, P] S_i(h) of each waiting request.
        remaining: [n] tokens it is expected to generate; for policies that need lengths, else 0.
        waited: [n] steps it has waited.
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
    excess: FloatArray
    alive: FloatArray
    dispatched: IntArray
    unanswered: IntArray
    edges: IntArray
    by_length: IntArray
    soonest: FloatArray
    size: IntArray
    survival: FloatArray
    remaining: FloatArray
    waited: IntArray


@compiled_core
def length_bucket(edges: IntArray, tokens: float) -> int:
    """Return the bucket of an output, of those that begin at edges [K], ascending from 0."""
    bucket = len(edges) - 1
    while bucket > 0 and tokens < edges[bucket]:
        bucket -= 1
    return bucket


@compiled_core
def full(inputs: RoutingInputs) -> bool:
    """Return whether no instance has a slot left."""
    slots = inputs.slots
    for g in range(len(slots)):  # noqa: SIM110, any() does not compile
        if slots[g] > 0:
            return False
    return True


@compiled_inline
def fits(inputs: RoutingInputs, i: int, g: int) -> bool:
    """Return whether instance g has a slot and KV room for waiting request i."""
    return bool(inputs.slots[g] > 0 and inputs.room[g] >= inputs.size[i])


@compiled
def passable(inputs: RoutingInputs, i: int, held_back: int, starvation: float) -> bool:
    """Return whether requests behind i, which has to wait, may be placed before it."""
    return held_back < MOST_PASSED and inputs.waited[i] < starvation and not full(inputs)


@compiled
def best_by_load(inputs: RoutingInputs, i: int, score: FloatArray) -> int:
    """Return the instance that fits i and has the least of [G] scores, or -1.

    Ties go to the lowest load, then to the lowest index.
    """
    load, best = inputs.load, -1
    for g in range(len(load)):
        if not fits(inputs, i, g):
            continue
        if best < 0 or score[g] < score[best] or (score[g] == score[best] and load[g] < load[best]):
            best = g
    return best


@compiled
def place_least(inputs: RoutingInputs, target: IntArray, measure: IntArray) -> None:
    """Place each request, in order of arrival, where a measure [G] of `inputs` is least.

    `place` keeps the measure up to date. Ties go to the lowest index.
    """
    for i in range(len(inputs.size)):
        best = -1
        for g in range(len(measure)):
            if fits(inputs, i, g) and (best < 0 or measure[g] < measure[best]):
                best = g
        if not settle(inputs, target, i, best):
            return


@compiled
def place_by_score(
    inputs: RoutingInputs, target: IntArray, score: FloatArray, gain: FloatArray
) -> None:
    """Place each request, in order of arrival, where a score [G] is least.

    Ties go to the lowest load, then to the lowest index. A request i that is placed adds gain[i]
    to the score of its instance.
    """
    for i in range(len(inputs.size)):
        best = best_by_load(inputs, i, score)
        if best >= 0:
            score[best] += gain[i]
        if not settle(inputs, target, i, best):
            return


@compiled_core
def place(inputs: RoutingInputs, target: IntArray, i: int, g: int) -> None:
    """Assign waiting request i to instance g and count it there, in its load ahead too."""
    target[i] = g
    size = inputs.size[i]
    inputs.load[g] += size
    inputs.running[g] += 1
    inputs.slots[g] -= 1
    inputs.room[g] -= size
    inputs.work[g] += inputs.remaining[i]
    inputs.budget[g] -= size
    inputs.dispatched[0] += 1
    add_load(
        size,
        inputs.survival[i],
        inputs.growth,
        inputs.capacity[g],
        inputs.ahead[g],
        inputs.excess[g],
        inputs.alive[g],
    )


@compiled_inline
def settle(inputs: RoutingInputs, target: IntArray, i: int, g: int) -> bool:
    """Place request i on g, unless g is -1; return whether others may still find a place."""
    if g >= 0:
        place(inputs, target, i, g)
        return True
    return not full(inputs)


def new_routing_inputs(
    kv_capacity: IntArray,
    n_waiting: int,
    points: IntArray,
    growth: FloatArray,
    with_excess: bool,
    with_alive: bool,
    edges: IntArray,
) -> RoutingInputs:
    """Return the inputs of a decision on empty instances, [G], with room for n waiting requests."""
    n, n_points = len(kv_capacity), len(points)
    excess = np.empty((n, n_points, TILTS if with_excess else 0))
    no_load(excess)
    return RoutingInputs(
        load=np.zeros(n, dtype=np.int64),
        running=np.zeros(n, dtype=np.int64),
        queued=np.zeros(n, dtype=np.int64),
        slots=np.zeros(n, dtype=np.int64),
        room=np.zeros(n, dtype=np.int64),
        capacity=kv_capacity.astype(np.int64),
        work=np.zeros(n),
        budget=np.zeros(n),
        points=points,
        growth=growth,
        ahead=np.zeros((n, n_points)),
        excess=excess,
        alive=np.zeros((n, n_points if with_alive else 0)),
        dispatched=np.zeros(1, dtype=np.int64),
        unanswered=np.zeros(n, dtype=np.int64),
        edges=edges,
        by_length=np.zeros((n, len(edges)), dtype=np.int64),
        soonest=np.zeros(n),
        size=np.zeros(n_waiting, dtype=np.int64),
        survival=np.ones((n_waiting, n_points)),
        remaining=np.zeros(n_waiting),
        waited=np.zeros(n_waiting, dtype=np.int64),
    )


@compiled_core
def limit_placements(
    inputs: RoutingInputs, g: int, slots: int, kv_capacity: int, instant: bool
) -> None:
    """Write what may still be placed on instance g, whose load and requests are written.

    Args:
        inputs: of the decision.
        g: the instance.
        slots: it has.
        kv_capacity: tokens that its KV cache holds, less what leaves it but is still there.
        instant: neither limits where a request may go.
    """
    inputs.slots[g] = UNLIMITED if instant else slots - inputs.running[g]
    inputs.room[g] = UNLIMITED if instant else kv_capacity - inputs.load[g]


@compiled_core
def count_length(inputs: RoutingInputs, g: int, prompt: int, generated: int, left: float) -> None:
    """Count a request on instance g by the tokens that it is expected to generate yet."""
    inputs.work[g] += left
    if generated == 0:
        inputs.unanswered[g] += prompt
    elif len(inputs.edges) > 0:
        inputs.by_length[g, length_bucket(inputs.edges, generated + left)] += 1
        if inputs.soonest[g] == 0.0 or left < inputs.soonest[g]:
            inputs.soonest[g] = left


def routing_inputs(
    view: ClusterView,
    points: IntArray,
    with_alive: bool = False,
    with_lengths: bool = False,
    edges: IntArray = NO_EDGES,
    with_excess: bool = False,
) -> RoutingInputs:
    """Return the inputs of a decision on a cluster as it is.

    Args:
        view: of the cluster; with forecasts if there are points.
        points: [P] decode steps ahead at which expected loads are needed.
        with_alive: compute how many requests are expected to remain too.
        with_lengths: compute expected lengths, which take a mean of every forecast.
        edges: [K] output tokens from which buckets of requests begin, which take the same.
        with_excess: bound the probability that each instance overflows too.

    Raises:
        ValueError: horizon points, or expected lengths, without forecasts.
    """
    growth = points.astype(np.float64)
    inputs = new_routing_inputs(
        view.kv_capacity, view.n_waiting, points, growth, with_excess, with_alive, edges
    )
    inputs.load[:] = view.kv_load
    inputs.running[:] = view.running
    inputs.queued[:] = view.queued
    inputs.size[:] = view.waiting_prompt_tokens + view.waiting_generated_tokens
    inputs.waited[:] = view.waited_steps
    inputs.dispatched[0] = view.dispatched
    if view.prefill_budget is not None:
        inputs.budget[:] = view.prefill_budget
    if len(points):
        if view.forecast is None or view.waiting_forecast is None:
            raise ValueError("the policy looks ahead, but there are no forecasts")
        if with_alive or with_excess:
            forecast = view.forecast
            if not isinstance(forecast, SurvivalForecast):
                forecast = forecast.on_grid(np.append(points, points[-1] + 1))
            _add_loads(inputs, view.instance, view.context_tokens, *forecast.arrays())
        else:
            expected = expected_load(
                view.forecast, view.instance, view.context_tokens, view.n_instances, int(points[-1])
            )
            inputs.ahead[:] = expected.mean[:, points]
        inputs.survival[:] = view.waiting_forecast.at(points)
    left = np.empty(0)
    if with_lengths:
        if view.forecast is None or view.waiting_forecast is None:
            raise ValueError("the policy goes by lengths, but there are no forecasts")
        left = view.forecast.mean().astype(np.float64)
        inputs.remaining[:] = view.waiting_forecast.mean()
    _count_instances(
        inputs,
        np.asarray(view.slots, dtype=np.int64),
        inputs.capacity,
        view.instant,
        np.asarray(view.instance, dtype=np.int64),
        np.asarray(view.prompt_tokens, dtype=np.int64),
        np.asarray(view.generated_tokens, dtype=np.int64),
        left,
    )
    return inputs


@compiled
def _add_loads(
    inputs: RoutingInputs,
    instance: IntArray,
    context: IntArray,
    edges: FloatArray,
    curves: npt.NDArray[np.floating[Any]],
    age: FloatArray,
    limit: FloatArray,
) -> None:
    """Add the running requests, [n], to what is expected of their instances.

    Shapes as in `SurvivalForecast`.
    """
    survival = np.empty(len(inputs.points))
    for i in range(len(instance)):
        g = instance[i]
        aged_survival(edges, curves[i], age[i], limit[i], inputs.points, survival)
        add_load(
            context[i],
            survival,
            inputs.growth,
            inputs.capacity[g],
            inputs.ahead[g],
            inputs.excess[g],
            inputs.alive[g],
        )


@compiled
def _count_instances(
    inputs: RoutingInputs,
    slots: IntArray,
    kv_capacity: IntArray,
    instant: bool,
    instance: IntArray,
    prompt: IntArray,
    generated: IntArray,
    left: FloatArray,
) -> None:
    """Write limits and lengths; ``left`` is [n], or [0] for policies that need no lengths."""
    for g in range(len(slots)):
        limit_placements(inputs, g, slots[g], kv_capacity[g], instant)
    for i in range(len(left)):
        count_length(inputs, instance[i], prompt[i], generated[i], left[i])


def empty_target(inputs: RoutingInputs) -> IntArray:
    """Return [n] instances, all -1: nothing assigned yet."""
    return np.full(len(inputs.size), -1, dtype=np.int64)
