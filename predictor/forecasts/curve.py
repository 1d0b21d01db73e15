r"""The mathematics of one survival curve, compiled: ageing, survival at points, the mean.

A curve is S at ascending edges :math:`e_0 = 0 .. e_m`, linear between them. Of a request that has
run j tokens since it was drawn, and is cut at a limit,

.. math:: S(h \mid j) = S(j + h) / S(j), \qquad
          E[R \mid j] = \sum_{h \ge 0} S(h \mid j),

with :math:`S(0 \mid j) = 1`, and 0 from the tokens left on. The simulator, the expected load and
the inputs of live decisions all evaluate curves here. `SurvivalForecast` does so in numpy, without
this module: it is used inside engines, whose workers do not start in a process that has loaded
numba. Arguments that several functions share: ``edges`` [n_edges], ``curve`` [n_edges], ``age`` and
``limit`` in tokens since the prediction.
"""

from math import ceil, exp
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from predictor.compilation import compiled_core, compiled_inline

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Curve = npt.NDArray[np.floating[Any]]

EXCESS = 8
"""Doubles in the widest vector register of a CPU, a power of two: `draw_steps` writes as many past
the last step."""


TILTS = 9
"""Tilts θ at which the exponential moment of a load is kept: 2, 4, 8 .. 512. With too few, the
bound is loose; with the last, a load that is certain counts as up to ln(1/ε)/512 fuller."""


@compiled_inline
def tokens_left(edges: FloatArray, age: float, limit: float) -> float:
    """Return the tokens to the limit, at least one: the request still runs."""
    return max(min(limit, edges[len(edges) - 1]) - age, 1.0)  # type: ignore[no-any-return]


@compiled_inline
def edge_after(edges: FloatArray, tokens: float) -> int:
    """Return the index of the first edge past so many tokens, from 1 to the last."""
    return min(int(np.searchsorted(edges, tokens, "right")), len(edges) - 1)


@compiled_inline
def alive_at(edges: FloatArray, curve: Curve, right: int, tokens: float) -> float:
    """Return S at so many tokens, which lie before the edge ``right`` or past the last."""
    low = np.float64(curve[right - 1])
    part = min((tokens - edges[right - 1]) / (edges[right] - edges[right - 1]), 1.0)
    return low + part * (np.float64(curve[right]) - low)  # type: ignore[no-any-return]


@compiled_core
def aged_survival(
    edges: FloatArray,
    curve: Curve,
    age: float,
    limit: float,
    points: npt.NDArray[Any],
    out: FloatArray,
) -> None:
    """Write S(h | age) at points h [P], ascending, into ``out`` [P]."""
    last = len(edges) - 1
    left = tokens_left(edges, age, limit)
    right = edge_after(edges, age)
    alive = alive_at(edges, curve, right, age)
    slope = 0.0
    drawn = -1
    for p in range(len(points)):
        h = float(points[p])
        if h == 0.0:
            out[p] = 1.0
            continue
        if h >= left or not alive > 0.0:
            out[p] = 0.0
            continue
        x = min(age + h, edges[last])
        while right < last and edges[right] <= x:
            right += 1
        if right != drawn:
            width = edges[right] - edges[right - 1]
            slope = (np.float64(curve[right]) - curve[right - 1]) / width
            drawn = right
        out[p] = (curve[right - 1] + slope * (x - edges[right - 1])) / alive


@compiled_core
def aged_mean(edges: FloatArray, curve: Curve, age: float, limit: float) -> float:
    r"""Return E[R | age], at least 1: the integral and half of what the ends differ by.

    .. math:: \sum_{h \ge 0} S(h) = \int_0^L S + \tfrac12 \big(S(0) - S(L^-)\big)

    for S linear between whole tokens, with L the tokens left.
    """
    stop = min(limit, edges[len(edges) - 1])
    if stop <= age:
        return 1.0
    right = edge_after(edges, age)
    here = age
    alive = value = -1.0
    area = 0.0
    while here < stop:
        low, high = edges[right - 1], edges[right]
        slope = (np.float64(curve[right]) - curve[right - 1]) / (high - low)
        value = curve[right - 1] + slope * (here - low)
        if alive < 0.0:
            alive = value
        end = min(high, stop)
        reached = curve[right - 1] + slope * (end - low)
        area += (value + reached) / 2 * (end - here)
        value = reached
        here = end
        right += 1
    if not alive > 0.0:
        return 1.0
    return max((area + (alive - value) / 2) / alive, 1.0)


