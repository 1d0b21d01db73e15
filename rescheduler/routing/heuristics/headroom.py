"""Headroom by probability: place where the KV cache is unlikely to overflow, else wait."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled, compiled_inline
from predictor.forecasts.curve import overflow_bound
from rescheduler.routing.inputs import RoutingInputs, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy, spaced_points

__all__ = ["Headroom", "headroom"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FURTHEST = 16_384
"""Steps ahead of the last point. Half the load has ended long before, or the cache is full."""


@compiled
def headroom(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place the front of the queue where an overflow threatens least, if little enough.

    The parameters are [1] ε.
    """
    slots, room, load, running = inputs.slots, inputs.room, inputs.load, inputs.running
    for i in range(len(inputs.size)):
        best, least = -1, np.inf
        for g in range(len(load)):
            if slots[g] <= 0 or room[g] < inputs.size[i]:
                continue
            risk = _wasted(inputs, i, g)
            if risk > parameters[0] and running[g] > 0:
                continue
            if risk < least or (risk == least and load[g] < load[best]):
                best, least = g, risk
        if best < 0:
            return
        place(inputs, target, i, best)


@compiled_inline
def _wasted(inputs: RoutingInputs, i: int, g: int) -> float:
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
class Headroom(RoutingPolicy):
    r"""The instance least likely to overflow; where none is unlikely enough, requests wait.

    A request of s tokens that is preempted h steps from now has gained h + 1 tokens by then and
    takes a prefill of s + h to go on. So the front of the queue is placed on an instance g of
    capacity K only if, with it, the load :math:`L_g(h)` has

    .. math:: P(L_g(h) > K_g)\,\frac{s + h}{h + 1} \le \varepsilon

    at every step of the horizon: of the tokens it gains, a share ε at most is computed again, and
    the cache overflows with probability ε at most. The probability is bounded by Chernoff's

    .. math::
        P(L_g(h) > K_g) \le \min_k E\big[e^{\theta_k (L_g(h) / K_g - 1)}\big]
        = \min_k e^{-\theta_k} \prod_{i \text{ on } g}
          \Big(1 + S_i(h)\big(e^{\theta_k (c_i + h) / K_g} - 1\big)\Big)

    at tilts θ = 2, 4 .. 512, which holds for any number of requests. At one step it is some three
    times the probability; the many steps of the horizon add less than that, so that the load
    passes the capacity *within* the horizon with probability ε at most, too (measured, see
    ``tests/unit/routing/test_headroom.py``). Of the instances where the condition holds, the one
    that fulfils it best takes the request. If it holds nowhere, the front waits, and with it
    those behind; an empty instance takes whatever fits.

    The horizon of an instance ends where the expected load is half of what it would be if no
    request ended, :math:`\Lambda_g(h) < \tfrac12 \sum_i (c_i + h)`: what threatens later
    threatens requests that are mostly yet to come. An overflow costs a prefill, when it comes;
    memory kept free for it costs from now on. Each step looked at is about a quarter further
    ahead than the one before.

    Source: Headway's own. The load ahead is that of BF-IO (Chen et al. 2026, 4).

    Attributes:
        epsilon: ε, tokens computed again for one gained, and so the probability of an overflow.
        every: seconds between two decisions; 0: whenever something happens, which takes a pool.

    Raises:
        ValueError: ε is not between 0 and 1, or the time is negative.
    """

    needs = Needs.FORECASTS
    needs_curves = True
    kernel = headroom

    epsilon: float = 0.4
    every: float = 0.0

    def __post_init__(self) -> None:
        """Refuse an invalid probability or time."""
        if not 0 < self.epsilon < 1:
            raise ValueError(f"headroom: epsilon must be in (0, 1), not {self.epsilon}")
        if not 0 <= self.every < np.inf:
            raise ValueError(f"headroom: every must be 0 seconds or more, not {self.every}")

    def parameters(self) -> FloatArray:
        """Return ε."""
        return np.array([float(self.epsilon)])

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
