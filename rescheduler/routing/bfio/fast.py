"""BF-IO in microseconds: a few constructions, the best of which a local search improves."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.bfio.search import even_out, local_search
from rescheduler.routing.bfio.start import best_start
from rescheduler.routing.bfio.state import Search, new_search
from rescheduler.routing.inputs import RoutingInputs, best_by_load, place

__all__ = ["bfio_fast", "evened_out", "must_admit", "predicted_imbalance"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

CANDIDATES, CANDIDATES_PER_SLOT = 512, 16
"""So many of the pool, the oldest, are looked at; whichever is more."""
WORK, MORE_WORK, GROWTH = 100_000, 2_500_000, 1.25
"""Of the local search: for 8 admitted requests; more, divided by P, since with few points a
change is cheap and the least J small; and the power that it grows by with the requests."""


@compiled
def bfio_fast(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place requests so that J is small; see `BFIO` for J.

    The starts are FCFS and, if more wait than there are slots, constructions that aim at
    envelopes of different height, else the longest request first to the least loaded. The one
    that admits most, and of those the one with the least J, is improved by `local_search`,
    which never makes it worse: J is never above that of FCFS with as many admitted.

    Args:
        inputs: the decision; its arrays take the placements in.
        parameters: W or -1 for no starvation bound; κ.
        target: [n] instance of each request; -1 where it goes on waiting.
    """
    slots = _free_slots(inputs)
    n_instances, n_slots = len(slots), slots.sum()
    if n_slots == 0 or len(target) == 0:
        return
    forced = must_admit(inputs, parameters[0])
    requests, n_forced = _candidates(forced, max(CANDIDATES, CANDIDATES_PER_SLOT * n_slots))
    m = len(requests)
    search, row = _search_of(inputs, requests, parameters[1])
    start, fixed = np.full(m, -1, dtype=np.int64), np.zeros(m, dtype=np.bool_)
    for j in range(n_forced):
        start[j], fixed[j] = forced[requests[j]], True
    best = best_start(search, row, inputs.spread, slots, inputs.room, start, n_slots)
    admitted = min(m, n_slots)
    scale = min(admitted, max(n_instances, admitted / 4)) / 8
    limit = int(WORK * scale**GROWTH + MORE_WORK / row.shape[1])
    # The same random numbers for every decision: it depends on the inputs alone.
    seed = np.array([88172645463325252], dtype=np.uint64)
    local_search(search, row, inputs.spread, slots, inputs.room, best, fixed, seed, limit)
    even_out(search, row, inputs.spread, slots, inputs.room, best)
    for j in range(m):
        if best[j] >= 0:
            place(inputs, target, requests[j], best[j])
            n_slots -= 1
    if n_slots > 0:
        _place_what_fits(inputs, target)


@compiled
def predicted_imbalance(inputs: RoutingInputs, risk: float) -> float:
    r"""Return J, in tokens, of the loads that the inputs have.

    .. math:: J = \sum_h \Big[ G \max_g \big(L_g(h) + \kappa \sqrt{V_g(h)}\big)
        - \sum_g L_g(h) \Big]

    Source: A Universal Load Balancing Principle (Chen et al. 2026), section 4, problem (IO).

    Args:
        inputs: of P points; without points, h = 0 alone counts.
        risk: κ, where the inputs have `spread`, if more than 0.
    """
    n_instances, n_points = len(inputs.load), len(inputs.points)
    if n_points == 0:
        return float(n_instances * inputs.load.max() - inputs.load.sum())
    total = 0.0
    for h in range(n_points):
        largest = -np.inf
        for g in range(n_instances):
            load = inputs.ahead[g, h]
            total -= load
            if risk > 0:
                load += risk * np.sqrt(max(inputs.spread[g, h], 0.0))
            largest = max(largest, load)
        total += n_instances * largest
    return total


