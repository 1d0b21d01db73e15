"""How likely each instance's KV cache is to overflow soon, and what a move changes of that."""

from math import erfc, inf, sqrt

import numpy as np

from predictor.compilation import compiled, compiled_inline
from rescheduler.routing.inputs import FloatArray, IntArray


@compiled
def overflow_probabilities(ahead: FloatArray, spread: FloatArray, limit: FloatArray) -> FloatArray:
    r"""Return how likely each instance's load is to exceed its limit at a point ahead, [G].

    Requests end independently, so that the load at h is a sum of independent variables: near
    normal, with mean :math:`\Lambda_g(h) = \sum_i S_i(h)(c_i + h)` and variance
    :math:`V_g(h) = \sum_i S_i(h)(1 - S_i(h))(c_i + h)^2`. With limits :math:`K_g`,

    .. math:: p_g = \max_h \Phi\Big(\frac{\Lambda_g(h) - K_g}{\sqrt{V_g(h)}}\Big),

    a lower bound of the probability that any point exceeds the limit. Without variance, as for
    point forecasts, it is 1 where a load exceeds its limit, and 0 elsewhere. Requests that are
    still to arrive are not in it.

    Args:
        ahead: [G, P] Λ, tokens.
        spread: [G, P] V, tokens².
        limit: [G] K, tokens.
    """
    found = np.empty(len(limit))
    for g in range(len(limit)):
        most = -inf
        for p in range(ahead.shape[1]):
            most = max(most, _excess(ahead[g, p] - limit[g], spread[g, p]))
        found[g] = _normal(most)
    return found


@compiled_inline
def overflow_with(
    ahead: FloatArray,
    spread: FloatArray,
    limit: float,
    arriving: FloatArray,
    context: float,
    points: IntArray,
) -> float:
    """Return p of one instance as `overflow_probabilities` has it, with one request more.

    Args:
        ahead: [P] Λ without it.
        spread: [P] V without it.
        limit: K.
        arriving: [P] S(h)(c + h) of the request.
        context: c.
        points: [P] h.
    """
    most = -inf
    for p in range(len(ahead)):
        expected = arriving[p]
        variance = spread[p] + expected * (context + points[p] - expected)
        most = max(most, _excess(ahead[p] + expected - limit, variance))
    return _normal(most)


@compiled_inline
def _excess(tokens: float, variance: float) -> float:
    """Return by how many standard deviations the mean exceeds the limit."""
    if variance > 0.0:
        return tokens / sqrt(variance)
    return inf if tokens > 0.0 else -inf


@compiled_inline
def _normal(z: float) -> float:
    return 0.5 * erfc(-z / sqrt(2.0))
