"""How requests of a trace come into the waiting pool, some through a prefill stage."""

from math import inf

import numpy as np

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.simulator.engine.accounts import wait_for_account
from rescheduler.simulator.engine.engine_state import (
    NONE,
    Arrivals,
    Cluster,
    Prefill,
    Rules,
    Wanted,
)
from rescheduler.simulator.engine.slots import finish
from rescheduler.step_time.step_time import StepTime, step_seconds

__all__ = ["fill_servers", "next_arrival", "pool_has_room", "reveal"]


@compiled_core
def next_arrival(rules: Rules, cluster: Cluster, arrivals: Arrivals) -> float:
    """Return when the next request can be seen by the policy, or infinity."""
    scalars = cluster.scalars[0]
    if rules.prefill == Prefill.STAGE:
        server = _first_prefilled(cluster, arrivals)
        return arrivals.server_free[server] if server >= 0 else inf
    if scalars.cursor < scalars.block_length:
        return arrivals.arrival[scalars.cursor]  # type: ignore[no-any-return]
    return inf


@compiled_inline
def reveal(rules: Rules, step_time: StepTime, cluster: Cluster, arrivals: Arrivals) -> Wanted:
    """Show the policy what has arrived: all that the pool takes, or one for instant dispatch."""
    scalars = cluster.scalars[0]
    while pool_has_room(rules, cluster):
        if scalars.waiting == len(arrivals.pool):
            return Wanted.WIDEN
        wanted = fill_servers(rules, step_time, cluster, arrivals)
        if wanted != Wanted.DONE:
            return wanted
        if rules.prefill != Prefill.STAGE and scalars.cursor == scalars.block_length:
            return Wanted.DONE if scalars.last_block else Wanted.TRACE
        if not rules.revelation and next_arrival(rules, cluster, arrivals) > scalars.now:
            return Wanted.DONE
        if rules.prefill == Prefill.STAGE:
            server = _first_prefilled(cluster, arrivals)
            row = arrivals.server_request[server]
            arrivals.server_request[server] = NONE
            request = cluster.requests[row]
            request.first_token = request.last_token = arrivals.server_free[server]
            request.generated = 1
            request.context = request.prompt + 1
            scalars.tokens += 1
        else:
            if scalars.free == 0:
                return Wanted.GROW
            row = _take(rules, cluster, arrivals)
            if row == NONE:
                return Wanted.OVERSIZED
        cluster.requests[row].entered = scalars.steps
        cluster.requests[row].turn = scalars.dispatched + scalars.waiting
        wait_for_account(cluster, row)
        arrivals.pool[scalars.waiting] = row
        scalars.waiting += 1
    return Wanted.DONE


@compiled_inline
def pool_has_room(rules: Rules, cluster: Cluster) -> bool:
    """Return whether the policy can be shown another request."""
    return cluster.scalars[0].waiting < rules.pool_limit  # type: ignore[no-any-return]


@compiled_core
def _take(rules: Rules, cluster: Cluster, arrivals: Arrivals) -> int:
    """Take the next request of the trace into a row; return it, or NONE if it is too large."""
    scalars = cluster.scalars[0]
    at = scalars.cursor
    grown = max(arrivals.output[at] * rules.most_growth, 1 if rules.prefill == Prefill.STAGE else 0)
    most = arrivals.prompt[at] + grown
    if most > rules.kv_capacity:
        scalars.oversized = scalars.revealed
        return NONE
    scalars.free -= 1
    row = cluster.free[scalars.free]
    scalars.in_system += 1
    scalars.cursor += 1
    request = cluster.requests[row]
    request.number = scalars.revealed
    scalars.revealed += 1
    request.template = arrivals.template[at]
    request.client = arrivals.client[at]
    request.prompt = arrivals.prompt[at]
    request.output = arrivals.output[at]
    request.generated = 0
    request.context = arrivals.prompt[at]
    request.todo = 0
    request.resumes = NONE
    request.preemptions = 0
    request.migrations = 0
    request.landed = NONE
    request.target = NONE
    request.next = NONE
    request.arrival = scalars.now if rules.revelation else arrivals.arrival[at]
    request.placed = np.nan
    request.start = np.nan
    request.first_token = np.nan
    request.last_token = np.nan
    request.tpot_worst = np.nan
    request.expected = np.nan
    request.cost = np.nan
    request.service = request.charged = 0.0
    return row  # type: ignore[no-any-return]


@compiled_inline
def fill_servers(rules: Rules, step_time: StepTime, cluster: Cluster, arrivals: Arrivals) -> Wanted:
    """Give the prefill server that is free first the next request of the trace, and so on."""
    if rules.prefill != Prefill.STAGE:
        return Wanted.DONE
    scalars = cluster.scalars[0]
    while True:
        server = 0
        for s in range(1, len(arrivals.server_free)):
            if arrivals.server_free[s] < arrivals.server_free[server]:
                server = s
        if arrivals.server_request[server] != NONE:
            # What follows begins when the pool has taken this one, in its own time.
            return Wanted.DONE
        if scalars.cursor == scalars.block_length:
            return Wanted.DONE if scalars.last_block else Wanted.TRACE
        if scalars.free == 0:
            return Wanted.GROW
        if scalars.finished == len(cluster.finished):
            return Wanted.FLUSH
        row = _take(rules, cluster, arrivals)
        if row == NONE:
            return Wanted.OVERSIZED
        request = cluster.requests[row]
        begin = max(arrivals.server_free[server], request.arrival)
        arrivals.server_free[server] = begin + step_seconds(step_time, request.prompt, 0.0)
        if request.output == 1:
            # Its only token is the prefill's.
            request.first_token = arrivals.server_free[server]
            scalars.tokens += 1
            finish(cluster, row, NONE, request.first_token)
        else:
            arrivals.server_request[server] = row


@compiled_core
def _first_prefilled(cluster: Cluster, arrivals: Arrivals) -> int:
    """Return the server whose request is prefilled first, ties in the trace's order, or NONE."""
    first = NONE
    for s in range(len(arrivals.server_free)):
        row = arrivals.server_request[s]
        if row == NONE:
            continue
        if (
            first == NONE
            or arrivals.server_free[s] < arrivals.server_free[first]
            or (
                arrivals.server_free[s] == arrivals.server_free[first]
                and cluster.requests[row].number
                < cluster.requests[arrivals.server_request[first]].number
            )
        ):
            first = s
    return first
