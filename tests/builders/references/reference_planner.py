"""The planners in plain Python, request by request, to hold the compiled ones against."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rescheduler.cluster.cluster_view import NEVER_MOVED, ClusterView
from rescheduler.migration import Star, Survival


@dataclass
class Request:
    """One request of a view, by its index, with S at every point and E[R]."""

    index: int
    instance: int
    context: int
    since_move: int
    survival: list[float]
    remaining: float


def requests_of(view: ClusterView, points: Sequence[int]) -> list[Request]:
    n = len(view.instance)
    since = [int(NEVER_MOVED)] * n if view.since_move is None else view.since_move.tolist()
    curves, means = np.ones((n, len(points))), np.zeros(n)
    if view.forecast is not None and n:
        curves, means = view.forecast.at(np.array(points)), view.forecast.mean()
    return [
        Request(
            i,
            int(view.instance[i]),
            int(view.context_tokens[i]),
            since[i],
            curves[i].tolist(),
            means[i],
        )
        for i in range(n)
    ]


def loads(requests: list[Request], n_instances: int, points: Sequence[int]) -> list[list[float]]:
    table = [[0.0] * len(points) for _ in range(n_instances)]
    for r in requests:
        for p, h in enumerate(points):
            table[r.instance][p] += r.survival[p] * (r.context + h)
    return table


def variance(table: list[list[float]], weights: Sequence[float]) -> float:
    total = 0.0
    for p, weight in enumerate(weights):
        column = [row[p] for row in table]
        mean = sum(column) / len(column)
        total += weight * sum((x - mean) ** 2 for x in column) / len(column)
    return total


def weights_of(beta: float, points: Sequence[int]) -> list[float]:
    weights = [1.0]
    for before, p in pairwise(points):
        weights.append(sum(beta**h for h in range(before + 1, p + 1)))
    return weights


def best_star_move(view: ClusterView, star: Star) -> tuple[float, set[tuple[int, int]]]:
    """The least variance over the one before that a move of Algorithm 1 leaves, and the moves
    that reach it: (request, target); (1, {}) if no move lowers it."""
    points = star.points().tolist()
    weights = weights_of(star.beta, points)
    requests = requests_of(view, points)
    table = loads(requests, view.n_instances, points)
    now = view.kv_load.tolist()
    if len(points) == 1:
        weighted = [float(load) for load in now]
    else:
        share = sum(weights[1:])
        weighted = [
            sum(w * x for w, x in zip(weights[1:], row[1:], strict=True)) / share for row in table
        ]
    mean = sum(weighted) / len(weighted)
    over = [w > (1 + star.theta) * mean for w in weighted]
    if star.underloaded == "paper":
        under = [n < (1 + star.theta) * mean for n in now]
    else:
        under = [w < mean for w in weighted]
    base = variance(table, weights)
    found: dict[tuple[int, int], float] = {}
    for r in requests:
        cost = star.handshake_seconds + r.context * star.kv_bytes_per_token / star.bandwidth
        if r.since_move < 0 or not over[r.instance]:
            continue
        if star.prediction and not r.remaining > cost / star.step_seconds:
            continue
        need = float(r.context)
        if star.prediction:
            need = r.context + r.remaining
            if star.memory == "paper":
                need = max(r.context, r.remaining)
        for t in range(view.n_instances):
            if t == r.instance or not under[t] or view.slots[t] <= view.running[t]:
                continue
            if now[t] + need > star.memory_share * view.kv_capacity[t]:
                continue
            source, r.instance = r.instance, t
            found[r.index, t] = variance(loads(requests, view.n_instances, points), weights)
            r.instance = source
    least = min(found.values(), default=base)
    if not least < base * (1 - 1e-9):
        return 1.0, set()
    return least / base, {move for move, v in found.items() if v <= least + 1e-9 * base}


def survival_moves(view: ClusterView, planner: Survival) -> list[tuple[int, int, float]]:
    """The moves that `Survival` describes, found by trying all: request, target, gain."""
    points = planner.points().tolist()
    weights = weights_of(planner.beta, points)
    requests = requests_of(view, points)
    g = view.n_instances
    table = loads(requests, g, points)
    base = variance(table, weights)
    load = [sum(w * x for w, x in zip(weights, row, strict=True)) for row in table]
    mean = sum(load) / g
    now = view.kv_load.tolist()
    used: set[int] = set()
    moves: list[tuple[int, int, float]] = []
    while len(moves) < planner.moves:
        current = loads(requests, g, points)
        best: tuple[float, Request, int, float] | None = None
        for r in requests:
            s = r.instance
            if s in used or not load[s] > (1 + planner.theta) * mean or base <= 0:
                continue
            frozen = float(planner.move_steps(np.array([r.context]))[0])
            if r.since_move < 0 or r.since_move < planner.payback * frozen:
                continue
            assert view.forecast is not None
            one = view.forecast.select(np.array([r.index]))
            outlives = float(one.at_each(planner.payback * frozen)[0])
            lasting = max(r.remaining / sum(weights), 1.0)
            cost = frozen / (len(requests) * lasting) * (sum(now) / g) ** 2
            cost /= planner.load_share * base
            for t in range(g):
                if t in used or not load[t] < mean or view.slots[t] <= view.running[t]:
                    continue
                limit = planner.memory_share * view.kv_capacity[t]
                if now[t] + r.context + r.remaining > limit:
                    continue
                r.instance = t
                after = variance(loads(requests, g, points), weights)
                r.instance = s
                gain = (variance(current, weights) - after) / base
                score = outlives * gain - cost
                if score > 1e-12 and (best is None or score > best[0] + 1e-12):
                    best = score, r, t, gain
        if best is None:
            break
        _, r, t, gain = best
        moves.append((r.index, t, gain))
        used |= {r.instance, t}
        r.instance = t
    return moves
