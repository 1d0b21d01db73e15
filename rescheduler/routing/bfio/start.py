"""The assignments that BF-IO's search can begin with: FCFS, and quick constructions."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled, compiled_inline
from rescheduler.routing.bfio.pool import best_waiting, nearest_waiting
from rescheduler.routing.bfio.state import (
    OTHERS,
    REST,
    Search,
    accumulate,
    add,
    rank,
    restore,
    value,
)

__all__ = ["best_start"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LEVELS = 3
"""Envelopes that constructions aim at."""
FITS = 8
"""Requests looked at for the last slot of an instance in a construction."""


@compiled
def best_start(
    search: Search,
    row: FloatArray,
    slots: IntArray,
    room: IntArray,
    start: IntArray,
    n_slots: int,
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
