"""The queue and the places of an instance: who waits for one, takes it, gives it back, loses it."""

from math import inf, isnan

import numpy as np

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.simulator.config.rules import Batching, Prefill, Rules, Suspends
from rescheduler.simulator.engine.engine_state import (
    MIGRATED,
    NEVER,
    NONE,
    PREEMPTED,
    Arrivals,
    Cluster,
    Rests,
    Wanted,
)
from rescheduler.simulator.engine.ordered_pool import settle_account, wait_for_account
from rescheduler.simulator.engine.suspension import keep_for_a_while, longest_rest, suspend
from rescheduler.step_time.step_time import StepTime, step_seconds


@compiled_inline
def queue(cluster: Cluster, row: int, g: int) -> None:
    """Put a request at the end of an instance's queue."""
    instance = cluster.instances[g]
    cluster.requests[row].next = NONE
    if instance.queue_tail == NONE:
        instance.queue_head = row
    else:
        cluster.requests[instance.queue_tail].next = row
    instance.queue_tail = row
    instance.queued += 1
    instance.queued_tokens += cluster.requests[row].context


@compiled_core
def queue_first(cluster: Cluster, row: int, g: int) -> None:
    """Put a request at the front of an instance's queue."""
    instance = cluster.instances[g]
    cluster.requests[row].next = instance.queue_head
    instance.queue_head = row
    if instance.queue_tail == NONE:
        instance.queue_tail = row
    instance.queued += 1
    instance.queued_tokens += cluster.requests[row].context


@compiled_inline
def arrives(rules: Rules, cluster: Cluster, row: int) -> float:
    """Return when a request that is in an instance's queue can be admitted there."""
    request = cluster.requests[row]
    if not isnan(request.start):
        return 0.0
    return request.placed + rules.dispatch_seconds  # type: ignore[no-any-return]


@compiled_core
def admit(rules: Rules, cluster: Cluster, g: int) -> int:
    """Take the request that an instance starts next out of its queue, or return NONE."""
    instance = cluster.instances[g]
    head = instance.queue_head
    taken = instance.decoding + instance.n_filling + instance.arriving
    if head == NONE or taken >= rules.slots:
        return NONE
    if arrives(rules, cluster, head) > cluster.scalars[0].now:
        return NONE
    room = rules.kv_capacity - instance.load - instance.arriving_tokens - instance.leaving_tokens
    room -= rules.lost_tokens * (taken + 1)
    chosen, before = head, NONE
    if rules.batching != Batching.FCFS and cluster.requests[head].resumes == NONE:
        chosen = NONE
        previous, row = NONE, head
        while row != NONE:
            candidate = cluster.requests[row]
            better = chosen == NONE
            if arrives(rules, cluster, row) > cluster.scalars[0].now:
                break
            if rules.batching == Batching.BIN_PACKING:
                if candidate.context > room:
                    better = False
                elif chosen != NONE:
                    better = candidate.context > cluster.requests[chosen].context
            elif chosen != NONE:
                left = candidate.output - candidate.generated
                least = cluster.requests[chosen].output - cluster.requests[chosen].generated
                better = left < least
            if better:
                chosen, before = row, previous
            previous, row = row, candidate.next
    if chosen == NONE or cluster.requests[chosen].context > room:
        return NONE
    take(rules, cluster, g, chosen, before)
    return chosen  # type: ignore[no-any-return]


@compiled_inline
def take(rules: Rules, cluster: Cluster, g: int, row: int, before: int) -> None:
    """Take a request out of an instance's queue, where it follows the row ``before`` or NONE."""
    instance, scalars = cluster.instances[g], cluster.scalars[0]
    request = cluster.requests[row]
    if before == NONE:
        instance.queue_head = request.next
    else:
        cluster.requests[before].next = request.next
    if instance.queue_tail == row:
        instance.queue_tail = before
    instance.queued -= 1
    instance.queued_tokens -= request.context
    request.admitted = scalars.admissions
    scalars.admissions += 1
    if request.resumes == PREEMPTED:
        keep_for_a_while(cluster, row, g)
    if isnan(request.start):
        request.start = scalars.now
    if rules.prefill == Prefill.CHUNKED:
        instance.load += request.context


