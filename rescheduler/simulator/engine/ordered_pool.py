r"""The pool of waiting requests in the order of service, shared out between accounts.

A request i with :math:`p_i` prompt tokens counts as the service :math:`p_i + 2\,o_i`. Its account
is charged with what it is expected to generate as the request is placed, and with what it has
generated once it has ended. An account of which a request comes while none of it waits is lifted
to

.. math:: V = \max_{t} \min_{a \text{ waits at } t} v_a

over the placements t so far. Nobody saves up service for later.

Source: see `rescheduler.ordering.fairness`.
"""

from math import inf, isnan

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.ordering.fairness import OUTPUT_WEIGHT, interleave
from rescheduler.ordering.kernel import (
    LATENCIES,
    LATENCIES_A_RATE,
    Kind,
    put_in_order,
    sort_by_key,
    tail_rate,
)
from rescheduler.simulator.config.rules import Prefill, Rules
from rescheduler.simulator.engine.engine_state import (
    NONE,
    Arrivals,
    Cluster,
    PolicyState,
)
from rescheduler.simulator.forecasts.forecast_arrays import (
    ONCE,
    ForecastArrays,
    expected_remaining,
)
from rescheduler.step_time.step_time import StepTime, step_seconds


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
    shares = policy_state.order.ahead < inf
    if (policy_state.order.kind == Kind.FCFS and not shares) or n == 0:
        return n  # type: ignore[no-any-return]
    if shares:  # the last order was not that of service alone
        for i in range(n):
            waiting.order[i] = i
            waiting.key[i] = cluster.requests[arrivals.pool[i]].turn
        sort_by_key(waiting.order, waiting.other, waiting.key, 0, n)
        _permute(policy_state, arrivals, n)
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
    if shares:
        first = waiting.order[0]
        _share_out(policy_state, cluster, arrivals, n)
        alone = alone and waiting.order[0] == first
    _permute(policy_state, arrivals, n)
    return 1 if alone else n


@compiled_core
def _permute(policy_state: PolicyState, arrivals: Arrivals, n: int) -> None:
    waiting = policy_state.waiting
    for i in range(n):
        waiting.other[i] = arrivals.pool[waiting.order[i]]
    for i in range(n):
        arrivals.pool[i] = waiting.other[i]


@compiled_core
def _share_out(policy_state: PolicyState, cluster: Cluster, arrivals: Arrivals, n: int) -> None:
    """Let no account of the pool get ahead of another by more than the fairness allows."""
    sharing = policy_state.sharing
    for i in range(n):
        cluster.accounts[cluster.requests[arrivals.pool[i]].client].place = NONE
    known, total = 0, 0.0
    for i in range(n):
        request = cluster.requests[arrivals.pool[i]]
        account = cluster.accounts[request.client]
        if account.place == NONE:
            account.place = known
            sharing.served[known] = account.served
            known += 1
        sharing.account[i] = account.place
        sharing.service[i] = request.service
        total += request.service
    scalars = cluster.scalars[0]
    mean = scalars.service / scalars.ended if scalars.ended > 0 else total / n
    interleave(
        policy_state.waiting.order,
        sharing.account,
        sharing.served[:known],
        sharing.service,
        policy_state.order.ahead * mean,
        sharing.following,
        sharing.ranks,
        sharing.first,
        n,
    )


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
    if policy_state.order.ahead < inf:
        request.service = request.prompt + OUTPUT_WEIGHT * (request.generated + left)
    step = step_seconds(step_time, 1.0, float(request.context))
    request.alone = left * step
    if rules.prefill == Prefill.CHUNKED:
        request.alone += step_seconds(step_time, float(request.prompt), 0.0)
    if policy_state.order.by_prompt:
        request.cost = float(request.prompt)
        return
    held = max(1.0 / rules.slots, (request.context + left / 2.0) / rules.kv_capacity)
    request.cost = held * request.alone


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


@compiled_inline
def wait_for_account(cluster: Cluster, row: int) -> None:
    """Count a request that comes into the pool."""
    scalars, account = cluster.scalars[0], cluster.accounts[cluster.requests[row].client]
    if account.waiting == 0:
        account.served = max(account.served, scalars.virtual_time)
    account.waiting += 1


@compiled_core
def charge_account(cluster: Cluster, row: int) -> None:
    """Charge the account of a request from the pool that gets its place."""
    scalars, request = cluster.scalars[0], cluster.requests[row]
    account = cluster.accounts[request.client]
    if request.service > 0.0:  # else nobody shares the pool out
        least = inf
        for a in range(len(cluster.accounts)):
            if cluster.accounts[a].waiting > 0:
                least = min(least, cluster.accounts[a].served)
        scalars.virtual_time = max(scalars.virtual_time, least)
    account.waiting -= 1
    account.served += request.service
    request.charged = request.service


@compiled_inline
def settle_account(cluster: Cluster, row: int, end: float) -> None:
    """Charge for what a request has truly taken; for nothing if it was turned away."""
    scalars, request = cluster.scalars[0], cluster.requests[row]
    account = cluster.accounts[request.client]
    if isnan(end):
        account.served -= request.charged
        return
    service = request.prompt + OUTPUT_WEIGHT * request.output
    account.served += service - request.charged
    scalars.service += service
    scalars.ended += 1