@compiled
def must_admit(inputs: RoutingInputs, starvation: float) -> IntArray:
    """Return an instance, or -1, for each request, [n]: the starving ones that can be admitted.

    Those that have waited at least ``starvation`` steps, the oldest first, each to the least
    load that has a slot and KV room. The set binds, the places are a first guess.
    """
    n, n_instances = len(inputs.size), len(inputs.load)
    forced = np.full(n, -1, dtype=np.int64)
    if starvation < 0:
        return forced
    slots, room, load = inputs.slots.copy(), inputs.room.copy(), inputs.load.copy()
    age_rank = np.empty(n, dtype=np.int64)
    for i in range(n):
        age_rank[i] = i - n * inputs.waited[i]
    for i in np.argsort(age_rank):
        if inputs.waited[i] < starvation:
            break
        least = -1
        for g in range(n_instances):
            fits = slots[g] > 0 and room[g] >= inputs.size[i]
            if fits and (least < 0 or load[g] < load[least]):
                least = g
        if least >= 0:
            forced[i] = least
            slots[least] -= 1
            room[least] -= inputs.size[i]
            load[least] += inputs.size[i]
    return forced


@compiled
def evened_out(inputs: RoutingInputs, target: IntArray) -> IntArray:
    """Return an assignment of the same or a smaller J (κ = 0), as `even_out` chooses it."""
    n = len(inputs.size)
    search, row = _search_of(inputs, np.arange(n), 0.0)
    best = target.copy()
    even_out(search, row, inputs.spread, inputs.slots, inputs.room, best)
    return best


@compiled
def _free_slots(inputs: RoutingInputs) -> IntArray:
    """Return the slots that the requests of the pool can take, [G]: unlimited ones are many."""
    slots = np.empty(len(inputs.slots), dtype=np.int64)
    for g in range(len(slots)):
        slots[g] = min(max(inputs.slots[g], 0), len(inputs.size))
    return slots


@compiled
def _candidates(forced: IntArray, at_most: int) -> tuple[IntArray, int]:
    """Return the requests to choose from, those forced first, and how many those are."""
    n = len(forced)
    requests = np.empty(max(min(n, at_most), 0), dtype=np.int64)
    n_forced = 0
    for i in range(n):
        if forced[i] >= 0:
            requests[n_forced] = i
            n_forced += 1
    filled = n_forced
    for i in range(n):
        if filled == len(requests):
            break
        if forced[i] < 0:
            requests[filled] = i
            filled += 1
    return requests, n_forced


@compiled
def _search_of(inputs: RoutingInputs, requests: IntArray, risk: float) -> tuple[Search, FloatArray]:
    """Return a search among these requests, and L_g(h) before the decision, [G, P].

    Inputs without points are looked at now: P = 1, by loads and sizes. Without the variance
    of the loads, κ is 0.
    """
    m, n_instances, n_points = len(requests), len(inputs.load), len(inputs.points)
    if inputs.spread.shape[1] == 0:
        risk = 0.0
    size = np.zeros(m + 1, dtype=np.int64)
    for j in range(m):
        size[j] = inputs.size[requests[j]]
    if n_points == 0:
        row, weight = np.empty((n_instances, 1)), np.zeros((m + 1, 1))
        for g in range(n_instances):
            row[g, 0] = inputs.load[g]
        for j in range(m):
            weight[j, 0] = size[j]
        return new_search(weight, np.empty((0, 1)), size, n_instances, risk), row
    weight = np.zeros((m + 1, n_points))
    noise = np.zeros((m + 1 if risk > 0 else 0, n_points))
    for j in range(m):
        i, tokens = requests[j], float(size[j])
        for h in range(n_points):
            weight[j, h] = inputs.survival[i, h] * (tokens + inputs.growth[h])
        if risk > 0:
            for h in range(n_points):
                noise[j, h] = weight[j, h] * (tokens + inputs.growth[h] - weight[j, h])
    return new_search(weight, noise, size, n_instances, risk), inputs.ahead


@compiled
def _place_what_fits(inputs: RoutingInputs, target: IntArray) -> None:
    """Place what still fits, in order of arrival, on the least load."""
    load = inputs.load.astype(np.float64)
    for i in range(len(target)):
        if target[i] < 0:
            g = best_by_load(inputs, i, load)
            if g >= 0:
                place(inputs, target, i, g)
                load[g] += inputs.size[i]
