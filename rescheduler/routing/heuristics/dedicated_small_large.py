"""Dedicated small-large: some instances for long outputs only, the others for short ones."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["DedicatedSmallLarge", "dedicated_small_large"]


@compiled
def dedicated_small_large(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, among the instances of its class."""
    heavy_tokens, share = parameters[0], parameters[1]
    running, slots, room = inputs.running, inputs.slots, inputs.room
    n_instances = len(running)
    n_heavy = min(max(int(share * n_instances + 0.5), 1), n_instances - 1)
    for i in range(len(inputs.size)):
        heavy = inputs.remaining[i] >= heavy_tokens
        first, last = (0, n_heavy) if heavy else (n_heavy, n_instances)
        if n_instances == 1:
            first, last = 0, 1
        size = inputs.size[i]
        best = -1
        for g in range(first, last):
            if slots[g] > 0 and room[g] >= size and (best < 0 or running[g] < running[best]):
                best = g
        if best >= 0:
            place(inputs, target, i, best)
        elif full(inputs):
            return


@routing_policy("dedicated_small_large")
@dataclass(frozen=True)
class DedicatedSmallLarge(RoutingPolicy):
    """Heavy decodes to the first workers, light ones to the others, however idle the first are.

    The paper has two workers, one for each class. With more, ``share`` of them (rounded, at least
    one, and never all) are for heavy decodes, and within a class the fewest requests decide, the
    lowest index on ties. A single worker serves both. The paper calls a decode heavy from five
    seconds on; the default threshold is that at 20 ms a token.

    Attributes:
        heavy_tokens: expected remaining tokens from which on a request is heavy, above 0.
        share: of the instances that is for heavy requests, in (0, 1).

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), C.2.4 and section 3.
    """

    heavy_tokens: float = 250.0
    share: float = 0.5

    needs = Needs.LENGTHS
    kernel = dedicated_small_large

    def __post_init__(self) -> None:
        """Refuse a threshold or a share that leaves a class empty.

        Raises:
            ValueError: an option out of range.
        """
        if not self.heavy_tokens > 0:
            raise ValueError(
                f"dedicated_small_large: heavy_tokens is {self.heavy_tokens}; it must be above 0"
            )
        if not 0 < self.share < 1:
            raise ValueError(
                f"dedicated_small_large: share is {self.share}; it must be between 0 and 1"
            )

    def parameters(self) -> npt.NDArray[np.float64]:
        """Return the threshold and the share."""
        return np.array([self.heavy_tokens, self.share])
