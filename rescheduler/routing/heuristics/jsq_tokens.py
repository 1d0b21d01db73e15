"""Join the shortest queue, in tokens: to the instance with the fewest left to process."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy
from rescheduler.routing.problem import RoutingProblem, best_by_load, full, place

__all__ = ["JSQTokens", "jsq_tokens"]


@compiled
def jsq_tokens(
    problem: RoutingProblem,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where the fewest tokens are left to process."""
    left = problem.work + problem.unanswered
    for i in range(len(problem.size)):
        best = best_by_load(problem, i, left)
        if best >= 0:
            left[best] += problem.size[i] + problem.remaining[i]
            place(problem, target, i, best)
        elif full(problem):
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
