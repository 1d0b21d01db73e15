"""An assignment that BF-IO searches from: its loads, its envelope, its pool, and their changes."""

from typing import NamedTuple

import numpy as np
from numba import njit

from predictor.compilation import compiled, compiled_inline
from rescheduler.routing.inputs import FloatArray, IntArray

__all__ = [
    "OTHERS",
    "REST",
    "Search",
    "accumulate",
    "add",
    "best_waiting",
    "envelope_exchanged",
    "envelope_with",
    "leave",
    "nearest_waiting",
    "new_search",
    "rank",
    "refresh",
    "remove",
    "restore",
    "value",
]


TOP, SECOND, OTHERS, REST = range(4)
"""Rows of `Search.line`."""
# Sums in the order that suits vector registers.
_summing = njit(
    cache=True,
    nogil=True,
    _nrt=False,
    forceinline=True,
    fastmath={"reassoc", "contract", "nnan", "nsz"},
)


class Search(NamedTuple):
    r"""An assignment of candidates, and what is needed to change it in O(H).

    m candidates, G instances, P points. Candidate m brings nothing: to change places with it is
    to move.

    Attributes:
        weight: [m + 1, P] ŵ_i(h), as `loads_ahead` returns them.
        total: [m + 1] Σ_h ŵ_i(h).
        size: [m + 1] context tokens.
        order: [m] candidates by ascending total.
        ascending: [m] their totals.
        row: [G, P] L_g(h).
        row_total: [G] Σ_h L_g(h).
        slots: [G] still free.
        room: [G] context tokens still free.
        line: [4, P] the largest of L_g(h) over g, and the second; then, for one instance, the
            largest of the others, and its own L without one request.
        at: [2, P] whose the largest is, and the second.
        where: [m + 1] instance of each candidate, or -1.
        work: [1] done so far, about in multiples of one addition in a vector register.
    """

    weight: FloatArray
    total: FloatArray
    size: IntArray
    order: IntArray
    ascending: FloatArray
    row: FloatArray
    row_total: FloatArray
    slots: IntArray
    room: IntArray
    line: FloatArray
    at: IntArray
    where: IntArray
    work: IntArray


