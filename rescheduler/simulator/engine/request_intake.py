"""How requests of a trace come into the waiting pool, some through a prefill stage."""

from math import inf

import numpy as np

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.simulator.engine.engine_state import (
    DONE,
    FLUSH,
    GROW,
    NONE,
    OVERSIZED,
    STAGE,
    TRACE,
    WIDEN,
    Cluster,
    Intake,
    Rules,
)
from rescheduler.simulator.engine.slots import finish
from rescheduler.step_time.step_time import StepTime, step_seconds

__all__ = ["fill_servers", "next_arrival", "pool_has_room", "reveal"]


@compiled_core
def next_arrival(rules: Rules, cluster: Cluster, intake: Intake) -> float:
    """Return when the next request can be seen by the policy, or infinity."""
    scalars = cluster.scalars[0]
    if rules.prefill == STAGE:
        server = _first_prefilled(cluster, intake)
        return intake.server_free[server] if server >= 0 else inf
    if scalars.cursor < scalars.block_length:
        return intake.arrival[scalars.cursor]  # type: ignore[no-any-return]
    return inf


@compiled_inline
def reveal(rules: Rules, step_time: StepTime, cluster: Cluster, intake: Intake) -> int:
    """Show the policy what has arrived: all that the pool takes, or one for instant dispatch."""
    scalars = cluster.scalars[0]
    while pool_has_room(rules, cluster):
        if scalars.waiting == len(intake.pool):
            return WIDEN
        wanted = fill_servers(rules, step_time, cluster, intake)
        if wanted != DONE:
            return wanted
        if rules.prefill != STAGE and scalars.cursor == scalars.block_length:
            return DONE if scalars.last_block else TRACE
        if not rules.revelation and next_arrival(rules, cluster, intake) > scalars.now:
            return DONE
        if rules.prefill == STAGE:
            server = _first_prefilled(cluster, intake)
            row = intake.server_request[server]
            intake.server_request[server] = NONE
            request = cluster.requests[row]
            request.first_token = request.last_token = intake.server_free[server]
            request.generated = 1
            request.context = request.prompt + 1
            scalars.tokens += 1
        else:
            if scalars.free == 0:
                return GROW
            row = _take(rules, cluster, intake)
            if row == NONE:
                return OVERSIZED
        cluster.requests[row].entered = scalars.steps
        intake.pool[scalars.waiting] = row
        scalars.waiting += 1
    return DONE


@compiled_inline
def pool_has_room(rules: Rules, cluster: Cluster) -> bool:
    """Return whether the policy can be shown another request."""
    return cluster.scalars[0].waiting < rules.pool_limit  # type: ignore[no-any-return]


@compiled_core
def _take(rules: Rules, cluster: Cluster, intake: Intake) -> int:
    """Take the next request of the trace into a row; return it, or NONE if it is too large."""
    scalars = cluster.scalars[0]
    at = scalars.cursor
    grown = max(intake.output[at] * rules.most_growth, 1 if rules.prefill == STAGE else 0)
    most = intake.prompt[at] + grown
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
    request.template = intake.template[at]
    request.prompt = intake.prompt[at]
    request.output = intake.output[at]
    request.generated = 0
    request.context = intake.prompt[at]
    request.todo = 0
    request.resumes = NONE
    request.preemptions = 0
    request.migrations = 0
    request.landed = NONE
    request.target = NONE
    request.next = NONE
    request.arrival = scalars.now if rules.revelation else intake.arrival[at]
    request.placed = np.nan
    request.start = np.nan
    request.first_token = np.nan
    request.last_token = np.nan
    request.tpot_worst = np.nan
    request.expected = np.nan
    return row  # type: ignore[no-any-return]


@compiled_inline
def fill_servers(rules: Rules, step_time: StepTime, cluster: Cluster, intake: Intake) -> int:
    """Give the prefill server that is free first the next request of the trace, and so on."""
    if rules.prefill != STAGE:
        return DONE
    scalars = cluster.scalars[0]
    while True:
        server = 0
        for s in range(1, len(intake.server_free)):
            if intake.server_free[s] < intake.server_free[server]:
                server = s
        if intake.server_request[server] != NONE:
            return DONE  # what follows begins when the pool has taken this one, in its own time
        if scalars.cursor == scalars.block_length:
            return DONE if scalars.last_block else TRACE
        if scalars.free == 0:
            return GROW
        if scalars.finished == len(cluster.finished):
            return FLUSH
        row = _take(rules, cluster, intake)
        if row == NONE:
            return OVERSIZED
        request = cluster.requests[row]
        begin = max(intake.server_free[server], request.arrival)
        intake.server_free[server] = begin + step_seconds(step_time, request.prompt, 0.0)
        if request.output == 1:
            # Its only token is the prefill's.
            request.first_token = intake.server_free[server]
            scalars.tokens += 1
            finish(cluster, row, NONE, request.first_token)
        else:
            intake.server_request[server] = row


@compiled_core
def _first_prefilled(cluster: Cluster, intake: Intake) -> int:
    """Return the server whose request is prefilled first, ties in the trace's order, or NONE."""
    first = NONE
    for s in range(len(intake.server_free)):
        row = intake.server_request[s]
        if row == NONE:
            continue
        if (
            first == NONE
            or intake.server_free[s] < intake.server_free[first]
            or (
                intake.server_free[s] == intake.server_free[first]
                and cluster.requests[row].number
                < cluster.requests[intake.server_request[first]].number
            )
        ):
            first = s
    return first
