"""BalanceRoute: the margin below the heaviest worker, now (BR-0) or over a horizon (BR-H)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE
from rescheduler.routing.inputs import (
    FloatArray,
    IntArray,
    RoutingInputs,
    best_by_load,
    settle,
)
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy


@compiled
def br0(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where F_g is greatest."""
    load = inputs.load
    highest, costs = load.max(), np.empty(len(load))
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        for g in range(len(load)):
            margin = highest - load[g]
            costs[g] = len(load) * max(size - margin, 0) - size
        best = best_by_load(inputs, i, costs)
        if not settle(inputs, target, i, best):
            return
        if best >= 0:
            highest = max(highest, load[best])


@routing_policy("br0")
@dataclass(frozen=True)
class BR0(RoutingPolicy):
    r"""BR-0: reward what fills a margin, punish what overflows it by the G workers that wait.

    .. math:: F_g = \Delta - G\,(\Delta - m_g)_+, \qquad m_g = \max_{g'} L_{g'} - L_g

    for a request of Δ context tokens; the greatest F_g wins, ties go to the lowest load, then to
    the lowest index. Without the first of these, every request that overflows nowhere would go to
    worker 0.

    Source: The EP Barrier Tax (Li 2026), 'BR-0: The Single-Step View' and 'Lessons from a bug'.
    """

    needs = Needs.LOADS
    kernel = br0


@compiled
def envelope(ahead: FloatArray) -> FloatArray:
    """Return M(h) = max_g Λ_g(h), [P], over all instances, those without a place included."""
    highest: FloatArray = ahead[0].copy()
    for g in range(1, len(ahead)):
        raise_envelope(highest, ahead[g])
    return highest


@compiled
def raise_envelope(highest: FloatArray, expected: FloatArray) -> None:
    """Lift the [P] envelope to an instance's expected loads, which have risen."""
    for p in range(len(highest)):
        highest[p] = max(highest[p], expected[p])


@compiled
def discounts(points: IntArray, gamma: float) -> FloatArray:
    """Return γ^h of each point, [P]."""
    weights = np.empty(len(points))
    for p in range(len(points)):
        weights[p] = gamma ** points[p]
    return weights


@compiled
def brh_scores(
    ahead: FloatArray,
    parameters: FloatArray,
    weights: FloatArray,
    size: float,
    highest: FloatArray,
    scores: FloatArray,
) -> None:
    """Write F_g of a request of Δ = ``size`` tokens into [G] ``scores``.

    Args:
        ahead: [G, P] Λ_g(h).
        parameters: α, β (0: the number of instances) and γ.
        weights: [P] γ^h.
        size: Δ, in tokens.
        highest: [P] the envelope M(h).
        scores: [G], written; in tokens.
    """
    alpha, beta = parameters[0], parameters[1]
    if beta == 0:
        beta = float(len(scores))
    scores[:] = alpha * weights.sum() * size
    for p in range(len(weights)):
        weight, over = beta * weights[p], size - highest[p]
        for g in range(len(scores)):
            scores[g] -= weight * max(over + ahead[g, p], 0.0)


