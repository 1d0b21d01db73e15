"""Random: each request to any instance it fits, by a counter-based generator."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.cluster.splitmix import splitmix64
from rescheduler.routing.inputs import RoutingInputs, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["RandomChoice", "check_seed", "draw", "random_choice"]

MOST_SEED = 2**53
"""Seeds travel among the kernel's numbers, which are exact below this."""


@compiled
def draw(seed: int, counter: int, which: int, n: int) -> int:
    """Return the ``which``-th number below n that belongs to a seed and a counter."""
    key = splitmix64(splitmix64(np.uint64(seed)) + np.uint64(counter))
    return np.int64(splitmix64(key + np.uint64(which)) % np.uint64(n))  # type: ignore[return-value]


def check_seed(name: str, seed: int) -> None:
    """Refuse a seed that does not fit among a kernel's numbers.

    Raises:
        ValueError: the seed is negative or too large.
    """
    if not 0 <= seed < MOST_SEED:
        raise ValueError(f"{name}: seed is {seed}; it must be from 0 to 2**53 - 1")


@compiled
def random_choice(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, on one of the instances it fits."""
    seed = int(parameters[0])
    slots, room = inputs.slots, inputs.room
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        n_fitting = 0
        for g in range(len(slots)):
            n_fitting += slots[g] > 0 and room[g] >= size
        if n_fitting == 0:
            if full(inputs):
                return
            continue
        skip = draw(seed, inputs.dispatched[0], 0, n_fitting)
        for g in range(len(slots)):
            if slots[g] > 0 and room[g] >= size:
                if skip == 0:
                    place(inputs, target, i, g)
                    break
                skip -= 1


@routing_policy("random")
@dataclass(frozen=True)
class RandomChoice(RoutingPolicy):
    """Uniformly one of the instances that a request fits.

    The choice is a hash of the seed and of the number of requests dispatched before: the same
    view gives the same choice, and no generator has to be kept.

    Attributes:
        seed: from 0 to 2^53 - 1.
    """

    seed: int = 0

    needs = Needs.COUNTS
    kernel = random_choice

    def __post_init__(self) -> None:
        """Refuse a seed out of range.

        Raises:
            ValueError: the seed is negative or too large.
        """
        check_seed("random", self.seed)

    def parameters(self) -> npt.NDArray[np.float64]:
        """Return the seed."""
        return np.array([self.seed], dtype=np.float64)
