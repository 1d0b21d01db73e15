"""Requests that move from one instance to another with their context."""

from rescheduler.compilation import compiled_core
from rescheduler.simulator.engine_state import MIGRATED, NONE, Cluster, Rules
from rescheduler.simulator.instance_queue import queue_first
from rescheduler.simulator.slots import leave

__all__ = ["land_migrations", "send_migrations"]


@compiled_core
def send_migrations(rules: Rules, cluster: Cluster, g: int) -> None:
    """Freeze the requests that are to move, after the step in which that was decided.

    The source keeps a request's tokens in memory until the target has them.
    """
    instance, scalars = cluster.instances[g], cluster.scalars[0]
    slot = 0
    while slot < instance.decoding:
        target = cluster.requests[cluster.slot_request[g, slot]].target
        if target == NONE:
            slot += 1
            continue
        row = leave(cluster, g, slot)
        request = cluster.requests[row]
        request.target = NONE
        scalars.leaving -= 1
        there = cluster.instances[target]
        taken = there.decoding + there.filling + there.queued + there.arriving
        tokens = there.load + there.queued_tokens + there.arriving_tokens + there.leaving_tokens
        if taken >= rules.slots or tokens + request.context > rules.kv_capacity:
            # No longer room: it stays where it is, and nothing has happened to it.
            cluster.slot_request[g, instance.decoding] = row
            cluster.slot_end[g, instance.decoding] = (
                instance.steps + request.output - request.generated
            )
            instance.next_end = min(instance.next_end, cluster.slot_end[g, instance.decoding])
            instance.decoding += 1
            request.context -= instance.grown
            continue
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


@compiled_core
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
        request.resumes = MIGRATED
        scalars.migrations += 1
        queue_first(cluster, move.request, move.target)
    scalars.moving = kept
