"""Round robin: the instances take turns."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["RoundRobin", "round_robin"]


@compiled
def round_robin(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Send each request, in order of arrival, to the instance whose turn it is."""
    slots, room = inputs.slots, inputs.room
    n_instances = len(slots)
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        turn = inputs.dispatched[0] % n_instances
        best = -1
        for step in range(n_instances):
            g = (turn + step) % n_instances
            if slots[g] > 0 and room[g] >= size:
                best = g
                break
        if best >= 0:
            place(inputs, target, i, best)
        elif full(inputs):
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
