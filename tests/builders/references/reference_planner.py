"""The planners by trying every move, to hold the compiled ones against."""

from itertools import pairwise
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from rescheduler.cluster.cluster_view import NEVER_MOVED, ClusterView
from rescheduler.migration import MigrationPolicy, Star, Survival

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Seen:
    """A view as a planner reads it: S at every point and E[R] of every request, [n, P] and [n]."""

    def __init__(self, view: ClusterView, planner: Star | Survival) -> None:
        points, n = planner.points(), len(view.instance)
        survival, self.remaining = np.ones((n, len(points))), np.zeros(n)
        if view.forecast is not None and n:
            survival, self.remaining = view.forecast.at(points), view.forecast.mean()
        self.context, self.n_instances = view.context_tokens, view.n_instances
        self.instance = view.instance
        self.since = np.full(n, NEVER_MOVED) if view.since_move is None else view.since_move
        tokens = self.context[:, None] + points
        self.brought = survival * tokens
        self.spread = survival * (1 - survival) * tokens**2
        self.limit = planner.memory_share * view.kv_capacity
        steps = [sum(planner.beta**h for h in range(a + 1, b + 1)) for a, b in pairwise(points)]
        self.weights = np.array([1.0, *steps])

    def loads(self, instance: IntArray) -> FloatArray:
        """Return Λ, [G, P], with the requests on the given instances."""
        table = np.zeros((self.n_instances, len(self.weights)))
        np.add.at(table, instance, self.brought)
        return table

    def overflow(self, instance: IntArray) -> FloatArray:
        """Return how likely each instance is to exceed its limit, with the requests there, [G]."""
        mean, spread = self.loads(instance), np.zeros((self.n_instances, len(self.weights)))
        np.add.at(spread, instance, self.spread)
        return np.array(
            [
                max(exceeds(*each) for each in zip(mean[g] - self.limit[g], spread[g], strict=True))
                for g in range(self.n_instances)
            ]
        )

    def likelier(self, planner: MigrationPolicy, request: int, target: int) -> bool:
        """Return whether the move makes it likelier than may be that its target overflows."""
        if planner.tolerance == 1.0:
            return False
        after = self.overflow(moved(self.instance, request, target))[target]
        return bool(after > self.overflow(self.instance)[target] + planner.tolerance)

    def variance(self, instance: IntArray) -> float:
        return float(self.loads(instance).var(axis=0) @ self.weights)


def exceeds(tokens: float, variance: float) -> float:
    """Return the probability that a normal variable of that mean and variance is above 0."""
    return NormalDist(tokens, variance**0.5).cdf(2 * tokens) if variance > 0 else float(tokens > 0)


def has_room(view: ClusterView, planner: MigrationPolicy, tokens: float, target: int) -> bool:
    limit = planner.memory_share * view.kv_capacity[target]
    fits = view.kv_load[target] + tokens <= limit
    return bool(fits and view.slots[target] > view.running[target])


def moved(instance: IntArray, request: int, target: int) -> IntArray:
    there = instance.copy()
    there[request] = target
    return there


def best_star_move(view: ClusterView, star: Star) -> tuple[float, set[tuple[int, int]]]:
    """The least variance over the one before that a move of Algorithm 1 leaves, and the moves
    that reach it: (request, target); (1, {}) if no move lowers it."""
    seen = Seen(view, star)
    if view.kv_load.sum() > star.crowded * view.kv_capacity.sum():
        return 1.0, set()
    weighted = view.kv_load.astype(np.float64)
    if len(seen.weights) > 1:
        weighted = seen.loads(view.instance)[:, 1:] @ seen.weights[1:] / seen.weights[1:].sum()
    over = weighted > (1 + star.theta) * weighted.mean()
    under = weighted < weighted.mean()
    if star.underloaded == "paper":
        under = view.kv_load < (1 + star.theta) * weighted.mean()
    base, found = seen.variance(view.instance), {}
    steps = star.move_steps(seen.context)
    for r, (source, context) in enumerate(zip(view.instance, seen.context, strict=True)):
        left = float(seen.remaining[r])
        if seen.since[r] < 0 or not over[source] or (star.prediction and not left > steps[r]):
            continue
        need = float(context)
        if star.prediction:
            need = max(context, left) if star.memory == "paper" else context + left
        for t in np.flatnonzero(under):
            if t != source and has_room(view, star, need, t) and not seen.likelier(star, r, t):
                found[r, int(t)] = seen.variance(moved(view.instance, r, t))
    least = min(found.values(), default=base)
    if not least < base * (1 - 1e-9):
        return 1.0, set()
    return least / base, {move for move, v in found.items() if v <= least + 1e-9 * base}


def survival_moves(view: ClusterView, planner: Survival) -> list[tuple[int, int, float]]:
    """The moves that `Survival` describes, found by trying all: request, target, gain."""
    seen = Seen(view, planner)
    if view.kv_load.sum() > planner.crowded * view.kv_capacity.sum():
        return []
    base, instance = seen.variance(view.instance), view.instance.copy()
    load = seen.loads(instance) @ seen.weights
    frozen = planner.move_steps(seen.context)
    lasting = np.maximum(seen.remaining / seen.weights.sum(), 1.0)
    used: set[int] = set()
    moves: list[tuple[int, int, float]] = []
    while len(moves) < planner.moves and base > 0:
        current, best, least = seen.variance(instance), None, 1e-12
        for r, source in enumerate(instance):
            settled = seen.since[r] >= max(planner.payback * frozen[r], 0)
            if source in used or not settled:
                continue
            if not load[source] > (1 + planner.theta) * load.mean():
                continue
            one = view.forecast.select(np.array([r]))
            outlives = float(one.at_each(planner.payback * frozen[r])[0])
            cost = frozen[r] / (len(instance) * lasting[r]) * view.kv_load.mean() ** 2
            cost /= planner.load_share * base
            for t in np.flatnonzero(load < load.mean()):
                need = seen.context[r] + seen.remaining[r]
                if int(t) in used or not has_room(view, planner, need, t):
                    continue
                if seen.likelier(planner, r, int(t)):
                    continue
                gain = (current - seen.variance(moved(instance, r, t))) / base
                score = outlives * gain - cost
                if score > least + 1e-12:
                    best, least = (r, int(t), gain), score
        if best is None:
            break
        moves.append(best)
        used |= {int(instance[best[0]]), best[1]}
        instance[best[0]] = best[1]
    return moves
