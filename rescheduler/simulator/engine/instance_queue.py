"""What has been placed on an instance and has not started: a linked list each."""

from math import isnan

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.simulator.engine.engine_state import (
    BIN_PACKING,
    CHUNKED,
    FCFS,
    NONE,
    Cluster,
    Rules,
)

__all__ = ["admit", "queue", "queue_first", "take"]


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


@compiled_core
def admit(rules: Rules, cluster: Cluster, g: int) -> int:
    """Take the request that an instance starts next out of its queue, or return NONE."""
    instance = cluster.instances[g]
    head = instance.queue_head
    taken = instance.decoding + instance.n_filling + instance.arriving
    if head == NONE or taken >= rules.slots:
        return NONE
    room = rules.kv_capacity - instance.load - instance.arriving_tokens - instance.leaving_tokens
    chosen, before = head, NONE
    if rules.batching != FCFS and cluster.requests[head].resumes == NONE:
        chosen = NONE
        previous, row = NONE, head
        while row != NONE:
            candidate = cluster.requests[row]
            better = chosen == NONE
            if rules.batching == BIN_PACKING:
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
    if isnan(request.start):
        request.start = scalars.now
    if rules.prefill == CHUNKED:
        instance.load += request.context
