"""STAR's decode rescheduling: the one move that lowers the variance of the loads most."""

import heapq
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from rescheduler.cluster.registry import NOT_NEGATIVE
from rescheduler.migration.overflow import overflow_probabilities, overflow_with
from rescheduler.migration.policy import (
    Migration,
    MigrationInputs,
    MigrationPolicy,
    Plan,
    migration_policy,
)
from rescheduler.routing.inputs import FloatArray, IntArray
from rescheduler.routing.policy import Needs

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
        spread: [G, P] variance V of the loads ahead.
        overflow: [G] most that a move may make of the probability that it exceeds its limit.
    """

    open: npt.NDArray[np.bool_]
    load: FloatArray
    limit: FloatArray
    spread: FloatArray
    overflow: FloatArray


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
            if targets.load[g] + candidates.need[i] > targets.limit[g]:
                continue
            if targets.overflow[g] < 1.0 and (
                overflow_with(
                    ahead[g],
                    targets.spread[g],
                    targets.limit[g],
                    tokens[i],
                    float(candidates.context[i]),
                    points,
                )
                > targets.overflow[g]
            ):
                continue
            best = g
        if best >= 0:
            target[i], gain[i] = best, scale * (own[i] - loads[best])
            score = candidates.worth[i] * gain[i] - candidates.cost[i]
            if score > _LEAST:
                heapq.heappush(queue, (-score, i))
    return moved[:found], where[:found], gains[:found]


def planned_moves(
    inputs: MigrationInputs,
    weights: FloatArray,
    variance: float,
    rows: IntArray,
    candidates: Candidates,
    targets: Targets,
    most: int = 1,
) -> list[Migration]:
    """Return the `best_moves` of the requests in some rows of the inputs."""
    moves = best_moves(inputs.points, inputs.ahead, weights, variance, candidates, targets, most)
    return [
        Migration(int(rows[i]), int(candidates.source[i]), int(target), float(gain))
        for i, target, gain in zip(*moves, strict=True)
    ]


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


def decayed_weights(beta: float, points: IntArray) -> FloatArray:
    r"""Return the weight of each point ahead, 1 at h = 0 and :math:`\beta^h` of each step after.

    A point stands for the steps since the one before:
    :math:`\beta_p = \sum_{h = h_{p-1} + 1}^{h_p} \beta^h`.
    """
    steps = np.arange(1, points[-1] + 1)
    until = np.concatenate([[0.0], np.cumsum(float(beta) ** steps)])
    return np.concatenate([[1.0], np.diff(until[points])])


@migration_policy("star")
@dataclass(frozen=True, kw_only=True)
class Star(MigrationPolicy, theta=NOT_NEGATIVE, beta="[0, 1]"):
    r"""Algorithm 1 of STAR (Wang et al. 2026, §5.2); its oracle is the same with true lengths.

    .. math:: w_i = \sum_{t=1}^H \beta_t \hat N_i(t), \quad O = \{w_i > (1 + \theta)\bar w\}, \quad
              \hat\sigma^2 = \operatorname{Var}(N(0)) + \sum_{t=1}^H \beta_t
              \operatorname{Var}(\hat N(t))

    and, of all requests r of overloaded instances with :math:`\hat N(r) > C_{mig} / T_{exec}`
    that fit, the one move is chosen that lowers :math:`\hat\sigma^2` most, if any does. Without
    prediction w_i and σ² are those of the loads now, and no request is too short.

    What the paper leaves open: :math:`\beta_t = \beta^t`, H and θ have no values there. Line 15
    as printed, :math:`N_i(0) < (1 + \theta) \bar w`, holds current loads against a weighted sum
    of H loads, which is true of every instance unless the weights add up to 1, and also of
    overloaded ones. Targets here are the instances with :math:`w_i < \bar w`; ``underloaded:
    paper`` is the printed test with weights that add up to 1. Line 21 as printed,
    :math:`N_t + \hat N(r) \le C_{mem}`, leaves out the context that comes along; here it counts,
    :math:`N_t + N(r) + \hat N(r) \le C_{mem}`; ``memory: paper`` is the printed test, beside which
    :math:`N_t + N(r) \le C_{mem}` always holds.

    Attributes:
        prediction: use forecasts; without them, only the loads now.
        theta: θ, how far above the mean an instance is overloaded.
        beta: β of a step.
        underloaded: which instances are targets, ``below_mean`` or ``paper``.
        memory: what a target must have room for, ``whole`` or ``paper``.
    """

    prediction: bool = True
    theta: float = 0.05
    beta: float = 0.99
    underloaded: Literal["below_mean", "paper"] = "below_mean"
    memory: Literal["whole", "paper"] = "whole"

    @property
    def needs(self) -> Needs:
        """Forecasts, or the loads alone."""
        return Needs.FORECASTS if self.prediction else Needs.LOADS

    def decide(self, inputs: MigrationInputs) -> Plan:
        """Return the best move, or none."""
        if (crowded := self.crowded_plan(inputs)) is not None:
            return crowded
        weights = decayed_weights(self.beta, inputs.points)
        variance = weighted_variance(inputs.ahead, weights)
        overloaded, underloaded = self._classify(inputs, weights)
        limits = self.limits(inputs)
        overflow = overflow_probabilities(inputs.ahead, inputs.spread, limits)
        rows = np.flatnonzero(overloaded[inputs.source] & (inputs.since_move >= 0))
        if not overloaded.any() or variance <= 0.0:
            return Plan([], f"no instance is above {1 + self.theta:g} times the mean load")
        steps = self.move_steps(inputs.context[rows])
        found = inputs.forecasts_of(rows, steps)
        lasts = (found.remaining > steps) | (not self.prediction)
        if not lasts.any():
            return Plan([], f"none of {len(rows)} requests on overloaded instances outlasts a move")
        context = inputs.context[rows]
        candidates = Candidates(
            source=inputs.source[rows],
            context=context,
            survival=found.survival,
            need=self._need(context, found.remaining),
            worth=lasts.astype(np.float64),
            cost=np.zeros(len(rows)),
        )
        targets = Targets(
            open=underloaded & (inputs.free > 0),
            load=inputs.load.astype(np.float64),
            limit=limits,
            spread=inputs.spread,
            overflow=overflow + self.tolerance,
        )
        moves = planned_moves(inputs, weights, variance, rows, candidates, targets)
        if not moves:
            return Plan([], why_none(candidates, targets, "lowers the variance"))
        return Plan(
            moves,
            f"of {np.count_nonzero(lasts)} requests on {np.count_nonzero(overloaded)} overloaded "
            f"instances it lowers the variance most, by {moves[0].gain:.1%}",
        )

    def _classify(
        self, inputs: MigrationInputs, weights: FloatArray
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which instances are overloaded and which may be targets, [G] each."""
        load = inputs.load.astype(np.float64)
        if len(weights) == 1 or weights[1:].sum() == 0.0:
            weighted = load
        else:
            # Weights that add up to 1 change neither line 14 nor below_mean.
            weighted = inputs.ahead[:, 1:] @ (weights[1:] / weights[1:].sum())
        mean = weighted.mean()
        overloaded = weighted > (1 + self.theta) * mean
        if self.underloaded == "paper":
            return overloaded, load < (1 + self.theta) * mean
        return overloaded, weighted < mean

    def _need(self, context: IntArray, remaining: FloatArray) -> FloatArray:
        if not self.prediction:
            return context.astype(np.float64)
        if self.memory == "paper":
            return np.maximum(context, remaining)
        return context + remaining
