"""Policies of one rule each: the pool in an order, or each request to the least load."""

from dataclasses import dataclass
from typing import Literal

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
    place_by_score,
    place_least,
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


@compiled
def jsq(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where the fewest requests are."""
    place_least(inputs, target, inputs.running)


@routing_policy("jsq")
@dataclass(frozen=True)
class JSQ(RoutingPolicy):
    r"""Join the shortest queue, in requests: :math:`g = \arg\min_g N_g`, started or not.

    Ties go to the lowest index: a balancer that counts requests knows no loads to break them by.
    The queue of tokens still to be processed is `decode_balancer`, that of tokens held `jsq_load`.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1.
    """

    needs = Needs.COUNTS
    kernel = jsq


@compiled
def jsq_load(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where the load is least."""
    place_least(inputs, target, inputs.load)


@routing_policy("jsq_load")
@dataclass(frozen=True)
class JSQLoad(RoutingPolicy):
    r"""Join the shortest queue, in tokens: :math:`g = \arg\min_g L_g`.

    The greedy step that most lowers :math:`\sum_g (L_g - \bar L)^2`. Ties go to the lowest index.

    Source: The EP Barrier Tax (Li 2026), 'A Simple but Strong Baseline'.
    """

    needs = Needs.LOADS
    kernel = jsq_load


@compiled
def jsq_tokens(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where the fewest tokens are left to process."""
    left = inputs.work + inputs.unanswered
    place_by_score(inputs, target, left, inputs.size + inputs.remaining)


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


@compiled
def decode_balancer(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where the least work is left."""
    place_by_score(inputs, target, inputs.work.copy(), inputs.remaining)


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


@compiled
def vllm_score(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where vLLM's score is least."""
    queue_weight, pressure_weight, rotates = parameters[0], parameters[1], parameters[2] > 0
    running, queued = inputs.running, inputs.queued
    n_instances = len(running)
    for i in range(len(inputs.size)):
        first = inputs.dispatched[0] % n_instances if rotates else 0
        best, least = -1, 0.0
        for step in range(n_instances):
            g = (first + step) % n_instances
            if not fits(inputs, i, g):
                continue
            waiting = queued[g]
            started = running[g] - waiting
            usage = min(inputs.load[g] / inputs.capacity[g], 1.0)
            pressure = pressure_weight * max(0.0, usage - 0.5)
            score = started + waiting * (queue_weight + pressure)
            if best < 0 or score < least:
                best, least = g, score
        if best >= 0:
            queued[best] += 1  # vLLM counts what it routes as waiting until the engine reports
        if not settle(inputs, target, i, best):
            return


@routing_policy("vllm")
@dataclass(frozen=True)
class VLLMScore(RoutingPolicy):
    r"""The engine that vLLM's data-parallel client would choose.

    .. math:: \text{0.32:}\; w + r + 6\,w\,\max(0, u - \tfrac12), \qquad
              \text{0.20:}\; 4 w + r

    with w requests waiting at the engine, r running there and u the share of its KV cache in
    use. The least score wins. Version 0.32 begins to look one engine further at every request,
    so equal scores take turns; version 0.20 takes the lowest index. Tokens of requests that
    have not started are part of u here, and of nothing in vLLM, whose cache does not hold them.
    The client's own count of requests in flight, which 0.32 does not let w + r fall below, is
    w + r here, where no report is late.

    Attributes:
        version: of vLLM.

    Source: ``DPLBAsyncMPClient.get_core_engine_for_request`` of the two versions; for 0.20 also
    The EP Barrier Tax (Li 2026), 'Real EP serving experiments'.
    """

    version: Literal["0.32", "0.20"] = "0.32"

    needs = Needs.LOADS
    kernel = vllm_score

    def parameters(self) -> FloatArray:
        """Return the weights of the queue and of KV pressure, and whether ties take turns."""
        return np.array([1.0, 6.0, 1.0] if self.version == "0.32" else [4.0, 0.0, 0.0])


@compiled
def pab(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where the budget is greatest."""
    place_by_score(inputs, target, -inputs.budget, inputs.size.astype(np.float64))


@routing_policy("pab")
@dataclass(frozen=True)
class PAB(RoutingPolicy):
    r"""The engine with the greatest prefill admission budget, :math:`g = \arg\max_g PAB_g`.

    Every engine reports with each batch how many more prompt tokens it could compute within a
    TTFT without its tokens being late (`prefill_budget`). Whoever routes subtracts the prompts
    that it has sent there since. Ties go to the lowest load, then to the lowest index. The paper
    asks for a suitable engine with sufficient budget; the greatest budget is one if any is.

    Source: FairBatching (Lyu et al. 2025), §3.4.
    """

    needs = Needs.LOADS
    needs_budget = True
    kernel = pab
