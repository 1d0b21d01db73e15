"""The pool of waiting requests in the order of service."""

from math import inf, isnan

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.ordering.kernel import (
    LATENCIES,
    LATENCIES_A_RATE,
    Kind,
    put_in_order,
    tail_rate,
)
from rescheduler.simulator.engine.engine_state import (
    Arrivals,
    Cluster,
    PolicyState,
    Prefill,
    Rules,
)
from rescheduler.simulator.engine.routing_inputs import expected_left
from rescheduler.step_time.step_time import StepTime, step_seconds

__all__ = ["order_pool"]


@compiled_core
def order_pool(
    rules: Rules,
    step_time: StepTime,
    policy_state: PolicyState,
    cluster: Cluster,
    arrivals: Arrivals,
) -> int:
    """Put the pool into the order of service; return how many of it a policy may place."""
    scalars, waiting = cluster.scalars[0], policy_state.waiting
    n = scalars.waiting
    if policy_state.order.kind == Kind.FCFS or n == 0:
        return n  # type: ignore[no-any-return]
    known = min(scalars.latencies, LATENCIES)
    if scalars.latencies >= scalars.gamma_of + LATENCIES_A_RATE:
        scalars.gamma = tail_rate(cluster.latencies, known, cluster.tail[0], cluster.tail[1])
        scalars.gamma_of = scalars.latencies
    for i in range(n):
        request = cluster.requests[arrivals.pool[i]]
        if isnan(request.cost):
            _foresee(rules, step_time, policy_state, cluster, arrivals.pool[i])
        waiting.waited[i] = scalars.now - request.arrival
        waiting.cost[i] = request.cost
        waiting.alone[i] = request.alone
        waiting.latest[i] = inf
    alone = put_in_order(policy_state.order, scalars.gamma, waiting, n)
    for i in range(n):
        waiting.other[i] = arrivals.pool[waiting.order[i]]
    for i in range(n):
        arrivals.pool[i] = waiting.other[i]
    return 1 if alone else n


@compiled_inline
def _foresee(
    rules: Rules, step_time: StepTime, policy_state: PolicyState, cluster: Cluster, row: int
) -> None:
    r"""Note what a request is expected to take from the others, and to last by itself.

    The larger of its shares of an instance's places and memory, times the seconds e
    for which it holds them:

    .. math:: \max\Big(\frac{1}{S}, \frac{c + E[R]/2}{K}\Big) e
    """
    request = cluster.requests[row]
    left = expected_left(policy_state.forecast, cluster, row, request.generated)
    step = step_seconds(step_time, 1.0, float(request.context))
    request.alone = left * step
    if rules.prefill == Prefill.CHUNKED:
        request.alone += step_seconds(step_time, float(request.prompt), 0.0)
    if policy_state.order.by_prompt:
        request.cost = float(request.prompt)
        return
    held = max(1.0 / rules.slots, (request.context + left / 2.0) / rules.kv_capacity)
    request.cost = held * request.alone