@compiled_inline
def occupied(cluster: Cluster, g: int) -> int:
    """Return the requests that an instance has, started or not, and those on their way to it."""
    instance = cluster.instances[g]
    started = instance.decoding + instance.n_filling
    return started + instance.queued + instance.arriving  # type: ignore[no-any-return]


@compiled_inline
def decode(cluster: Cluster, row: int, g: int) -> None:
    """Let a request decode from the step on that is being composed."""
    instance, request = cluster.instances[g], cluster.requests[row]
    slot = instance.decoding
    end = instance.steps + request.output - request.generated
    cluster.slot_request[g, slot] = row
    cluster.slot_end[g, slot] = end
    instance.decoding += 1
    instance.next_end = min(instance.next_end, end)
    instance.load += request.context
    request.context -= instance.grown
    cluster.joined[g, instance.joined] = row
    instance.joined += 1


@compiled_inline
def vacate(cluster: Cluster, g: int, slot: int) -> None:
    """Free a place; the last one taken fills the gap."""
    instance = cluster.instances[g]
    last = instance.decoding - 1
    cluster.slot_request[g, slot] = cluster.slot_request[g, last]
    cluster.slot_end[g, slot] = cluster.slot_end[g, last]
    instance.decoding = last


@compiled_core
def leave(cluster: Cluster, g: int, slot: int) -> int:
    """Take a request that has not ended from its slot; its row says again what it holds."""
    instance = cluster.instances[g]
    row = cluster.slot_request[g, slot]
    request = cluster.requests[row]
    request.generated = request.output - (cluster.slot_end[g, slot] - instance.steps)
    request.context += instance.grown
    vacate(cluster, g, slot)
    instance.next_end = NEVER
    for other in range(instance.decoding):
        instance.next_end = min(instance.next_end, cluster.slot_end[g, other])
    return row  # type: ignore[no-any-return]


