"""Policies that take the pool in an order, and each request of it to an instance with room."""

from dataclasses import dataclass

import numpy as np

from predictor.compilation import compiled
from rescheduler.cluster.cluster_view import UNLIMITED
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
def round_robin(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Send each request, in order of arrival, to the instance whose turn it is."""
    n_instances = len(inputs.slots)
    for i in range(len(inputs.size)):
        turn = inputs.dispatched[0] % n_instances
        best = -1
        for step in range(n_instances):
            g = (turn + step) % n_instances
            if fits(inputs, i, g):
                best = g
                break
        if not settle(inputs, target, i, best):
            return


@routing_policy("round_robin")
@dataclass(frozen=True)
class RoundRobin(RoutingPolicy):
    r"""The k-th request dispatched goes to worker :math:`k \bmod G`.

    Where it does not fit there, it goes to the next worker in the circle that it fits; the turn
    is counted by requests dispatched, so it goes on as if it had not happened.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1; Performance Aware LLM
    Load Balancer (Jain et al. 2025), C.2.5.
    """

    needs = Needs.COUNTS
    kernel = round_robin


@compiled
def min_min(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place the request whose best completion is the first, until none fits.

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
            if chosen < 0 or time < completion:
                chosen, completion = i, time
        if chosen < 0:
            return
        g = best[chosen]
        place(inputs, target, chosen, g)
        for i in range(n):
            if best[i] == g and target[i] < 0:
                best[i] = best_by_load(inputs, i, inputs.work)


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
