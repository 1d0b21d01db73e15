"""Requests that move from one instance to another with their context."""

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.simulator.engine.engine_state import MIGRATED, NONE, Cluster, Rules
from rescheduler.simulator.engine.instance_queue import queue_first
from rescheduler.simulator.engine.slots import leave, occupied

__all__ = ["land_migrations", "send_migrations"]

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
        scalars.migrations += 1
        queue_first(cluster, move.request, move.target)
    scalars.moving = kept