@compiled
def new_search(weight: FloatArray, size: IntArray, n_instances: int) -> Search:
    """Return a search without a state, which `restore` gives it."""
    m, n_points = len(size) - 1, weight.shape[1]
    total = np.zeros(m + 1)
    for i in range(m):
        for h in range(n_points):
            total[i] += weight[i, h]
    order = np.argsort(total[:m])
    ascending = np.empty(m)
    for rank in range(m):
        ascending[rank] = total[order[rank]]
    return Search(
        weight,
        total,
        size,
        order,
        ascending,
        np.empty((n_instances, n_points)),
        np.empty(n_instances),
        np.empty(n_instances, dtype=np.int64),
        np.empty(n_instances, dtype=np.int64),
        np.empty((4, n_points)),
        np.empty((2, n_points), dtype=np.int64),
        np.full(m + 1, -1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@_summing  # type: ignore[untyped-decorator]
def envelope_with(search: Search, j: int) -> float:
    """Return Σ_h of the largest load when j joins the instance of `REST`."""
    weight, line = search.weight, search.line
    total = 0.0
    for h in range(weight.shape[1]):
        own = line[REST, h] + weight[j, h]
        others = line[OTHERS, h]
        total += own if own > others else others
    return total


@_summing  # type: ignore[untyped-decorator]
def envelope_exchanged(search: Search, i: int, g: int, j: int, k: int) -> float:
    """Return Σ_h of the largest load when i on g, which `leave` set, and j on k change places."""
    weight, row, line, at = search.weight, search.row, search.line, search.at
    total = 0.0
    for h in range(weight.shape[1]):
        less = weight[i, h] - weight[j, h]
        first, second = row[g, h] - less, row[k, h] + less
        # Where g and k are largest and second, their new maximum is above the second anyway.
        others = line[SECOND, h] if at[0, h] == k else line[OTHERS, h]
        own = first if first > second else second
        total += own if own > others else others
    return total


@_summing  # type: ignore[untyped-decorator]
def leave(search: Search, g: int, i: int) -> tuple[float, float]:
    """Set `REST` to g without i, and `OTHERS`; return Σ_h of the others and of the largest."""
    weight, row, line, at = search.weight, search.row, search.line, search.at
    others, largest = 0.0, 0.0
    for h in range(weight.shape[1]):
        line[REST, h] = row[g, h] - weight[i, h]
        top = line[TOP, h]
        other = line[SECOND, h] if at[0, h] == g else top
        line[OTHERS, h] = other
        others += other
        largest += top
    return others, largest


@_summing  # type: ignore[untyped-decorator]
def accumulate(rows: FloatArray, g: int, weight: FloatArray, i: int, sign: float) -> None:
    """Add ``sign`` times row i of the weights to row g."""
    for h in range(rows.shape[1]):
        rows[g, h] += sign * weight[i, h]


@compiled_inline
def add(search: Search, i: int, g: int) -> None:
    """Put candidate i on instance g; the envelope is not brought up to date."""
    accumulate(search.row, g, search.weight, i, 1.0)
    search.row_total[g] += search.total[i]
    search.slots[g] -= 1
    search.room[g] -= search.size[i]
    search.where[i] = g


@compiled_inline
def remove(search: Search, i: int, g: int) -> None:
    """Undo `add`."""
    accumulate(search.row, g, search.weight, i, -1.0)
    search.row_total[g] -= search.total[i]
    search.slots[g] += 1
    search.room[g] += search.size[i]
    search.where[i] = -1


@compiled_inline
def _rank_column(search: Search, h: int) -> None:
    """Find the largest and the second of the loads at one point."""
    largest, second, first_at, second_at = -np.inf, -np.inf, 0, 0
    for g in range(search.row.shape[0]):
        load = search.row[g, h]
        if load > second:
            if load > largest:
                largest, second, first_at, second_at = load, largest, g, first_at
            else:
                second, second_at = load, g
    search.line[TOP, h], search.line[SECOND, h] = largest, second
    search.at[0, h], search.at[1, h] = first_at, second_at


@compiled_inline
def refresh(search: Search, g: int) -> None:
    """Bring the envelope up to date after instance g has changed."""
    line, at = search.line, search.at
    for h in range(line.shape[1]):
        load = search.row[g, h]
        first, second = at[0, h] == g, at[1, h] == g
        if (first | second) and load < line[SECOND, h]:
            _rank_column(search, h)
        elif first:
            line[TOP, h] = load
        elif load > line[TOP, h]:
            line[SECOND, h], at[1, h] = line[TOP, h], at[0, h]
            line[TOP, h], at[0, h] = load, g
        elif second or load > line[SECOND, h]:
            line[SECOND, h], at[1, h] = load, g


@compiled_inline
def restore(
    search: Search, row: FloatArray, slots: IntArray, room: IntArray, where: IntArray
) -> None:
    """Set the loads before the decision, and the assignment of ``where`` on top of them."""
    n_instances, n_points = row.shape
    for g in range(n_instances):
        total = 0.0
        for h in range(n_points):
            search.row[g, h] = row[g, h]
            total += row[g, h]
        search.row_total[g] = total
        search.slots[g] = slots[g]
        search.room[g] = room[g]
    for i in range(len(where)):
        search.where[i] = -1
        if where[i] >= 0:
            add(search, i, where[i])


@compiled_inline
def rank(search: Search) -> None:
    """Find the envelope anew."""
    for h in range(search.line.shape[1]):
        _rank_column(search, h)


@_summing  # type: ignore[untyped-decorator]
def value(search: Search) -> float:
    """Return J, the envelope being up to date."""
    largest, loads = 0.0, 0.0
    for h in range(search.line.shape[1]):
        largest += search.line[TOP, h]
    for g in range(len(search.row_total)):
        loads += search.row_total[g]
    return len(search.row_total) * largest - loads


@compiled_inline
def _first_not_below(ascending: FloatArray, wanted: float) -> int:
    """Return the index of the first of the ascending numbers that is not below the wanted."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) >> 1
        if ascending[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@compiled_inline
def best_waiting(
    search: Search, ceiling: float, rest: float, room: int, limit: float, reach: int
) -> int:
    r"""Return the waiting candidate that joins `REST` at the least cost, below a limit, or -1.

    .. math:: \sum_h G \max\big(O(h), R(h) + \hat w_j(h)\big) - \hat w_j(h)
        \ge G \max\Big(\sum_h O, \sum_h R + \hat w_j\Big) - \sum_h \hat w_j

    bounds the cost by the candidate's total alone, so that they are looked at in the order of
    that bound, away from the total that fills up to the others, and no further than it helps.

    Args:
        search: with `OTHERS` (O) and `REST` (R) set.
        ceiling: Σ_h O.
        rest: Σ_h R.
        room: context tokens that the candidate may bring.
        limit: cost from which on none is wanted.
        reach: candidates looked at, at most.
    """
    n_instances, m = float(search.row.shape[0]), len(search.order)
    up = _first_not_below(search.ascending, ceiling - rest)
    down = up - 1
    best, left = -1, reach
    while left > 0:
        low = n_instances * ceiling - search.ascending[down] if down >= 0 else np.inf
        high = np.inf
        if up < m:
            high = n_instances * (rest + search.ascending[up]) - search.ascending[up]
        if min(low, high) >= limit:
            break
        if low <= high:
            j = search.order[down]
            down -= 1
        else:
            j = search.order[up]
            up += 1
        if search.where[j] >= 0 or search.size[j] > room:
            continue
        left -= 1
        envelope = envelope_with(search, j)
        cost = n_instances * envelope - search.total[j]
        if cost < limit:
            best, limit = j, cost
    looked_at, passed = reach - left, up - down - 1
    search.work[0] += looked_at * (search.row.shape[1] + 32) + 10 * passed
    return best


@compiled_inline
def nearest_waiting(search: Search, wanted: float, room: int) -> int:
    """Return the waiting candidate whose total is nearest to the wanted one, or -1."""
    m = len(search.order)
    up = _first_not_below(search.ascending, wanted)
    down = up - 1
    while down >= 0 or up < m:
        below = wanted - search.ascending[down] if down >= 0 else np.inf
        above = search.ascending[up] - wanted if up < m else np.inf
        if below <= above:
            j = search.order[down]
            down -= 1
        else:
            j = search.order[up]
            up += 1
        if search.where[j] < 0 and search.size[j] <= room:
            return j  # type: ignore[no-any-return]
    return -1
