"""Maximum capacity usage: to the instance with the most free KV cache."""

from dataclasses import dataclass

import numpy as np

from predictor.compilation import compiled
from rescheduler.cluster.registry import NOT_NEGATIVE, POSITIVE
from rescheduler.routing.heuristics.pool_order import UNBOUNDED
from rescheduler.routing.inputs import (
    FloatArray,
    IntArray,
    RoutingInputs,
    fits,
    passable,
    place,
    settle,
)
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["DedicatedSmallLarge", "MaxCapacity"]


@compiled
def max_capacity(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place requests where most tokens are free, in order of arrival.

    The parameters are [2] the reserve, and the steps after which a request is not passed any more.
    """
    held_back = 0
    capacity, load = inputs.capacity, inputs.load
    reserve = parameters[0]
    known = bool(np.all(capacity < UNBOUNDED))
    for i in range(len(inputs.size)):
        best, most = -1, 0
        for g in range(len(load)):
            if not fits(inputs, i, g):
                continue
            free = capacity[g] - load[g]
            left = min(inputs.room[g], free) - inputs.size[i]
            if reserve > 0 and load[g] > 0 and left < reserve * capacity[g]:
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
class MaxCapacity(RoutingPolicy, every=NOT_NEGATIVE, reserve="[0, 1)", starvation=NOT_NEGATIVE):
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
    """

    needs = Needs.LOADS
    kernel = max_capacity

    every: float = 0.0
    reserve: float = 0.0
    starvation: int = 0

    def parameters(self) -> FloatArray:
        """Return the reserve, and the steps after which a request is not passed."""
        return np.array([self.reserve, self.starvation], dtype=np.float64)

    def holds_back(self) -> bool:
        """Return whether a share is kept free."""
        return self.reserve > 0

    def decide_every(self) -> float:
        """Return the seconds between two decisions."""
        return self.every


@compiled
def dedicated_small_large(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, among the instances of its class."""
    heavy_tokens, share = parameters[0], parameters[1]
    running = inputs.running
    n_instances = len(running)
    n_heavy = min(max(int(share * n_instances + 0.5), 1), n_instances - 1)
    for i in range(len(inputs.size)):
        heavy = inputs.remaining[i] >= heavy_tokens
        first, last = (0, n_heavy) if heavy else (n_heavy, n_instances)
        if n_instances == 1:
            first, last = 0, 1
        best = -1
        for g in range(first, last):
            if fits(inputs, i, g) and (best < 0 or running[g] < running[best]):
                best = g
        if not settle(inputs, target, i, best):
            return


@routing_policy("dedicated_small_large")
@dataclass(frozen=True)
class DedicatedSmallLarge(RoutingPolicy, heavy_tokens=POSITIVE, share="(0, 1)"):
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

    def parameters(self) -> FloatArray:
        """Return the threshold and the share."""
        return np.array([self.heavy_tokens, self.share])
