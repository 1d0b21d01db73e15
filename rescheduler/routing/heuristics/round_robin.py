"""Round robin: the instances take turns."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy
from rescheduler.routing.problem import RoutingProblem, full, place

__all__ = ["RoundRobin", "round_robin"]


@compiled
def round_robin(
    problem: RoutingProblem,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Send each request, in order of arrival, to the instance whose turn it is."""
    slots, room = problem.slots, problem.room
    n_instances = len(slots)
    for i in range(len(problem.size)):
        size = problem.size[i]
        turn = problem.dispatched[0] % n_instances
        best = -1
        for step in range(n_instances):
            g = (turn + step) % n_instances
            if slots[g] > 0 and room[g] >= size:
                best = g
                break
        if best >= 0:
            place(problem, target, i, best)
        elif full(problem):
            return


@routing_policy("round_robin")
@dataclass(frozen=True)
class RoundRobin(RoutingPolicy):
    r"""The k-th request dispatched goes to worker :math:`k \bmod G`.

    Where it does not fit there, it goes to the next worker in the circle that it fits; the turn
    is counted by requests dispatched, so it goes on as if it had not happened.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1; Performance Aware LLM
    Load Balancer (Jain et al. 2025), C.2.5.
    """

    needs = Needs.COUNTS
    kernel = round_robin
