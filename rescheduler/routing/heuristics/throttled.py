"""Throttled: the first instance below a number of requests."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.heuristics.fcfs import UNBOUNDED
from rescheduler.routing.inputs import RoutingInputs, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["Throttled", "throttled"]


@compiled
def throttled(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Send each request, in order of arrival, to the first instance below the threshold."""
    limit = int(parameters[0])
    running, slots, room = inputs.running, inputs.slots, inputs.room
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        best = -1
        for g in range(len(running)):
            if slots[g] <= 0 or room[g] < size:
                continue
            if running[g] < limit:
                best = g
                break
            if slots[g] >= UNBOUNDED and (best < 0 or running[g] < running[best]):
                best = g
        if best >= 0:
            place(inputs, target, i, best)
        elif full(inputs):
            return


@routing_policy("throttled")
@dataclass(frozen=True)
class Throttled(RoutingPolicy):
    """The lowest-indexed worker with fewer requests than a threshold; none, and it waits.

    Where slots are unlimited (instant dispatch) nothing can wait: above the threshold everywhere,
    a request goes where the fewest are, as if all thresholds were raised by as much as it takes.

    Attributes:
        limit: requests on a worker from which on it gets no more, at least 1.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1.
    """

    limit: int = 64

    needs = Needs.COUNTS
    kernel = throttled

    def __post_init__(self) -> None:
        """Refuse a threshold that nothing passes.

        Raises:
            ValueError: the limit is below 1.
        """
        if self.limit < 1:
            raise ValueError(f"throttled: limit is {self.limit}; no instance would get a request")

    def parameters(self) -> npt.NDArray[np.float64]:
        """Return the threshold."""
        return np.array([self.limit], dtype=np.float64)
