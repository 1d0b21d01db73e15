"""Maximum capacity usage: to the instance with the most free KV cache."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rescheduler.compilation import compiled
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy
from rescheduler.routing.problem import RoutingProblem, place

__all__ = ["MaxCapacity", "max_capacity"]


@compiled
def max_capacity(
    problem: RoutingProblem,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place the head of the pool where most tokens are free, until it fits nowhere."""
    capacity, load = problem.capacity, problem.load
    slots, room = problem.slots, problem.room
    for i in range(len(problem.size)):
        size = problem.size[i]
        best, most = -1, 0
        for g in range(len(load)):
            if slots[g] <= 0 or room[g] < size:
                continue
            free = capacity[g] - load[g]
            if best < 0 or free > most or (free == most and load[g] < load[best]):
                best, most = g, free
        if best < 0:
            return
        place(problem, target, i, best)


@routing_policy("max_capacity")
@dataclass(frozen=True)
class MaxCapacity(RoutingPolicy):
    r"""The front of the queue to the worker with the most free KV tokens that can take it.

    .. math:: g = \arg\max_g \; (K_g - L_g)

    A request at the front that fits nowhere blocks those behind it. Ties go to the lowest load,
    then to the lowest index; where capacities are alike, unlimited ones included, this is the
    least load. The paper decides once a second: when to ask is not the policy's to say.

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), C.3.2.
    """

    needs = Needs.LOADS
    kernel = max_capacity
