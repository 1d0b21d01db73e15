"""Which requests are on which instance, for decisions and for views of the cluster."""

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.cluster.cluster_view import CANNOT_MOVE, NEVER_MOVED
from rescheduler.simulator.engine.engine_state import NONE, Cluster

__all__ = ["gather_placed"]


@compiled_core
def gather_placed(cluster: Cluster) -> int:
    """Write ``cluster.placed`` as it is now, and return the number of requests.

    Instance after instance: those that decode, those in prefill, those queued. Requests that
    migrate come last, on the instance that they go to.
    """
    n = 0
    for g in range(len(cluster.instances)):
        instance = cluster.instances[g]
        for slot in range(instance.decoding):
            request = cluster.requests[cluster.slot_request[g, slot]]
            left = cluster.slot_end[g, slot] - instance.steps
            generated = request.output - left
            since_move = NEVER_MOVED
            if request.target != NONE:
                since_move = CANNOT_MOVE
            elif request.landed != NONE:
                since_move = generated - request.landed
            placed = cluster.placed[n]
            placed.row = cluster.slot_request[g, slot]
            placed.instance = g
            placed.context = request.context + instance.grown
            placed.generated = generated
            placed.left = left
            placed.since_move = since_move
            n += 1
        for row in (instance.filling, instance.queue_head):
            while row != NONE:
                _write_held(cluster, n, row, g)
                n += 1
                row = cluster.requests[row].next
    for move in range(cluster.scalars[0].moving):
        _write_held(cluster, n, cluster.moves[move].request, cluster.moves[move].target)
        n += 1
    return n


@compiled_inline
def _write_held(cluster: Cluster, i: int, row: int, g: int) -> None:
    """Write a request that does not decode now, so that its row says what it holds."""
    placed, request = cluster.placed[i], cluster.requests[row]
    placed.row = row
    placed.instance = g
    placed.context = request.context
    placed.generated = request.generated
    placed.left = request.output - request.generated
    placed.since_move = CANNOT_MOVE
