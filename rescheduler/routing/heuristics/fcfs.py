"""FCFS: workers filled in increasing index, requests in strict order of arrival."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.cluster.cluster_view import UNLIMITED
from rescheduler.routing.inputs import RoutingInputs, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["FCFS", "UNBOUNDED", "fcfs"]

UNBOUNDED = UNLIMITED // 2
"""Slots or tokens from which on nothing limits an instance: it lets requests queue, or has not
reported its KV capacity."""


@compiled
def fcfs(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Fill the instances in turn; stop at the first request that fits nowhere."""
    slots, room, queued = inputs.slots, inputs.room, inputs.queued
    load, capacity = inputs.load, inputs.capacity
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        best, shortest = -1, 0
        for g in range(len(slots)):
            if slots[g] <= 0 or room[g] < size:
                continue
            queue = 0
            if slots[g] >= UNBOUNDED:
                queue = queued[g] + (1 if load[g] + size > capacity[g] else 0)
            if best < 0 or queue < shortest:
                best, shortest = g, queue
            if queue == 0:
                break
        if best < 0:
            return
        place(inputs, target, i, best)
        queued[best] += 1


@routing_policy("fcfs")
@dataclass(frozen=True)
class FCFS(RoutingPolicy):
    r"""First come, first served: the first request to the first worker with a place.

    Workers are filled to their capacity in increasing index, requests leave the pool strictly in
    order of arrival, and the head of the pool blocks those behind it when it fits nowhere.

    Where slots are unlimited (instant dispatch: an instance takes a request at any time and lets
    it queue), the same rule is read from the instances' queues, since a place is free exactly
    where nobody waits for one: the request goes to the lowest-indexed instance with an empty
    queue and KV room, and if there is none, to the lowest-indexed of those with the fewest
    requests queued (one more counted where KV room is lacking).

    Source: A Universal Load Balancing Principle (Chen et al. 2026), Appendix B, Algorithm 2.
    """

    needs = Needs.COUNTS
    kernel = fcfs
