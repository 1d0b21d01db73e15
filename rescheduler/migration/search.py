r"""The search for the moves that lower the variance of the loads most.

A move of request r from s to t changes two of the G loads at each point h ahead, by
:math:`d(h) = S_r(h)(N(r) + h)`, and leaves their mean as it is. So

.. math:: \sigma^2 - \sigma^2_{r,s,t} = \frac2G \sum_h \beta_h\, d(h)
          \big(\Lambda_s(h) - d(h) - \Lambda_t(h)\big),

which takes O(H) with the loads added up beforehand (Wang et al. 2026, §5.2). No target's load is
below :math:`\min_t \Lambda_t(h)` at any h, which bounds what a request can gain wherever it goes,
in O(H) too: requests whose bound is below the best move found are not looked at further. The
result is that of the full enumeration.
"""

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from rescheduler.routing.inputs import FloatArray, IntArray

__all__ = ["Candidates", "Targets", "best_moves", "weighted_variance", "why_none"]

_LEAST = 1e-9
"""Least score of a move. Below are rounding errors, as of a lone request's, which gains nothing."""


class Candidates(NamedTuple):
    """Requests that may move, [k].

    Attributes:
        source: [k] instance of each.
        context: [k] tokens in its KV cache.
        survival: [k, P] S(h) at the points ahead; used up.
        need: [k] tokens that its target must have room for beside its load now.
        worth: [k] factor on its gain, in [0, 1].
        cost: [k] what is taken from its gain, as a part of the variance.
    """

    source: IntArray
    context: IntArray
    survival: FloatArray
    need: FloatArray
    worth: FloatArray
    cost: FloatArray


class Targets(NamedTuple):
    """Where they may go.

    Attributes:
        open: [G] whether requests may go there at all.
        load: [G] context tokens now.
        limit: [G] most tokens that may be there.
    """

    open: npt.NDArray[np.bool_]
    load: FloatArray
    limit: FloatArray


# The order of its sums is free, so that they fill vector registers.
@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})  # type: ignore[untyped-decorator]
def best_moves(
    points: IntArray,
    ahead: FloatArray,
    weights: FloatArray,
    variance: float,
    candidates: Candidates,
    targets: Targets,
    most: int,
) -> tuple[IntArray, IntArray, FloatArray]:
    r"""Return which candidates move where, best first, no instance taking part in two moves.

    The score of a move is worth · (relative reduction of the variance) − cost. The best is
    taken while it is above 0 (by more than rounding errors), then the best of those between
    instances that have no part yet. Since that leaves fewer moves and changes none of them, what
    was a request's best score stays a bound of it, and only requests whose bound is the highest
    are looked at again.

    Args:
        points: [P] decode steps ahead.
        ahead: [G, P] loads Λ.
        weights: [P] β of each point.
        variance: of which the reduction is a part; above 0.
        candidates: that may move.
        targets: where to.
        most: moves.

    Returns:
        [m] candidates, [m] targets, and [m] relative reductions of the variance.
    """
    n, (n_instances, n_points) = len(candidates.source), ahead.shape
    moved, where, gains = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most)
    free, unused = targets.open.copy(), np.ones(n_instances, dtype=np.bool_)
    if n == 0 or not free.any():
        return moved[:0], where[:0], gains[:0]
    lowest = np.full(n_points, np.inf)
    weighted = np.empty((n_points, n_instances))  # of one point side by side, for the targets
    for g in range(n_instances):
        for p in range(n_points):
            weighted[p, g] = weights[p] * ahead[g, p]
            if free[g]:
                lowest[p] = min(lowest[p], ahead[g, p])
    scale = 2.0 / (n_instances * variance)
    tokens = candidates.survival
    own = np.empty(n)
    target, gain = np.full(n, -1), np.zeros(n)
    queue = [(0.0, 0) for _ in range(0)]
    for i in range(n):
        s, c = candidates.source[i], float(candidates.context[i])
        leaves, arrives = 0.0, 0.0
        for p in range(n_points):
            d = tokens[i, p] * (c + points[p])
            tokens[i, p] = d
            leaves += weights[p] * d * (ahead[s, p] - d)
            arrives += weights[p] * d * lowest[p]
        own[i] = leaves
        bound = candidates.worth[i] * scale * (leaves - arrives) - candidates.cost[i]
        if bound > _LEAST:
            queue.append((-bound, i))
    heapq.heapify(queue)
    loads = np.empty(n_instances)
    found = 0
    while found < most and len(queue) > 0:
        _, i = heapq.heappop(queue)
        s, t = candidates.source[i], target[i]
        if not unused[s]:
            continue
        if t >= 0 and free[t]:
            moved[found], where[found], gains[found] = i, t, gain[i]
            found += 1
            unused[s] = unused[t] = free[s] = free[t] = False
            continue
        loads[:] = 0.0
        for p in range(n_points):
            d = tokens[i, p]
            for g in range(n_instances):
                loads[g] += d * weighted[p, g]
        best = -1
        for g in range(n_instances):
            if not free[g] or g == s or (best >= 0 and loads[g] >= loads[best]):
                continue
            if targets.load[g] + candidates.need[i] <= targets.limit[g]:
                best = g
        if best >= 0:
            target[i], gain[i] = best, scale * (own[i] - loads[best])
            score = candidates.worth[i] * gain[i] - candidates.cost[i]
            if score > _LEAST:
                heapq.heappush(queue, (-score, i))
    return moved[:found], where[:found], gains[:found]


def weighted_variance(ahead: FloatArray, weights: FloatArray) -> float:
    r"""Return :math:`\sum_h \beta_h \operatorname{Var}_g(\Lambda_g(h))` of [G, P] loads."""
    return float(ahead.var(axis=0) @ weights)


def why_none(candidates: Candidates, targets: Targets, wanted: str) -> str:
    """Return in words why no candidate moves."""
    if not targets.open.any():
        return "no instance below the mean load has a free slot"
    room = max(float((targets.limit - targets.load)[targets.open].max()), 0.0)
    if (candidates.need > room).all():
        return (
            f"none of {len(candidates.need)} requests fits: the least needs room for "
            f"{candidates.need.min():,.0f} tokens, the most there is is {room:,.0f}"
        )
    return f"no move of {len(candidates.need)} requests {wanted}"