@compiled
def brh(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where the F_g of the horizon is greatest."""
    ahead = inputs.ahead
    highest = envelope(ahead)
    weights = discounts(inputs.points, parameters[2])
    scores = np.empty(len(inputs.load))
    for i in range(len(inputs.size)):
        brh_scores(ahead, parameters, weights, float(inputs.size[i]), highest, scores)
        for g in range(len(scores)):
            scores[g] = -scores[g]
        best = best_by_load(inputs, i, scores)
        if not settle(inputs, target, i, best):
            return
        if best >= 0:
            raise_envelope(highest, ahead[best])


def checked_steps(name: str, horizon: int, steps: Sequence[int]) -> tuple[int, ...]:
    """Return the points of a policy that looks ahead: its ``steps``, or 0..``horizon``.

    Raises:
        ValueError: a negative horizon, or steps that do not ascend from 0.
    """
    if not steps:
        if horizon < 0:
            raise ValueError(f"{name}: horizon is {horizon}; it is a number of steps, 0 or more")
        return tuple(range(horizon + 1))
    rising = all(a < b for a, b in pairwise(steps))
    if steps[0] != 0 or not rising or any(step != int(step) for step in steps):
        raise ValueError(f"{name}: steps must be whole and ascend from 0, not be {list(steps)}")
    return tuple(steps)


@routing_policy("brh")
@dataclass(frozen=True)
class BRH(RoutingPolicy, alpha=NOT_NEGATIVE, beta=NOT_NEGATIVE, gamma="(0, 1]"):
    r"""BR-H: BR-0 over the next H steps, the later ones discounted.

    .. math:: F_g = \alpha \Big(\sum_h \gamma^h\Big) \Delta
              - \beta \sum_h \gamma^h (\Delta - m_{g,h})_+,
              \qquad m_{g,h} = \max_{g'} \Lambda_{g'}(h) - \Lambda_g(h)

    Δ stays the same at every step, as in the paper; ties go as in BR-0. The paper projects the
    loads binarily, each request wholly there until the step it is predicted to end at: that is
    what a point forecast gives here. With survival curves the same score reads expected loads.
    With α = 1, β = 0 (that is, G) and a horizon of 0, BR-H is BR-0. Since the first term is the
    same for every worker and β scales the second, neither changes where one request goes.

    Attributes:
        alpha: weight of the tokens accepted, not negative.
        beta: weight of the tokens that overflow; 0 for the number of instances.
        gamma: discount of a step, in (0, 1].
        horizon: last decode step looked at, H.
        steps: the decode steps looked at instead of 0..H, ascending from 0.

    Source: The EP Barrier Tax (Li 2026), 'BR-H: Looking Ahead'.
    """

    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.9
    horizon: int = 50
    steps: Sequence[int] = ()

    needs = Needs.FORECASTS
    kernel = brh

    def __post_init__(self) -> None:
        """Refuse what is no weight, no discount or no horizon."""
        super().__post_init__()
        checked_steps("brh", self.horizon, self.steps)

    def parameters(self) -> FloatArray:
        """Return α, β and γ."""
        return np.array([self.alpha, self.beta, self.gamma])

    def points(self) -> IntArray:
        """Return the decode steps that margins are taken at."""
        return np.array(checked_steps("brh", self.horizon, self.steps), dtype=np.int64)


FIRST_DEFAULT_STEP = 64


@compiled
def overflow_costs(
    inputs: RoutingInputs, weights: FloatArray, i: int, highest: FloatArray, costs: FloatArray
) -> None:
    """Write ΔΦ_g of waiting request i into [G] ``costs``.

    Args:
        inputs: of which Λ, S_i and the sizes are read.
        weights: [P] w of each point.
        i: the request.
        highest: [P] the envelope M(h).
        costs: [G], written; in token steps.
    """
    size, survival = inputs.size[i], inputs.survival[i]
    ahead, growth = inputs.ahead, inputs.growth
    costs[:] = 0.0
    for p in range(len(weights)):
        if survival[p] == 0.0:
            return  # a curve never rises again
        weight = weights[p] * survival[p]
        over = size + growth[p] - highest[p]
        for g in range(len(costs)):
            costs[g] += weight * max(over + ahead[g, p], 0.0)


@compiled
def overflow_cost(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, where ΔΦ_g is least; the parameters are [P] w."""
    ahead = inputs.ahead
    highest = envelope(ahead)
    costs = np.empty(len(inputs.load))
    for i in range(len(inputs.size)):
        overflow_costs(inputs, parameters, i, highest, costs)
        best = best_by_load(inputs, i, costs)
        if not settle(inputs, target, i, best):
            return
        if best >= 0:
            raise_envelope(highest, ahead[best])


@routing_policy("overflow")
@dataclass(frozen=True)
class Overflow(RoutingPolicy, horizon=NOT_NEGATIVE):
    r"""ΔΦ: the tokens by which a request is expected to raise the heaviest worker.

    .. math:: \Delta\Phi_g(s) = \sum_{h=0}^{H} S(h)\,\big(s + h - m_g(h)\big)_+,
              \qquad m_g(h) = \max_{g'} \Lambda_{g'}(h) - \Lambda_g(h)

    with the survival-weighted loads Λ and the request's own curve S; the least ΔΦ_g wins, ties
    go to the lowest load, then to the lowest index. Where contexts drift by other than a token a
    step, h within the bracket is the drift's sum.

    Attributes:
        horizon: last decode step of the sum, H; the paper's runs to infinity.

    Source: The EP Barrier Tax (Li 2026), 'The Expected Marginal Overflow Cost'.
    """

    horizon: int = 200

    needs = Needs.FORECASTS
    kernel = overflow_cost

    def parameters(self) -> FloatArray:
        """Return the weights of the steps, which all count alike."""
        return np.ones(self.horizon + 1)

    def points(self) -> IntArray:
        """Return every step of the horizon."""
        return np.arange(self.horizon + 1, dtype=np.int64)


def trapezoid_weights(points: npt.ArrayLike) -> FloatArray:
    r"""Return the [K] weights of the trapezoid rule on ascending points, 1 if there is only one.

    .. math:: w_k = \tfrac12 (h_{k+1} - h_{k-1}), \quad
              w_0 = \tfrac12 (h_1 - h_0), \quad w_{K-1} = \tfrac12 (h_{K-1} - h_{K-2})
    """
    steps = np.asarray(points, dtype=np.float64)
    if len(steps) == 1:
        return np.ones(1)
    halves = np.pad(np.diff(steps) / 2, 1)
    return np.asarray(halves[:-1] + halves[1:])


@routing_policy("fast_phi")
@dataclass(frozen=True)
class FastPhi(RoutingPolicy, k=COUNT):
    r"""Fast-Φ: ΔΦ by the trapezoid rule on K points, at the cost of JSQ-Load times K.

    .. math:: \Delta\Phi_g \approx \sum_{k=0}^{K-1} w_k S(h_k) \big(s + h_k - m_g(h_k)\big)_+

    The paper takes percentiles of the output length as points without saying which. Here h_0 = 0
    and h_k is the (k/K)-quantile, so that a share of about 1 - k/K of requests lives past h_k;
    K = 1 is the current load only. Quantiles that coincide count once. Before any lengths are
    known, the points are 0 and K - 1 steps that double from 64: a documented guess, of the order
    of chat traffic. Ties go as in `Overflow`.

    Attributes:
        k: number of points, at least 1.
        steps: the points, ascending from 0; given here, lengths do not change them.
        fitted: the points in use while ``steps`` is empty; `with_lengths` replaces them.

    Source: The EP Barrier Tax (Li 2026), 'Making It Fast: K-Point Quadrature'.
    """

    k: int = 5
    steps: Sequence[int] = ()
    fitted: Sequence[int] = ()

    needs = Needs.FORECASTS
    needs_lengths = True
    kernel = overflow_cost

    def __post_init__(self) -> None:
        """Refuse no points, or points that do not ascend from 0."""
        super().__post_init__()
        checked_steps("fast_phi", 0, self.steps)
        checked_steps("fast_phi", 0, self.fitted)

    def parameters(self) -> FloatArray:
        """Return the trapezoid weights of the points."""
        return trapezoid_weights(self.points())

    def points(self) -> IntArray:
        """Return the points of the quadrature."""
        doubling = [0, *(FIRST_DEFAULT_STEP << k for k in range(self.k - 1))]
        return np.array(self.steps or self.fitted or doubling, dtype=np.int64)

    def with_lengths(self, lengths: npt.ArrayLike) -> Self:
        """Return the policy with points at the quantiles of these output lengths.

        Raises:
            ValueError: no lengths, or none above 0.
        """
        if self.steps:
            return self
        seen = np.asarray(lengths, dtype=np.float64)
        if not seen.size or not seen.min() > 0:
            raise ValueError(f"fast_phi: {seen.size} output lengths; give some, all above 0")
        quantiles = np.quantile(seen, np.arange(1, self.k) / self.k, method="inverted_cdf")
        return replace(self, fitted=(0, *(int(h) for h in np.unique(np.ceil(quantiles)))))
