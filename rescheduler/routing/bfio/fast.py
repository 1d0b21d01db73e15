"""BF-IO in microseconds: a few constructions, the best of which a local search improves."""

import numpy as np

from predictor.compilation import compiled, compiled_inline
from rescheduler.routing.bfio.foresight import foresight, free_slots, loads_ahead
from rescheduler.routing.bfio.search import (
    OTHERS,
    REST,
    Search,
    accumulate,
    add,
    best_waiting,
    even_out,
    local_search,
    nearest_waiting,
    new_search,
    rank,
    restore,
    value,
)
from rescheduler.routing.inputs import FloatArray, IntArray, RoutingInputs, best_by_load, place

LEVELS = 3
"""Envelopes that constructions aim at."""
FITS = 8
"""Requests looked at for the last slot of an instance in a construction."""


@compiled
def best_start(
    search: Search, row: FloatArray, slots: IntArray, room: IntArray, start: IntArray, n_slots: int
) -> IntArray:
    """Return the assignment, [m], to begin the local search with."""
    m, n_points = len(start), row.shape[1]
    n_instances = len(slots)
    loads, highest = np.zeros(n_points), np.full(n_points, -np.inf)
    for g in range(n_instances):
        for h in range(n_points):
            loads[h] += row[g, h]
            highest[h] = max(highest[h], row[g, h])
    best = np.empty(m, dtype=np.int64)
    best_admitted, best_value = -1, np.inf
    window = np.empty((1, n_points))
    crowded = m > n_slots
    for attempt in range(1 + LEVELS if crowded else 2):
        restore(search, row, slots, room, start)
        if attempt == 0:
            _first_come(search)
        elif crowded:
            # As high as the loads would be if all were equal and the admitted requests were
            # a run of the pool in ascending order: from its short end to its long end.
            first = (m - n_slots) * (2 * attempt - 1) // (2 * LEVELS)
            for h in range(n_points):
                window[0, h] = loads[h]
            for position in range(first, first + n_slots):
                accumulate(window, 0, search.weight, search.order[position], 1.0)
            for h in range(n_points):
                search.line[OTHERS, h] = max(window[0, h] / n_instances, highest[h])
            _fill_up_to(search)
        admitted = _longest_first(search)
        rank(search)
        reached = value(search)
        if admitted > best_admitted or (admitted == best_admitted and reached < best_value):
            best_admitted, best_value = admitted, reached
            for j in range(m):
                best[j] = search.where[j]
    return best


@compiled_inline
def _first_come(search: Search) -> None:
    """Place the candidates in turn, each on the first instance that it fits."""
    first_free = 0
    for j in range(len(search.order)):
        while first_free < len(search.slots) and search.slots[first_free] == 0:
            first_free += 1
        for g in range(first_free, len(search.slots)):
            if search.where[j] < 0 and search.slots[g] > 0 and search.room[g] >= search.size[j]:
                add(search, j, g)
                break


@compiled
def _fill_up_to(search: Search) -> None:
    """Fill the slots so that the loads come near the envelope that is in `OTHERS`.

    In each round, an instance with so many slots left takes the request that is nearest to
    its share of what it lacks; for the last slot the one that fits best at all points.
    """
    n_instances, n_points = search.row.shape
    aim, most = 0.0, 0
    for h in range(n_points):
        aim += search.line[OTHERS, h]
    for g in range(n_instances):
        most = max(most, search.slots[g])
    lack = np.empty(n_instances)
    for left in range(most, 0, -1):
        for g in range(n_instances):
            lack[g] = (search.row_total[g] - aim) / left
        for g in np.argsort(lack):
            if search.slots[g] < left:
                continue
            if left > 1:
                j = nearest_waiting(search, -lack[g], search.room[g])
            else:
                for h in range(n_points):
                    search.line[REST, h] = search.row[g, h]
                j = best_waiting(search, aim, search.row_total[g], search.room[g], np.inf, FITS)
            if j >= 0:
                add(search, j, g)


@compiled_inline
def _longest_first(search: Search) -> int:
    """Place the longest first, where least is expected; return how many are placed at last."""
    admitted, n_slots = 0, 0
    for g in range(len(search.slots)):
        n_slots += search.slots[g]
    for position in range(len(search.order) - 1, -1, -1):
        j = search.order[position]
        if n_slots > 0 and search.where[j] < 0:
            least = -1
            for g in range(len(search.slots)):
                fits = search.slots[g] > 0 and search.room[g] >= search.size[j]
                if fits and (least < 0 or search.row_total[g] < search.row_total[least]):
                    least = g
            if least >= 0:
                add(search, j, least)
                n_slots -= 1
        admitted += search.where[j] >= 0
    return admitted


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
