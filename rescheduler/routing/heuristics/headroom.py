"""Headroom by probability: place where the KV cache is unlikely to overflow, else wait."""

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Self

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["Headroom", "headroom"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FIRST_HORIZON = 300
"""Steps ahead before any length is known: of the order of chat traffic."""


@compiled
def headroom(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place the front of the queue where the most room is left, while an overflow is unlikely.

    The parameters are [1] z, the normal quantile of 1 - ε.
    """
    capacity, load = inputs.capacity, inputs.load
    slots, room = inputs.slots, inputs.room
    ahead, spread = inputs.ahead, inputs.spread
    survival, growth = inputs.survival, inputs.growth
    quantile = parameters[0]
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        best, most = -1, -np.inf
        for g in range(len(load)):
            if slots[g] <= 0 or room[g] < size:
                continue
            left = np.inf
            for p in range(len(growth)):
                tokens = size + growth[p]
                expected = survival[i, p] * tokens
                variance = spread[g, p] + expected * (tokens - expected)
                likely = ahead[g, p] + expected + quantile * np.sqrt(max(variance, 0.0))
                left = min(left, capacity[g] - likely)
            if left < 0.0 and inputs.running[g] > 0:
                continue
            if left > most:
                best, most = g, left
        if best < 0:
            return
        place(inputs, target, i, best)


@routing_policy("headroom")
@dataclass(frozen=True)
class Headroom(RoutingPolicy):
    r"""The most room that stays free with probability 1 - ε; where there is none, requests wait.

    The front of the queue, of s tokens and survival S, is placed on an instance g only if

    .. math::
        \Lambda_g(h) + S(h)(s + h) + z_{1-\varepsilon}
        \sqrt{V_g(h) + S(h)\big(1 - S(h)\big)(s + h)^2} \le K_g
        \quad \text{for all } 0 \le h \le H

    with the mean Λ and variance V of the load h steps ahead and the capacity K: in the normal
    approximation the cache overflows at a given step with probability ε at most. Of the instances
    where this holds, the one with the largest least margin takes it. If it holds nowhere, the
    front waits, and with it those behind; an empty instance takes whatever fits.

    H is the median output length: half of what runs has ended by then, so decisions made in the
    meantime can still prevent what threatens later. Each step looked at is about a tenth further
    ahead than the one before. Point forecasts have no variance: this policy takes them for
    certain, so give it curves.

    Source: Headway's own. The load ahead is that of BF-IO (Chen et al. 2026, 4).

    Attributes:
        epsilon: ε, probability of an overflow at any one step.
        horizon: H in decode steps; 0: the median length, 300 until lengths are known.
        every: seconds between two decisions; 0: whenever something happens, which takes a pool.
        fitted: the median length; `with_lengths` replaces it.

    Raises:
        ValueError: ε is not between 0 and 1, or the horizon or the time is negative.
    """

    needs = Needs.FORECASTS
    needs_lengths = True
    kernel = headroom

    epsilon: float = 0.05
    horizon: int = 0
    every: float = 0.0
    fitted: int = FIRST_HORIZON

    def __post_init__(self) -> None:
        """Refuse an invalid probability or horizon."""
        if not 0 < self.epsilon < 1:
            raise ValueError(f"headroom: epsilon must be in (0, 1), not {self.epsilon}")
        for name, steps in (("horizon", self.horizon), ("fitted", self.fitted)):
            if not (steps >= 0 and steps == int(steps)):
                raise ValueError(f"headroom: {name} must be a number of steps, not {steps}")
        if not 0 <= self.every < np.inf:
            raise ValueError(f"headroom: every must be 0 seconds or more, not {self.every}")

    def parameters(self) -> FloatArray:
        """Return the normal quantile."""
        return np.array([NormalDist().inv_cdf(1 - self.epsilon)])

    def points(self) -> IntArray:
        """Return the steps ahead: 0, 1, 2, ..., each about a tenth further, to the horizon."""
        horizon = int(self.horizon or self.fitted)
        steps = [0]
        while steps[-1] < horizon:
            steps.append(min(horizon, max(steps[-1] + 1, round(1.1 * steps[-1]))))
        return np.array(steps, dtype=np.int64)

    def decide_every(self) -> float:
        """Return the seconds between two decisions."""
        return self.every

    def with_spread(self) -> bool:
        """Return that variances are read."""
        return True

    def holds_back(self) -> bool:
        """Return that the front may wait although it fits."""
        return True

    def with_lengths(self, lengths: npt.ArrayLike) -> Self:
        """Return the policy with the median of these output lengths as its horizon.

        Raises:
            ValueError: no lengths, or none above 0.
        """
        seen = np.asarray(lengths, dtype=np.float64)
        if not seen.size or not seen.min() > 0:
            raise ValueError(f"headroom: {seen.size} output lengths; give some, all above 0")
        return replace(self, fitted=int(np.ceil(np.median(seen))))
