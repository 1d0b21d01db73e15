"""Policies that take the pool in an order, and each request of it to an instance with room."""

from dataclasses import dataclass

import numpy as np

from predictor.compilation import compiled
from rescheduler.cluster.cluster_view import UNLIMITED
from rescheduler.cluster.registry import COUNT
from rescheduler.routing.inputs import (
    FloatArray,
    IntArray,
    RoutingInputs,
    best_by_load,
    fits,
    place,
    settle,
)
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["FCFS", "UNBOUNDED", "MaxMin", "MinMin", "Throttled"]


UNBOUNDED = UNLIMITED // 2
"""Slots or tokens from which on nothing limits an instance: it lets requests queue, or has not
reported its KV capacity."""


@compiled
def fcfs(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Fill the instances in turn; stop at the first request that fits nowhere."""
    queued = inputs.queued
    for i in range(len(inputs.size)):
        best, shortest = -1, 0
        for g in range(len(queued)):
            if not fits(inputs, i, g):
                continue
            queue = 0
            if inputs.slots[g] >= UNBOUNDED:
                lacks_room = inputs.load[g] + inputs.size[i] > inputs.capacity[g]
                queue = queued[g] + (1 if lacks_room else 0)
            if best < 0 or queue < shortest:
                best, shortest = g, queue
            if queue == 0:
                break
        if best < 0:
            return
        place(inputs, target, i, best)
        queued[best] += 1


@routing_policy("fcfs")
@dataclass(frozen=True)
class FCFS(RoutingPolicy):
    r"""First come, first served: the first request to the first worker with a place.

    Workers are filled to their capacity in increasing index, requests leave the pool strictly in
    order of arrival, and the head of the pool blocks those behind it when it fits nowhere.

    Where slots are unlimited (instant dispatch: an instance takes a request at any time and lets
    it queue), the same rule is read from the instances' queues, since a place is free exactly
    where nobody waits for one: the request goes to the lowest-indexed instance with an empty
    queue and KV room, and if there is none, to the lowest-indexed of those with the fewest
    requests queued (one more counted where KV room is lacking).

    Source: A Universal Load Balancing Principle (Chen et al. 2026), Appendix B, Algorithm 2.
    """

    needs = Needs.COUNTS
    kernel = fcfs


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


@compiled
def max_min(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place the request completed last first."""
    assign_by_completion(inputs, target, True)


@routing_policy("max_min")
@dataclass(frozen=True)
class MaxMin(RoutingPolicy):
    r"""The request whose earliest completion is the latest, to the worker of that completion.

    .. math:: i = \arg\max_i \min_g \mathrm{ECT}_{ig}, \qquad
              g = \arg\min_g \mathrm{ECT}_{ig}, \qquad \mathrm{ECT}_{ig} = W_g + \hat R_i

    with the times, and the ties, of `MinMin`. Long requests go first, so that short ones fill
    what they leave uneven.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1.
    """

    needs = Needs.LENGTHS
    kernel = max_min


@compiled
def throttled(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Send each request, in order of arrival, to the first instance below the threshold."""
    limit = int(parameters[0])
    running = inputs.running
    for i in range(len(inputs.size)):
        best = -1
        for g in range(len(running)):
            if not fits(inputs, i, g):
                continue
            if running[g] < limit:
                best = g
                break
            if inputs.slots[g] >= UNBOUNDED and (best < 0 or running[g] < running[best]):
                best = g
        if not settle(inputs, target, i, best):
            return


@routing_policy("throttled")
@dataclass(frozen=True)
class Throttled(RoutingPolicy, limit=COUNT):
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

    def parameters(self) -> FloatArray:
        """Return the threshold."""
        return np.array([self.limit], dtype=np.float64)
