"""Min-min: next the request that is completed soonest, where it is completed soonest."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, best_by_load, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["MinMin", "assign_by_completion", "min_min"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@compiled
def assign_by_completion(inputs: RoutingInputs, target: IntArray, latest_first: bool) -> None:
    """Place the request whose best completion is the first (or the last), until none fits.

    Since work only grows and places only vanish, a request's best instance stays the best until
    something is placed there: O(n) a placement, and O(G) for each request that has to look again.
    """
    n = len(inputs.size)
    best = np.empty(n, dtype=np.int64)
    for i in range(n):
        best[i] = best_by_load(inputs, i, inputs.work)
    while True:
        chosen, completion = -1, 0.0
        for i in range(n):
            if target[i] >= 0 or best[i] < 0:
                continue
            time = inputs.work[best[i]] + inputs.remaining[i]
            if chosen < 0 or (time > completion if latest_first else time < completion):
                chosen, completion = i, time
        if chosen < 0:
            return
        g = best[chosen]
        place(inputs, target, chosen, g)
        for i in range(n):
            if best[i] == g and target[i] < 0:
                best[i] = best_by_load(inputs, i, inputs.work)


@compiled
def min_min(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place the request completed soonest first."""
    assign_by_completion(inputs, target, False)


@routing_policy("min_min")
@dataclass(frozen=True)
class MinMin(RoutingPolicy):
    r"""The pair of request and worker with the earliest completion, again and again.

    .. math:: (i, g) = \arg\min_{i, g} \; \mathrm{ECT}_{ig}, \qquad
              \mathrm{ECT}_{ig} = W_g + \hat R_i

    W_g is the ready time of worker g: the tokens still expected from its requests, those placed
    a moment ago included; R̂_i is the processing time of request i: the tokens expected of it.
    This counts a worker's tokens as if it generated them one after another; workers are alike,
    so a factor for how many it generates at once would change nothing. The second source adds
    the prompt to R̂_i, which its workers still have to process; requests here are prefilled. As
    it says, on like workers this is shortest job first. Ties go to the earliest arrival, the lowest
    load and the lowest index. With instant dispatch it is `DecodeBalancer`.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1; Performance Aware LLM
    Load Balancer (Jain et al. 2025), C.3.3.
    """

    needs = Needs.LENGTHS
    kernel = min_min
