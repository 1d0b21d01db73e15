"""Join the shortest queue, in tokens: to the instance with the fewest left to process."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, best_by_load, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["JSQTokens", "jsq_tokens"]


@compiled
def jsq_tokens(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where the fewest tokens are left to process."""
    left = inputs.work + inputs.unanswered
    for i in range(len(inputs.size)):
        best = best_by_load(inputs, i, left)
        if best >= 0:
            left[best] += inputs.size[i] + inputs.remaining[i]
            place(inputs, target, i, best)
        elif full(inputs):
            return


@routing_policy("jsq_tokens")
@dataclass(frozen=True)
class JSQTokens(RoutingPolicy):
    r"""The instance with the least number of prompt and decode tokens yet to be processed.

    .. math:: g = \arg\min_g \sum_{i \in g} (p_i [n_i = 0] + \hat R_i)

    A prompt counts in whole until its request has a token. Where requests come prefilled this is
    `DecodeBalancer`. Ties go to the lowest load, then to the lowest index.

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), C.3.1.
    """

    needs = Needs.LENGTHS
    kernel = jsq_tokens
