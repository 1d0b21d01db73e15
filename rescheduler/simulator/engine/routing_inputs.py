"""The inputs of a routing decision, straight from the engine's arrays."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled, compiled_core, compiled_inline
from predictor.forecasts.curve import add_load, load_of_known_ends, no_load
from rescheduler.cluster.cluster_view import CANNOT_MOVE, NEVER_MOVED
from rescheduler.migration.policy import MigrationInputs, RequestForecasts
from rescheduler.routing.inputs import (
    NO_EDGES,
    RoutingInputs,
    count_length,
    limit_placements,
    new_routing_inputs,
)
from rescheduler.simulator.config.rules import Rules
from rescheduler.simulator.engine.engine_state import NONE, Arrivals, Cluster, PolicyState
from rescheduler.simulator.engine.ordered_pool import expected_left
from rescheduler.simulator.engine.slots import occupied
from rescheduler.simulator.forecasts.forecast_arrays import (
    ForecastArrays,
    expected_remaining,
    knows_ends,
    survival_row,
)


@compiled_core
def gather_placed(cluster: Cluster) -> int:
    """Write ``cluster.placed`` as it is now, and return the number of requests.

    Instance after instance: those that decode, those in prefill, those queued. Requests that
    migrate come last, on the instance that they go to.
    """
    n = 0
    for g in range(len(cluster.instances)):
        instance = cluster.instances[g]
        for slot in range(instance.decoding):
            request = cluster.requests[cluster.slot_request[g, slot]]
            left = cluster.slot_end[g, slot] - instance.steps
            generated = request.output - left
            since_move = NEVER_MOVED
            if request.target != NONE:
                since_move = CANNOT_MOVE
            elif request.landed != NONE:
                since_move = generated - request.landed
            placed = cluster.placed[n]
            placed.row = cluster.slot_request[g, slot]
            placed.instance = g
            placed.context = request.context + instance.grown
            placed.generated = generated
            placed.left = left
            placed.since_move = since_move
            n += 1
        for row in (instance.filling, instance.queue_head, instance.suspended):
            while row != NONE:
                _write_held(cluster, n, row, g)
                n += 1
                row = cluster.requests[row].next
    for move in range(cluster.scalars[0].moving):
        _write_held(cluster, n, cluster.moves[move].request, cluster.moves[move].target)
        n += 1
    return n


@compiled_inline
def _write_held(cluster: Cluster, i: int, row: int, g: int) -> None:
    """Write a request that does not decode now, so that its row says what it holds."""
    placed, request = cluster.placed[i], cluster.requests[row]
    placed.row = row
    placed.instance = g
    placed.context = request.context
    placed.generated = request.generated
    placed.left = request.output - request.generated
    placed.since_move = CANNOT_MOVE


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@compiled_core
def fill_routing_inputs(
    rules: Rules, policy_state: PolicyState, cluster: Cluster, arrivals: Arrivals, n: int
) -> RoutingInputs:
    """Fill the arrays of a decision on the first n of the pool; those queued count as running."""
    inputs, scalars = policy_state.inputs, cluster.scalars[0]
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
        _look_ahead(policy_state, cluster, arrivals, n)
    shown = (inputs.size[:n], inputs.survival[:n], inputs.remaining[:n], inputs.waited[:n])
    return RoutingInputs(*(inputs[:-4] + shown))


@compiled_core
def _look_ahead(
    policy_state: PolicyState, cluster: Cluster, arrivals: Arrivals, shown: int
) -> None:
    """Fill in what is forecast of the instances and of the first of the pool."""
    inputs, forecast = policy_state.inputs, policy_state.forecast
    n = gather_placed(cluster)
    if policy_state.with_ahead:
        add_expected_loads(forecast, cluster, n, inputs, policy_state.row, policy_state.ending)
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
    for i in range(shown):
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
    inputs: RoutingInputs,
    row: FloatArray,
    ending: FloatArray,
) -> None:
    """Write the loads ahead, [G, P], of the first n requests of ``cluster.placed``.

    ``row``, [P], and ``ending``, [2, G, P + 1], are scratch.
    """
    placed, points, growth = cluster.placed[:n], inputs.points, inputs.growth
    ahead, excess, alive = inputs.ahead, inputs.excess, inputs.alive
    ahead[:] = 0.0
    no_load(excess)
    alive[:] = 0.0
    if knows_ends(forecast) and excess.shape[2] == 0:
        left, instance, context = placed["left"], placed["instance"], placed["context"]
        load_of_known_ends(left, instance, context, points, growth, ending, ahead, alive)
        return
    for i in range(n):
        one = cluster.placed[i]
        r, g = cluster.requests[one.row], one.instance
        survival_row(forecast, r.number, r.template, one.generated, r.output, points, row)
        add_load(one.context, row, growth, inputs.capacity[g], ahead[g], excess[g], alive[g])


def simulated_migration_inputs(
    rules: Rules, forecast: ForecastArrays, cluster: Cluster, points: IntArray
) -> tuple[MigrationInputs, IntArray]:
    """Return the inputs of a decision on the cluster as it is, and the rows of their requests.

    Requests that cannot move are in the loads, but not among the requests. One that is about to
    leave counts where it goes. The inputs hold until the engine goes on.
    """
    n, instances, requests = gather_placed(cluster), cluster.instances, cluster.requests
    placed = cluster.placed[:n]
    leaving = requests["target"][placed["row"]] != NONE
    placed["instance"][leaving] = requests["target"][placed["row"][leaving]]
    load = np.zeros(rules.n_instances, dtype=np.int64)
    np.add.at(load, placed["instance"], placed["context"])
    free = rules.slots - np.bincount(placed["instance"], minlength=rules.n_instances)
    n_instances, n_points = rules.n_instances, len(points)
    growth, unasked = points * rules.drift.mean(), np.zeros(n_instances, dtype=np.int64)
    loads = new_routing_inputs(unasked, 0, points, growth, False, False, NO_EDGES)
    spread = np.zeros((n_instances, n_points))
    if n_points > 1:
        ending = np.empty((2, n_instances, n_points + 1))
        add_expected_loads(forecast, cluster, n, loads, np.empty(n_points), ending)
        if not knows_ends(forecast):
            _add_spread(forecast, cluster, n, points, growth, spread)
    loads.ahead[:, 0] = load
    movable = placed[placed["since_move"] >= 0]

    def forecasts_of(some: IntArray, steps: FloatArray) -> RequestForecasts:
        k = len(some)
        found = RequestForecasts(np.ones((k, len(points))), np.zeros(k), np.ones(k))
        if forecast.kind:
            _write_forecasts(forecast, requests, movable[some], points, steps, *found)
        return found

    inputs = MigrationInputs(
        load=load,
        room=rules.kv_capacity - instances["leaving_tokens"],
        free=free.astype(np.int64),
        points=points,
        ahead=loads.ahead,
        spread=spread,
        source=movable["instance"].copy(),
        context=movable["context"].copy(),
        since_move=movable["since_move"].copy(),
        forecasts_of=forecasts_of,
    )
    return inputs, movable["row"].copy()


@compiled
def _add_spread(
    forecast: ForecastArrays,
    cluster: Cluster,
    n: int,
    points: IntArray,
    growth: FloatArray,
    spread: FloatArray,
) -> None:
    """Add the variances of the first n requests of ``cluster.placed`` to V, [G, P]."""
    survival = np.empty(len(points))
    for i in range(n):
        one = cluster.placed[i]
        r = cluster.requests[one.row]
        survival_row(forecast, r.number, r.template, one.generated, r.output, points, survival)
        for p in range(len(points)):
            tokens, alive = one.context + growth[p], survival[p]
            spread[one.instance, p] += alive * (1.0 - alive) * tokens * tokens


@compiled
def _write_forecasts(
    forecast: ForecastArrays,
    requests: npt.NDArray[np.void],
    movable: npt.NDArray[np.void],
    points: IntArray,
    steps: FloatArray,
    survival: FloatArray,
    remaining: FloatArray,
    outlives: FloatArray,
) -> None:
    """Write the `RequestForecasts` of requests as `gather_placed` writes them."""
    after, alive = np.empty(1, dtype=np.int64), np.empty(1)
    for k in range(len(movable)):
        r, generated = requests[movable[k].row], movable[k].generated
        survival_row(forecast, r.number, r.template, generated, r.output, points, survival[k])
        remaining[k] = expected_remaining(forecast, r.number, r.template, generated, r.output)
        after[0] = np.ceil(steps[k])
        survival_row(forecast, r.number, r.template, generated, r.output, after, alive)
        outlives[k] = alive[0]
