"""Decode balancer: to the instance with the fewest tokens still to generate."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, best_by_load, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["DecodeBalancer", "decode_balancer"]


@compiled
def decode_balancer(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where the least work is left."""
    for i in range(len(inputs.size)):
        best = best_by_load(inputs, i, inputs.work)
        if best >= 0:
            place(inputs, target, i, best)
        elif full(inputs):
            return


@routing_policy("decode_balancer")
@dataclass(frozen=True)
class DecodeBalancer(RoutingPolicy):
    r"""Balance the sum of decode tokens: :math:`g = \arg\min_g \sum_{i \in g} \hat R_i`.

    The paper knows every output length; here it is the forecast's mean, and with an oracle the
    truth. Ties go to the lowest load, then to the lowest index. The paper's Join Shortest Queue
    (C.3.1, least prompt and decode tokens yet to be processed) is `JSQTokens`, which is the same
    once prompts are processed elsewhere, as those of requests that a decode instance gets are.

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), C.2.6.
    """

    needs = Needs.LENGTHS
    kernel = decode_balancer
