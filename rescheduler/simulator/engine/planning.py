"""What a migration planner is shown of the simulated cluster, straight from the engine's arrays."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled, compiled_core
from rescheduler.cluster.cluster_view import NEVER_MOVED
from rescheduler.migration.problem import MigrationProblem, Outlook
from rescheduler.simulator.engine.engine_state import NONE, Cluster, Rules
from rescheduler.simulator.engine.slots import occupied
from rescheduler.simulator.forecasts.forecast_arrays import (
    ForecastArrays,
    add_expected,
    expected_remaining,
    survival_row,
)

__all__ = ["Movable", "migration_problem_of", "movable_requests"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Movable = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]
"""Row, instance, context tokens, generated tokens and steps since the last move, [n] each."""


def migration_problem_of(
    rules: Rules, forecast: ForecastArrays, cluster: Cluster, movable: Movable, points: IntArray
) -> MigrationProblem:
    """Return the arrays of a decision on the cluster as it is.

    The same as `rescheduler.migration.problem.migration_problem` of the cluster's view, but for
    requests that cannot move, which are not among its requests.

    Args:
        rules: of the cluster.
        forecast: what is known of lengths.
        cluster: its state.
        movable: as `movable_requests` returns them.
        points: [P] decode steps ahead, ascending from 0.
    """
    n = rules.n_instances
    load, free = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    ahead, spread = np.zeros((n, len(points))), np.zeros((n, len(points)))
    growth = points * rules.drift.mean()
    _add_up(rules, forecast, cluster, points, growth, load, free, ahead, spread)
    rows, source, context, generated, since = movable
    requests = cluster.requests

    def outlook(some: IntArray, steps: FloatArray) -> Outlook:
        k = len(some)
        found = Outlook(np.ones((k, len(points))), np.zeros(k), np.ones(k))
        if forecast.kind:
            _foresee(forecast, requests, rows[some], generated[some], points, steps, *found)
        return found

    return MigrationProblem(
        load=load,
        room=rules.kv_capacity - cluster.instances["leaving_tokens"],
        free=free,
        points=points,
        ahead=ahead,
        spread=spread,
        source=source,
        context=context,
        since_move=since,
        outlook=outlook,
    )


@compiled
def movable_requests(cluster: Cluster) -> Movable:
    """Return the requests that decode and are not about to leave, one instance after the other."""
    n = 0
    for g in range(len(cluster.instances)):
        n += cluster.instances[g].decoding
    rows, source = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    context, generated = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    since = np.empty(n, dtype=np.int64)
    i = 0
    for g in range(len(cluster.instances)):
        instance = cluster.instances[g]
        for slot in range(instance.decoding):
            row = cluster.slot_request[g, slot]
            request = cluster.requests[row]
            if request.target != NONE:
                continue
            rows[i], source[i] = row, g
            context[i] = request.context + instance.grown
            generated[i] = request.output - (cluster.slot_end[g, slot] - instance.steps)
            since[i] = NEVER_MOVED if request.landed == NONE else generated[i] - request.landed
            i += 1
    return rows[:i], source[:i], context[:i], generated[:i], since[:i]


@compiled
def _add_up(
    rules: Rules,
    forecast: ForecastArrays,
    cluster: Cluster,
    points: IntArray,
    growth: FloatArray,
    load: IntArray,
    free: IntArray,
    ahead: FloatArray,
    spread: FloatArray,
) -> None:
    """Write the loads now and ahead; a request about to leave counts where it goes."""
    scratch = np.empty(len(points))
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        load[g] += instance.load + instance.queued_tokens + instance.arriving_tokens
        free[g] += rules.slots - occupied(cluster, g)
        for slot in range(instance.decoding):
            row = cluster.slot_request[g, slot]
            request = cluster.requests[row]
            generated = request.output - (cluster.slot_end[g, slot] - instance.steps)
            context = request.context + instance.grown
            at = g
            if request.target != NONE:
                at = request.target
                load[g] -= context
                load[at] += context
                free[at] -= 1
                free[g] += 1
            _add(
                forecast,
                cluster,
                row,
                at,
                generated,
                context,
                points,
                growth,
                scratch,
                ahead,
                spread,
            )
        for row in (instance.filling, instance.queue_head):
            while row != NONE:
                r = cluster.requests[row]
                _add(
                    forecast,
                    cluster,
                    row,
                    g,
                    r.generated,
                    r.context,
                    points,
                    growth,
                    scratch,
                    ahead,
                    spread,
                )
                row = r.next
    for move in range(cluster.scalars[0].moving):
        row = cluster.moves[move].request
        r = cluster.requests[row]
        at = cluster.moves[move].target
        _add(
            forecast,
            cluster,
            row,
            at,
            r.generated,
            r.context,
            points,
            growth,
            scratch,
            ahead,
            spread,
        )
    for g in range(rules.n_instances):
        ahead[g, 0] = load[g]


@compiled_core
def _add(
    forecast: ForecastArrays,
    cluster: Cluster,
    row: int,
    g: int,
    generated: int,
    context: int,
    points: IntArray,
    growth: FloatArray,
    scratch: FloatArray,
    ahead: FloatArray,
    spread: FloatArray,
) -> None:
    if len(points) > 1:
        request = cluster.requests[row]
        add_expected(
            forecast,
            request.number,
            request.template,
            generated,
            request.output,
            context,
            points,
            growth,
            scratch,
            ahead[g],
            spread[g],
        )


@compiled
def _foresee(
    forecast: ForecastArrays,
    requests: npt.NDArray[np.void],
    rows: IntArray,
    generated: IntArray,
    points: IntArray,
    steps: FloatArray,
    survival: FloatArray,
    remaining: FloatArray,
    outlives: FloatArray,
) -> None:
    """Write what is forecast of the requests in the given rows, as `Outlook` has it."""
    after, alive = np.empty(1, dtype=np.int64), np.empty(1)
    for k in range(len(rows)):
        r = requests[rows[k]]
        n = generated[k]
        survival_row(forecast, r.number, r.template, n, r.output, points, survival[k])
        remaining[k] = expected_remaining(forecast, r.number, r.template, n, r.output)
        after[0] = np.ceil(steps[k])
        survival_row(forecast, r.number, r.template, n, r.output, after, alive)
        outlives[k] = alive[0]
