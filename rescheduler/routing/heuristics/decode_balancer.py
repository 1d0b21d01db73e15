"""Decode balancer: to the instance with the fewest tokens still to generate."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy
from rescheduler.routing.problem import RoutingProblem, best_by_load, full, place

__all__ = ["DecodeBalancer", "decode_balancer"]


@compiled
def decode_balancer(
    problem: RoutingProblem,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where the least work is left."""
    for i in range(len(problem.size)):
        best = best_by_load(problem, i, problem.work)
        if best >= 0:
            place(problem, target, i, best)
        elif full(problem):
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
