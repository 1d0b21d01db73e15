"""The expected marginal overflow cost ΔΦ: at every step, or at K points (Fast-Φ)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE
from rescheduler.routing.balance.balance_route import checked_steps, envelope, raise_envelope
from rescheduler.routing.inputs import (
    FloatArray,
    IntArray,
    RoutingInputs,
    best_by_load,
    settle,
)
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["FastPhi", "Overflow", "overflow_costs", "trapezoid_weights"]

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
