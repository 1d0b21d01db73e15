"""Maximum capacity usage: to the instance with the most free KV cache."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.heuristics.fcfs import UNBOUNDED
from rescheduler.routing.inputs import RoutingInputs, passable, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["MaxCapacity", "max_capacity"]


@compiled
def max_capacity(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place requests where most tokens are free, in order of arrival.

    The parameters are [2] the reserve, and the steps after which a request is not passed any more.
    """
    held_back = 0
    capacity, load = inputs.capacity, inputs.load
    slots, room = inputs.slots, inputs.room
    reserve = parameters[0]
    known = bool(np.all(capacity < UNBOUNDED))
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        best, most = -1, 0
        for g in range(len(load)):
            if slots[g] <= 0 or room[g] < size:
                continue
            free = capacity[g] - load[g]
            kept = reserve * capacity[g]
            if reserve > 0 and load[g] > 0 and min(room[g], free) - size < kept:
                continue
            rank = free if known else -load[g]
            if best < 0 or rank > most or (rank == most and load[g] < load[best]):
                best, most = g, rank
        if best >= 0:
            place(inputs, target, i, best)
        elif passable(inputs, i, held_back, parameters[1]):
            held_back += 1
        else:
            return


@routing_policy("max_capacity")
@dataclass(frozen=True)
class MaxCapacity(RoutingPolicy):
    r"""The front of the queue to the worker with the most free KV tokens that can take it.

    .. math:: g = \arg\max_g \; (K_g - L_g)

    A request at the front that fits nowhere blocks those behind it. Ties go to the lowest load,
    then to the lowest index; where capacities are alike, this is the least load. That is also
    used while any capacity is unknown, since that instance would seem to have the most room. The
    paper decides once a second, ``every: 1``; one request a second would never serve 20, so that
    here as many as fit are placed then.

    Ours are ``reserve`` and ``starvation``. Running requests grow, and one for which there is no
    room is preempted. An instance that has requests takes another one only if this share of its
    cache stays free, :math:`K_g - L_g - s \ge \rho K_g`; else that one waits. Instant dispatch asks
    only once about each request, so that it needs ``every`` then.

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), C.3.2.

    Attributes:
        every: seconds between two decisions; 0 to decide whenever something happens.
        reserve: ρ, share of a KV cache that is kept free; 0 as in the paper.
        starvation: decode steps that a request which fits nowhere waits while others pass it, at
            most; 0 as in the paper, where it blocks those behind it.

    Raises:
        ValueError: a negative time or number of steps, or a reserve outside [0, 1).
    """

    needs = Needs.LOADS
    kernel = max_capacity

    every: float = 0.0
    reserve: float = 0.0
    starvation: int = 0

    def __post_init__(self) -> None:
        """Refuse a negative time, and a reserve that leaves nothing."""
        if not 0 <= self.every < np.inf:
            raise ValueError(f"max_capacity: every must be 0 seconds or more, not {self.every}")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"max_capacity: reserve must be in [0, 1), not {self.reserve}")
        if not isinstance(self.starvation, int) or self.starvation < 0:
            raise ValueError(
                f"max_capacity: starvation must be a whole number from 0, not {self.starvation!r}"
            )

    def parameters(self) -> npt.NDArray[np.float64]:
        """Return the reserve, and the steps after which a request is not passed."""
        return np.array([self.reserve, self.starvation], dtype=np.float64)

    def holds_back(self) -> bool:
        """Return whether a share is kept free."""
        return self.reserve > 0

    def decide_every(self) -> float:
        """Return the seconds between two decisions."""
        return self.every
