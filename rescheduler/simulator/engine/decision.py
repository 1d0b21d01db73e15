"""What a policy is shown of the simulated cluster."""

from math import isnan

from predictor.compilation import compiled_core, compiled_inline
from predictor.forecasts.curve import load_of_known_ends
from rescheduler.cluster.cluster_view import UNLIMITED
from rescheduler.routing.problem import RoutingProblem, length_bucket
from rescheduler.simulator.engine.engine_state import (
    NONE,
    Cluster,
    Foresight,
    Intake,
    Rules,
)
from rescheduler.simulator.engine.slots import occupied
from rescheduler.simulator.forecasts.forecast_arrays import (
    ONCE,
    POINT,
    ForecastArrays,
    add_expected,
    expected_remaining,
    survival_row,
)

__all__ = ["expected_left", "routing_problem_of"]


@compiled_core
def routing_problem_of(
    rules: Rules, foresight: Foresight, cluster: Cluster, intake: Intake
) -> RoutingProblem:
    """Fill the arrays of a decision on the pool as it is; requests queued count as running."""
    work, scalars = foresight.problem, cluster.scalars[0]
    n = scalars.waiting
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        work.load[g] = instance.load + instance.queued_tokens + instance.arriving_tokens
        work.queued[g] = instance.queued + instance.arriving
        work.running[g] = occupied(cluster, g)
        work.budget[g] = instance.budget
        if rules.queueing:
            work.slots[g] = UNLIMITED
            work.room[g] = UNLIMITED
        else:
            work.slots[g] = rules.slots - work.running[g]
            work.room[g] = rules.kv_capacity - work.load[g] - instance.leaving_tokens
    for i in range(n):
        request = cluster.requests[intake.pool[i]]
        work.size[i] = request.context
        work.waited[i] = scalars.steps - request.entered
    work.dispatched[0] = scalars.dispatched
    if foresight.with_ahead or foresight.with_work:
        _look_ahead(foresight, cluster, intake)
    return RoutingProblem(
        work.load,
        work.running,
        work.queued,
        work.slots,
        work.room,
        work.capacity,
        work.work,
        work.budget,
        work.points,
        work.growth,
        work.ahead,
        work.spread,
        work.size[:n],
        work.survival[:n],
        work.remaining[:n],
        work.waited[:n],
        work.dispatched,
        work.unanswered,
        work.edges,
        work.by_length,
        work.soonest,
    )


@compiled_core
def _look_ahead(foresight: Foresight, cluster: Cluster, intake: Intake) -> None:
    """Fill in what forecasts tell of the instances and of the pool."""
    work, forecast = foresight.problem, foresight.forecast
    truth = _is_truth(forecast)
    n_points = len(work.points)
    last = n_points - 1
    every_step = n_points > 0 and work.points[last] == last
    for g in range(len(cluster.instances)):
        work.work[g] = 0.0
        work.ahead[g, :] = 0.0
        work.spread[g, :] = 0.0
        work.unanswered[g] = 0
        work.by_length[g, :] = 0
        work.soonest[g] = 0.0
        if truth and every_step:
            _project_truth(foresight, cluster, g)
        else:
            for slot in range(cluster.instances[g].decoding):
                row = cluster.slot_request[g, slot]
                left = cluster.slot_end[g, slot] - cluster.instances[g].steps
                generated = cluster.requests[row].output - left
                context = cluster.requests[row].context + cluster.instances[g].grown
                _add(foresight, cluster, row, g, generated, context)
        for row in (cluster.instances[g].filling, cluster.instances[g].queue_head):
            while row != NONE:
                _add_held(foresight, cluster, row, g)
                row = cluster.requests[row].next
    for move in range(cluster.scalars[0].moving):
        _add_held(foresight, cluster, cluster.moves[move].request, cluster.moves[move].target)
    for i in range(cluster.scalars[0].waiting):
        request = cluster.requests[intake.pool[i]]
        if n_points > 0:
            survival_row(
                forecast,
                request.number,
                request.template,
                request.generated,
                request.output,
                work.points,
                work.survival[i],
            )
        if foresight.with_work:
            work.remaining[i] = expected_left(forecast, cluster, intake.pool[i], request.generated)


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


@compiled_core
def _is_truth(forecast: ForecastArrays) -> bool:
    return forecast.kind == POINT and forecast.sigma == 0.0 and len(forecast.bins) == 0


@compiled_inline
def _add(
    foresight: Foresight, cluster: Cluster, row: int, g: int, generated: int, context: int
) -> None:
    request, work = cluster.requests[row], foresight.problem
    if len(work.points) > 0:
        add_expected(
            foresight.forecast,
            request.number,
            request.template,
            generated,
            request.output,
            context,
            work.points,
            work.growth,
            foresight.row,
            work.ahead[g],
            work.spread[g],
        )
    if foresight.with_work:
        left = expected_left(foresight.forecast, cluster, row, generated)
        work.work[g] += left
        if generated == 0:
            work.unanswered[g] += request.prompt
        elif len(work.edges) > 0:
            work.by_length[g, length_bucket(work.edges, generated + left)] += 1
            if work.soonest[g] == 0.0 or left < work.soonest[g]:
                work.soonest[g] = left


@compiled_inline
def _add_held(foresight: Foresight, cluster: Cluster, row: int, g: int) -> None:
    """Add a request that does not decode now, so that its row says what it holds."""
    request = cluster.requests[row]
    _add(foresight, cluster, row, g, request.generated, request.context)


@compiled_core
def _project_truth(foresight: Foresight, cluster: Cluster, g: int) -> None:
    """Sum the known ends of the decoding requests by the step after which each is gone.

    One visit per request instead of one for each of its steps.
    """
    work, instance = foresight.problem, cluster.instances[g]
    n_points = len(work.points)
    requests, tokens = foresight.bucket_requests, foresight.bucket_tokens
    requests[:] = 0.0
    tokens[:] = 0.0
    for slot in range(instance.decoding):
        left = cluster.slot_end[g, slot] - instance.steps
        context = cluster.requests[cluster.slot_request[g, slot]].context + instance.grown
        bucket = min(left, n_points)
        requests[bucket] += 1.0
        tokens[bucket] += context
    load_of_known_ends(requests, tokens, work.growth, work.ahead[g])