@compiled_core
def preempt(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> None:
    """Take its place from the request admitted last; it comes first when there is room again.

    Or, as `rescheduler.simulator.engine.suspension` has it, from a prompt that is being computed,
    else from what decodes and is expected to take longest.
    """
    instance, scalars = cluster.instances[g], cluster.scalars[0]
    slot, latest = NONE, -1
    if rules.suspends != Suspends.NEWEST:
        slot = longest_rest(rules, rests, cluster, g)
    for candidate in range(instance.decoding if slot == NONE else 0):
        admitted = cluster.requests[cluster.slot_request[g, candidate]].admitted
        if admitted > latest:
            slot, latest = candidate, admitted
    row, before = NONE, NONE
    previous, candidate = NONE, instance.filling
    while candidate != NONE:
        if cluster.requests[candidate].admitted > latest:
            row, before, latest = candidate, previous, cluster.requests[candidate].admitted
        previous, candidate = candidate, cluster.requests[candidate].next
    if row != NONE:
        cluster.requests[row].missing = cluster.requests[row].todo
        instance.taken -= cluster.requests[row].todo  # which had been counted as it was admitted
        if before == NONE:
            instance.filling = cluster.requests[row].next
        else:
            cluster.requests[before].next = cluster.requests[row].next
        instance.n_filling -= 1
    else:
        row = leave(cluster, g, slot)
        cluster.requests[row].missing = 0
        if isnan(cluster.requests[row].last_token):  # else it had sat this step out
            cluster.requests[row].last_token = scalars.now
    instance.load -= cluster.requests[row].context
    cluster.requests[row].resumes = PREEMPTED
    cluster.requests[row].freed = instance.taken
    cluster.requests[row].preemptions += 1
    scalars.preemptions += 1
    if rules.suspends == Suspends.NEWEST:
        queue_first(cluster, row, g)
    else:
        suspend(rules, rests, cluster, row, g)


@compiled_inline
def finish(cluster: Cluster, row: int, g: int, end: float) -> None:
    """Write a request that has ended to the output and free its row."""
    scalars = cluster.scalars[0]
    cluster.latencies[scalars.latencies % len(cluster.latencies)] = (
        end - cluster.requests[row].arrival
    )
    scalars.latencies += 1
    _write_out(cluster, row, g, end)
    scalars.last_end = max(scalars.last_end, end)


@compiled_inline
def turn_away(cluster: Cluster, row: int, g: int) -> None:
    """Write a request that an instance does not take to the output, and free its row."""
    _write_out(cluster, row, g, np.nan)


@compiled_inline
def _write_out(cluster: Cluster, row: int, g: int, end: float) -> None:
    scalars, request = cluster.scalars[0], cluster.requests[row]
    record = cluster.finished[scalars.finished]
    record.number = request.number
    record.instance = g
    record.arrival = request.arrival
    record.placed = request.placed
    record.start = request.start
    record.first_token = request.first_token
    record.end = end
    record.prompt = request.prompt
    record.output = request.output
    record.preemptions = request.preemptions
    record.migrations = request.migrations
    record.tpot_worst = request.tpot_worst
    record.client = request.client
    record.template = request.template
    settle_account(cluster, row, end)
    scalars.finished += 1
    if request.target != NONE:
        scalars.leaving -= 1
    cluster.free[scalars.free] = row
    scalars.free += 1
    scalars.in_system -= 1


_FEW_TOKENS = 2
"""In a block that is not full, when it is time for a copy, as `Migrator` has it."""


@compiled_core
def send_migrations(rules: Rules, cluster: Cluster, g: int) -> None:
    """Freeze the requests that are to move, after the step in which that was decided.

    With ``block_tokens`` they fill a block first. The source keeps a request's tokens in memory
    until the target has them.
    """
    instance, scalars = cluster.instances[g], cluster.scalars[0]
    slot = 0
    while slot < instance.decoding:
        request = cluster.requests[cluster.slot_request[g, slot]]
        target = request.target
        if target == NONE:
            slot += 1
            continue
        context = request.context + instance.grown
        if rules.block_tokens > 0 and context % rules.block_tokens > _FEW_TOKENS:
            slot += 1  # the copy is made when its block is full
            continue
        request.target = NONE
        scalars.leaving -= 1
        there = cluster.instances[target]
        tokens = there.load + there.queued_tokens + there.arriving_tokens + there.leaving_tokens
        tokens += context
        if occupied(cluster, target) >= rules.slots or tokens > rules.kv_capacity:
            slot += 1  # no longer room: it stays
            continue
        row = leave(cluster, g, slot)
        request.last_token = scalars.now
        instance.load -= request.context
        instance.leaving_tokens += request.context
        there.arriving += 1
        there.arriving_tokens += request.context
        move = cluster.moves[scalars.moving]
        move.request = row
        move.source = g
        move.target = target
        seconds = rules.handshake_seconds + request.context / rules.tokens_per_second
        move.arrives = scalars.now + seconds
        scalars.moving += 1


@compiled_inline
def land_migrations(cluster: Cluster) -> None:
    """Let requests whose tokens have arrived decode on their new instance."""
    scalars = cluster.scalars[0]
    kept = 0
    for i in range(scalars.moving):
        move = cluster.moves[i]
        if move.arrives > scalars.now:
            cluster.moves[kept] = cluster.moves[i]
            kept += 1
            continue
        request = cluster.requests[move.request]
        there = cluster.instances[move.target]
        cluster.instances[move.source].leaving_tokens -= request.context
        there.arriving -= 1
        there.arriving_tokens -= request.context
        request.migrations += 1
        request.landed = request.generated
        request.resumes = MIGRATED
        request.until = 0  # of steps elsewhere
        request.allowed = NONE
        scalars.migrations += 1
        queue_first(cluster, move.request, move.target)
    scalars.moving = kept


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
    request.until = 0
    request.allowed = NONE
    request.rest = 0.0
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
