"""Policies that go by the room for the KV cache: the most of it, and by probability."""

from dataclasses import dataclass

import numpy as np

from predictor.compilation import compiled, compiled_inline
from predictor.forecasts.curve import overflow_bound
from rescheduler.cluster.registry import NOT_NEGATIVE, POSITIVE
from rescheduler.routing.heuristics import UNBOUNDED
from rescheduler.routing.inputs import (
    FloatArray,
    IntArray,
    RoutingInputs,
    fits,
    passable,
    place,
    settle,
)
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy, spaced_points

FURTHEST = 16_384
"""Steps ahead of the last point. Half the load has ended long before, or the cache is full."""


@compiled
def headroom(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request where an overflow costs least, if little enough, in order of arrival.

    The parameters are [3] ε, β / a, and the steps after which a request is not passed any more.
    """
    held_back = 0
    load, running = inputs.load, inputs.running
    known = bool(np.all(inputs.capacity < UNBOUNDED))  # else an unknown one would get everything
    for i in range(len(inputs.size)):
        best, least = -1, np.inf
        for g in range(len(load)):
            if not fits(inputs, i, g):
                continue
            risk = _lost(inputs, i, g) * parameters[1] * (running[g] + 1)
            if risk > parameters[0] and running[g] > 0:
                continue
            rank = risk if known else float(load[g])
            if rank < least or (rank == least and load[g] < load[best]):
                best, least = g, rank
        if best >= 0:
            place(inputs, target, i, best)
            continue
        if not passable(inputs, i, held_back, parameters[2]):
            return
        held_back += 1


@compiled_inline
def _lost(inputs: RoutingInputs, i: int, g: int) -> float:
    """Return the tokens computed again for one gained, with i on g, at the worst step."""
    size, growth, survival = inputs.size[i], inputs.growth, inputs.survival[i]
    ahead = inputs.ahead[g]
    worst = 0.0
    for p in range(len(growth)):
        tokens = size + growth[p]
        none_ended = ahead[0] + inputs.running[g] * growth[p] + tokens
        if ahead[p] + survival[p] * tokens < 0.5 * none_ended:
            break
        bound = overflow_bound(survival[p], tokens / inputs.capacity[g], inputs.excess[g, p])
        worst = max(worst, bound * tokens / (growth[p] + 1.0))
    return worst


@routing_policy("headroom")
@dataclass(frozen=True)
class Headroom(
    RoutingPolicy,
    epsilon=POSITIVE,
    prefill_cost=POSITIVE,
    starvation=NOT_NEGATIVE,
    every=NOT_NEGATIVE,
):
    r"""The instance where an overflow costs least; where it costs too much, requests wait.

    A request of s tokens that is preempted h steps from now has gained h + 1 tokens by then, and
    takes a prefill of s + h to go on. If a step takes :math:`t = a + \beta n` with n requests, and
    β a token of a prompt, one request more is worth :math:`a / t` tokens a step to an instance:
    its own, less what it delays the others. A prefill of s + h keeps all n from
    :math:`n \beta (s + h) / t`. So a request is placed on an instance g of capacity K only if,
    with it, the load :math:`L_g(h)` has

    .. math:: P(L_g(h) > K_g)\,\frac{n_g\,\beta}{a}\,\frac{s + h}{h + 1} \le \varepsilon

    at every step of the horizon. ε = 1 would break even on one overflow; a half leaves room for
    those that follow from it. The probability is bounded by Chernoff's

    .. math::
        P(L_g(h) > K_g) \le \min_k E\big[e^{\theta_k (L_g(h) / K_g - 1)}\big]
        = \min_k e^{-\theta_k} \prod_{i \text{ on } g}
          \Big(1 + S_i(h)\big(e^{\theta_k (c_i + h) / K_g} - 1\big)\Big)

    at tilts θ = 2, 4 .. 512, which holds for any number of requests. At one step it is some three
    times the probability; the many steps of the horizon add less than that (measured, see
    ``tests/unit/routing/test_headroom.py``). Of the instances where the condition holds, the one
    that fulfils it best takes the request. If it holds nowhere, the request waits, and those
    behind pass it where they fit; once it has waited for ``starvation`` steps, they wait, too. An
    empty instance takes whatever fits. While the capacity of any instance is unknown, the least
    load decides among those where it holds: the unknown one would always fulfil it best.

    The horizon of an instance ends where the expected load is half of what it would be if no
    request ended, :math:`\Lambda_g(h) < \tfrac12 \sum_i (c_i + h)`: what threatens later
    threatens requests that are mostly yet to come. An overflow costs a prefill, when it comes;
    memory kept free for it costs from now on. Each step looked at is about a quarter further
    ahead than the one before.

    Source: Headway's own. The load ahead is that of BF-IO (Chen et al. 2026, 4).

    Attributes:
        epsilon: ε, tokens lost to an overflow for each gained until then.
        prefill_cost: β / a, the time that a token of a prompt takes, as a part of a decode step
            with hardly any requests: ``b / a`` of what `headway profile` fits.
        starvation: decode steps that a request waits while others pass it, at most.
        every: seconds between two decisions; 0: whenever something happens, which takes a pool.
    """

    needs = Needs.FORECASTS
    needs_curves = True
    kernel = headroom

    epsilon: float = 0.5
    prefill_cost: float = 0.01
    starvation: int = 4000
    every: float = 0.0

    def parameters(self) -> FloatArray:
        """Return ε, β / a, and the steps after which a request is not passed."""
        return np.array([self.epsilon, self.prefill_cost, self.starvation], dtype=np.float64)

    def points(self) -> IntArray:
        """Return the steps ahead: 0, 1, 2, ..., each about a quarter further than the last."""
        return spaced_points(FURTHEST, 1.25)

    def decide_every(self) -> float:
        """Return the seconds between two decisions."""
        return self.every

    def with_excess(self) -> bool:
        """Return that the bounds are read."""
        return True

    def holds_back(self) -> bool:
        """Return that the front may wait although it fits."""
        return True


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
