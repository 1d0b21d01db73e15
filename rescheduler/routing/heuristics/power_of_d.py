"""Power of d: the best of a few instances chosen at random."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.heuristics.random_choice import check_seed, draw
from rescheduler.routing.inputs import RoutingInputs, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["PowerOfD", "power_of_d"]


@compiled
def power_of_d(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, on the least of d sampled instances."""
    seed, d, by_load = int(parameters[0]), int(parameters[1]), parameters[2] > 0
    queue = inputs.load if by_load else inputs.running
    slots, room = inputs.slots, inputs.room
    sample = np.empty(len(queue), dtype=np.int64)
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        n_fitting = 0
        for g in range(len(queue)):
            if slots[g] > 0 and room[g] >= size:
                sample[n_fitting] = g
                n_fitting += 1
        best = -1
        for drawn in range(min(d, n_fitting)):
            # The first places of a shuffle, one at a time: distinct instances.
            at = drawn + draw(seed, inputs.dispatched[0], drawn, n_fitting - drawn)
            g = sample[at]
            sample[at] = sample[drawn]
            if best < 0 or queue[g] < queue[best] or (queue[g] == queue[best] and g < best):
                best = g
        if best >= 0:
            place(inputs, target, i, best)
        elif full(inputs):
            return


@routing_policy("power_of_d")
@dataclass(frozen=True)
class PowerOfD(RoutingPolicy):
    """The shortest queue among d distinct instances sampled uniformly.

    The sample is drawn from the instances that the request fits, by a hash as in `RandomChoice`;
    ties go to the lowest index.

    Attributes:
        d: instances sampled, at least 1; all of them if there are fewer.
        metric: what a queue is measured by: ``requests`` on the instance, or KV ``load``.
        seed: from 0 to 2^53 - 1.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1.
    """

    d: int = 2
    metric: Literal["requests", "load"] = "requests"
    seed: int = 0

    needs = Needs.COUNTS
    kernel = power_of_d

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, measured or hashed; loads have to be known.

        Raises:
            ValueError: an option out of range.
        """
        if self.d < 1:
            raise ValueError(f"power_of_d: d is {self.d}; it samples at least one instance")
        if self.metric not in ("requests", "load"):
            raise ValueError(f"power_of_d: metric is {self.metric!r}; choose requests or load")
        check_seed("power_of_d", self.seed)
        if self.metric == "load":
            object.__setattr__(self, "needs", Needs.LOADS)

    def parameters(self) -> npt.NDArray[np.float64]:
        """Return the seed, d, and whether loads are compared."""
        return np.array([self.seed, self.d, self.metric == "load"], dtype=np.float64)
