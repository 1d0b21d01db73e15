"""BF-IO in microseconds: a few constructions, the best of which a local search improves."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.bfio.foresight import foresight, free_slots, loads_ahead
from rescheduler.routing.bfio.search import even_out, local_search
from rescheduler.routing.bfio.start import best_start
from rescheduler.routing.bfio.state import Search, new_search
from rescheduler.routing.inputs import RoutingInputs, best_by_load, place

__all__ = ["bfio_fast", "evened_out", "must_admit"]

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
        parameters: W or -1 for no starvation bound.
        target: [n] instance of each request; -1 where it goes on waiting.
    """
    slots = free_slots(inputs)
    n_instances, n_slots = len(slots), slots.sum()
    if n_slots == 0 or len(target) == 0:
        return
    forced = must_admit(inputs, parameters[0])
    requests, n_forced = _candidates(forced, max(CANDIDATES, CANDIDATES_PER_SLOT * n_slots))
    m = len(requests)
    weight, refill = foresight(inputs)
    search, row = _search_of(inputs, requests, weight, refill)
    start, fixed = np.full(m, -1, dtype=np.int64), np.zeros(m, dtype=np.bool_)
    for j in range(n_forced):
        start[j], fixed[j] = forced[requests[j]], True
    best = best_start(search, row, slots, inputs.room, start, n_slots)
    admitted = min(m, n_slots)
    scale = min(admitted, max(n_instances, admitted / 4)) / 8
    limit = int(WORK * scale**GROWTH + MORE_WORK / row.shape[1])
    # The same random numbers for every decision: it depends on the inputs alone.
    seed = np.array([88172645463325252], dtype=np.uint64)
    local_search(search, row, slots, inputs.room, best, fixed, seed, limit)
    even_out(search, row, slots, inputs.room, best)
    for j in range(m):
        if best[j] >= 0:
            place(inputs, target, requests[j], best[j])
            n_slots -= 1
    if n_slots > 0:
        _place_what_fits(inputs, target)


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
    """Return an assignment of the same or a smaller J, as `even_out` chooses it."""
    n = len(inputs.size)
    weight, refill = foresight(inputs)
    search, row = _search_of(inputs, np.arange(n), weight, refill)
    best = target.copy()
    even_out(search, row, inputs.slots, inputs.room, best)
    return best


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
def _search_of(
    inputs: RoutingInputs, requests: IntArray, weight: FloatArray, refill: FloatArray
) -> tuple[Search, FloatArray]:
    """Return a search among these requests, and L_g(h) before the decision, [G, P']."""
    m = len(requests)
    row, brought = loads_ahead(inputs, requests, weight, refill)
    size, load = np.zeros(m + 1, dtype=np.int64), np.zeros((m + 1, row.shape[1]))
    for j in range(m):
        size[j] = inputs.size[requests[j]]
        for h in range(row.shape[1]):
            load[j, h] = brought[j, h]
    return new_search(load, size, len(inputs.load)), row


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