@njit(cache=True, nogil=True, _nrt=False, forceinline=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def draw_steps(
    edges: FloatArray, curve: Curve, age: float, limit: float, n_steps: int, out: FloatArray
) -> int:
    """Write S(h | age) at h = 1, 2 .. n_steps - 1 into ``out`` [n_steps + EXCESS].

    Seen from now the curve is a line from (0, 1) to the first edge yet to come, and from each edge
    to the next. Drawn one after the other they need neither a search nor a division a step.

    Returns:
        The step from which S is 0, at least 1; what ``out`` has from there on is void.
    """
    stop = ceil(min(tokens_left(edges, age, limit), float(n_steps)))
    right = edge_after(edges, age)
    alive = alive_at(edges, curve, right, age)
    if not alive > 0.0:
        return 1
    h = 1
    here, value_here = 0.0, 1.0
    while h < stop:
        edge = edges[right] - age
        value_at_edge = min(curve[right] / alive, 1.0)
        slope = (value_at_edge - value_here) / (edge - here)
        first = value_here + slope * (h - here)
        end = ceil(min(edge, float(stop)))
        # Whole registers are faster than a remainder; the next line overwrites the excess.
        for step in range((end - h + EXCESS - 1) & -EXCESS):
            # Unsigned, or the compiler has to allow for indices that count from the end.
            out[np.uint64(h) + np.uint64(step)] = first + slope * step
        h = end
        here, value_here = edge, value_at_edge
        right += 1
    return stop


@compiled_inline
def add_load(
    context: float,
    survival: FloatArray,
    growth: FloatArray,
    capacity: float,
    ahead: FloatArray,
    excess: FloatArray,
    alive: FloatArray,
) -> None:
    r"""Add one request of c tokens to Λ, E and N of its instance.

    .. math:: \Lambda(h) \mathrel{+}= S(h)(c + g(h)), \quad
              E_k(h) \mathrel{\times}= 1 + S(h)\big(e^{\theta_k (c + g(h)) / K} - 1\big), \quad
              N(h) \mathrel{+}= S(h)

    Args:
        context: c, tokens in its KV cache.
        survival: [P] S at points h ahead.
        growth: [P] g, tokens that it gains until each.
        capacity: K, tokens that the instance holds.
        ahead: [P] Λ.
        excess: [P, TILTS] E, or [P, 0].
        alive: [P] N, or [0].
    """
    for p in range(len(survival)):
        tokens = context + growth[p]
        ahead[p] += survival[p] * tokens
        if excess.shape[1] > 0 and survival[p] > 0.0:
            tilt_by(survival[p], tokens / capacity, excess[p])
    for p in range(len(alive)):
        alive[p] += survival[p]


@compiled_inline
def tilt_by(survival: float, share: float, excess: FloatArray) -> None:
    r"""Count a request in E [TILTS] that holds a share x of the cache with probability S.

    .. math:: E_k \mathrel{\times}= 1 + S\,(e^{\theta_k \min(x, 1)} - 1),
              \qquad \theta_k = 2^{k + 1}

    Alone in the cache it would fill it, which is all that can be said of a larger one.
    """
    power = exp(2.0 * min(share, 1.0))
    for k in range(len(excess)):
        excess[k] *= 1.0 + survival * (power - 1.0)
        power *= power


@compiled_inline
def overflow_bound(survival: float, share: float, excess: FloatArray) -> float:
    """Return the least of what `tilt_by` would write, or 1: no overflow is likelier (Chernoff)."""
    least = 1.0
    power = exp(2.0 * min(share, 1.0))
    for k in range(len(excess)):
        least = min(least, excess[k] * (1.0 + survival * (power - 1.0)))
        power *= power
    return least


@compiled_inline
def no_load(excess: FloatArray) -> None:
    r"""Write E of empty instances, :math:`e^{-\theta_k}`, into [G, P, TILTS]."""
    theta = 2.0
    for k in range(excess.shape[2]):
        excess[:, :, k] = exp(-theta)
        theta *= 2.0


@compiled_core
def load_of_known_ends(
    remaining: Numbers,
    instance: IntArray,
    context: IntArray,
    points: IntArray,
    growth: FloatArray,
    ending: FloatArray,
    ahead: FloatArray,
    alive: FloatArray,
) -> None:
    r"""Write Λ and N of requests whose ends are known, in O(n + G P) for every step ahead.

    .. math:: N_g(h) = |\{i: R_i > h\}|, \quad
              \Lambda_g(h) = \sum_{i: R_i > h} c_i + g(h)\,N_g(h)

    Args:
        remaining: [n] R, tokens until each request ends.
        instance: [n] where it is, of G.
        context: [n] c, tokens in its KV cache.
        points: [P] steps h ahead, P > 0, ascending from 0; otherwise a search each costs log P.
        growth: [P] g, tokens that each gains until a point.
        ending: [2, G, P + 1] scratch: requests, and their tokens, by the points they outlive.
        ahead: [G, P] Λ.
        alive: [G, P] N, or [G, 0].
    """
    ending[:] = 0.0
    n_instances, n_points = ahead.shape
    every_step = points[n_points - 1] == n_points - 1
    for i in range(len(remaining)):
        if every_step:
            outlived = ceil(min(remaining[i], n_points))
        else:
            outlived = np.searchsorted(points, remaining[i])
        ending[0, instance[i], outlived] += 1.0
        ending[1, instance[i], outlived] += context[i]
    for g in range(n_instances):
        requests, tokens = ending[0, g, n_points], ending[1, g, n_points]
        for p in range(n_points - 1, -1, -1):
            ahead[g, p] = tokens + growth[p] * requests
            if alive.shape[1] > 0:
                alive[g, p] = requests
            requests += ending[0, g, p]
            tokens += ending[1, g, p]
