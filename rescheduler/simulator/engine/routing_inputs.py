"""The inputs of a routing decision, straight from the engine's arrays."""

from math import isnan

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core, compiled_inline
from predictor.forecasts.curve import load_of_known_ends, no_load
from rescheduler.routing.inputs import RoutingInputs, count_length, limit_placements
from rescheduler.simulator.engine.engine_state import Arrivals, Cluster, PolicyState, Rules
from rescheduler.simulator.engine.placed_requests import gather_placed
from rescheduler.simulator.engine.slots import occupied
from rescheduler.simulator.forecasts.forecast_arrays import (
    ONCE,
    ForecastArrays,
    add_expected,
    expected_remaining,
    knows_ends,
    survival_row,
)

__all__ = ["add_expected_loads", "expected_left", "fill_routing_inputs"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@compiled_core
def fill_routing_inputs(
    rules: Rules, policy_state: PolicyState, cluster: Cluster, arrivals: Arrivals
) -> RoutingInputs:
    """Fill the arrays of a decision on the pool as it is; requests queued count as running."""
    inputs, scalars = policy_state.inputs, cluster.scalars[0]
    n = scalars.waiting
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        inputs.load[g] = instance.load + instance.queued_tokens + instance.arriving_tokens
        inputs.queued[g] = instance.queued + instance.arriving
        inputs.running[g] = occupied(cluster, g)
        inputs.budget[g] = instance.budget
        capacity = rules.kv_capacity - instance.leaving_tokens
        limit_placements(inputs, g, rules.slots, capacity, rules.queueing)
    for i in range(n):
        request = cluster.requests[arrivals.pool[i]]
        inputs.size[i] = request.context
        inputs.waited[i] = scalars.steps - request.entered
    inputs.dispatched[0] = scalars.dispatched
    if policy_state.with_ahead or policy_state.with_lengths:
        _look_ahead(policy_state, cluster, arrivals)
    return RoutingInputs(
        inputs.load,
        inputs.running,
        inputs.queued,
        inputs.slots,
        inputs.room,
        inputs.capacity,
        inputs.work,
        inputs.budget,
        inputs.points,
        inputs.growth,
        inputs.ahead,
        inputs.excess,
        inputs.alive,
        inputs.size[:n],
        inputs.survival[:n],
        inputs.remaining[:n],
        inputs.waited[:n],
        inputs.dispatched,
        inputs.unanswered,
        inputs.edges,
        inputs.by_length,
        inputs.soonest,
    )


@compiled_core
def _look_ahead(policy_state: PolicyState, cluster: Cluster, arrivals: Arrivals) -> None:
    """Fill in what is forecast of the instances and of the pool."""
    inputs, forecast = policy_state.inputs, policy_state.forecast
    n = gather_placed(cluster)
    if policy_state.with_ahead:
        add_expected_loads(
            forecast,
            cluster,
            n,
            inputs.points,
            inputs.growth,
            inputs.capacity,
            policy_state.row,
            policy_state.ending,
            inputs.ahead,
            inputs.excess,
            inputs.alive,
        )
    if policy_state.with_lengths:
        inputs.work[:] = 0.0
        inputs.unanswered[:] = 0
        inputs.by_length[:] = 0
        inputs.soonest[:] = 0.0
        for i in range(n):
            placed = cluster.placed[i]
            left = expected_left(forecast, cluster, placed.row, placed.generated)
            prompt = cluster.requests[placed.row].prompt
            count_length(inputs, placed.instance, prompt, placed.generated, left)
    for i in range(cluster.scalars[0].waiting):
        request = cluster.requests[arrivals.pool[i]]
        if policy_state.with_ahead:
            survival_row(
                forecast,
                request.number,
                request.template,
                request.generated,
                request.output,
                inputs.points,
                inputs.survival[i],
            )
        if policy_state.with_lengths:
            row = arrivals.pool[i]
            inputs.remaining[i] = expected_left(forecast, cluster, row, request.generated)


@compiled_core
def add_expected_loads(
    forecast: ForecastArrays,
    cluster: Cluster,
    n: int,
    points: IntArray,
    growth: FloatArray,
    capacity: IntArray,
    row: FloatArray,
    ending: FloatArray,
    ahead: FloatArray,
    excess: FloatArray,
    alive: FloatArray,
) -> None:
    """Write the loads ahead, [G, P], of the first n requests of ``cluster.placed``.

    ``row``, [P], and ``ending``, [2, G, P + 1], are scratch.
    """
    placed = cluster.placed[:n]
    ahead[:] = 0.0
    no_load(excess)
    alive[:] = 0.0
    if knows_ends(forecast) and excess.shape[2] == 0:
        load_of_known_ends(
            placed["left"],
            placed["instance"],
            placed["context"],
            points,
            growth,
            ending,
            ahead,
            alive,
        )
        return
    for i in range(n):
        one = cluster.placed[i]
        request = cluster.requests[one.row]
        add_expected(
            forecast,
            request.number,
            request.template,
            one.generated,
            request.output,
            one.context,
            points,
            growth,
            capacity[one.instance],
            row,
            ahead[one.instance],
            excess[one.instance],
            alive[one.instance],
        )


@compiled_inline
def expected_left(forecast: ForecastArrays, cluster: Cluster, row: int, generated: int) -> float:
    """Return the tokens that a request is expected to generate yet, after so many.

    What was forecast of it before its first token is kept: hundreds may wait, and none changes.
    """
    request = cluster.requests[row]
    if generated > 0 and forecast.interval != ONCE:
        return expected_remaining(
            forecast, request.number, request.template, generated, request.output
        )
    if isnan(request.expected):
        request.expected = expected_remaining(
            forecast, request.number, request.template, 0, request.output
        )
    left = request.expected
    return max(left - generated, 1.0) if generated > 0 else left  # type: ignore[no-any-return]
