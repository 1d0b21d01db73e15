"""The local search of BF-IO: requests swapped, exchanged and moved until J falls no more."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from predictor.compilation import compiled, compiled_core, compiled_inline
from rescheduler.routing.inputs import FloatArray, IntArray

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


BoolArray = npt.NDArray[np.bool_]

KICKS = 4
"""Random changes that lead from one local optimum towards another."""
OPTIMA = 6
"""Local optima at most, for each pair of an admitted request, but one, and a candidate."""
WORSE = 3.0
"""How many times the best J a local optimum may have for the search to go on from there."""
PARTNERS, PATIENCE = 16, 128
"""Exchanges looked at for one request: when one of them helps, and when none does."""
TINY = 1e-9
"""Relative change of J that is rounding."""


@compiled_inline
def _propose(search: Search, i: int, g: int, swap: bool, spare: bool) -> tuple[int, int]:
    """Return a better (j, k) for i on g: j takes its place, i goes to k; or -1 for j.

    First the best waiting candidate (k = -1, the pool), if ``swap``. Then, if g is the largest
    somewhere, the exchange with a request elsewhere that lowers the envelope most, or, if there
    are ``spare`` slots, the move there.
    """
    n_instances, n_points = search.row.shape
    m = len(search.order)
    ceiling, largest = leave(search, g, i)
    search.work[0] += 2 * n_points + 150
    if swap:
        limit = n_instances * largest - search.total[i]
        limit -= TINY * abs(limit)
        rest, room = search.row_total[g] - search.total[i], search.room[g] + search.size[i]
        j = best_waiting(search, ceiling, rest, room, limit, m)
        if j >= 0:
            return j, -1
    limit = largest * (1 - TINY)
    if ceiling >= limit:
        return -1, -1
    n_places = m + n_instances if spare else m
    looked_at, best_j, best_k = 0, -1, -1
    # Each request begins elsewhere, so that a bounded look does not always meet the same ones.
    step = i
    for step in range(i + 1, i + 1 + n_places):
        place = step if step < n_places else step - n_places
        j = min(place, m)
        k = search.where[j] if place < m else place - m
        if k < 0 or k == g or (j == m and search.slots[k] == 0):
            continue
        difference = search.size[i] - search.size[j]
        if search.room[g] + difference < 0 or search.room[k] < difference:
            continue
        less = search.total[i] - search.total[j]
        if max(search.row_total[g] - less, search.row_total[k] + less) >= limit:
            continue
        looked_at += 1
        envelope = envelope_exchanged(search, i, g, j, k)
        if envelope < limit:
            best_j, best_k, limit = j, k, envelope
        if looked_at == PATIENCE or (looked_at >= PARTNERS and best_j >= 0):
            break
    search.work[0] += looked_at * (3 * n_points + 32) + 10 * (step - i)
    return best_j, best_k


@compiled_inline
def _change(search: Search, i: int, g: int, j: int, k: int) -> None:
    """Let i leave g, where j takes its place, and go to k (-1: the pool)."""
    remove(search, i, g)
    if j < len(search.order):
        if k >= 0:
            remove(search, j, k)
        add(search, j, g)
    if k >= 0:
        add(search, i, k)
    for changed in (g, k):
        if changed >= 0:
            refresh(search, changed)


@compiled_inline
def _draw(seed: npt.NDArray[np.uint64], n: int) -> int:
    """Return one of 0 .. n - 1 (xorshift64)."""
    x = seed[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    seed[0] = x
    return np.int64((x >> np.uint64(11)) % np.uint64(n))  # type: ignore[return-value]


@compiled_core
def local_search(
    search: Search,
    row: FloatArray,
    slots: IntArray,
    room: IntArray,
    best: IntArray,
    fixed: BoolArray,
    seed: npt.NDArray[np.uint64],
    limit: int,
) -> None:
    """Improve the assignment ``best`` in place: it never gets worse, nor admits fewer.

    An iterated local search. Requests have their turn one after the other, round after round,
    and take the change that `_propose` finds. When a round has found none, the assignment is
    kept if it is the best, some random changes are made, and it goes on.

    Args:
        search: of the candidates.
        row: [G, P] loads before the decision.
        slots: [G] free before.
        room: [G] free before.
        best: [m] where each candidate is, or -1.
        fixed: [m] candidates that must be admitted.
        seed: [1] of the random changes, not 0.
        limit: of `Search.work`.
    """
    n_instances, n_points = row.shape
    m = len(best)
    n_slots, n_placed = 0, 0
    for g in range(n_instances):
        n_slots += slots[g]
    for i in range(m):
        n_placed += best[i] >= 0
    swaps, spare = n_placed < m, n_placed < n_slots
    if n_placed == 0:
        return
    optima_left = OPTIMA * (n_placed - 1) * m
    best_value = np.inf
    start_again = True
    turn, unchanged, kicks = -1, 0, 0
    while search.work[0] < limit:
        if start_again:
            restore(search, row, slots, room, best)
            rank(search)
            search.work[0] += 5 * n_instances * n_points + 100
            start_again = False
        j, k = -1, -1
        if kicks > 0:
            kicks -= 1
            i, j = _draw(seed, m), _draw(seed, m)
            while search.where[i] < 0:
                i = i + 1 if i + 1 < m else 0
            g, k = search.where[i], search.where[j]
            if (
                g == k
                or (k < 0 and fixed[i])
                or search.room[g] + search.size[i] < search.size[j]
                or (k >= 0 and search.room[k] + search.size[j] < search.size[i])
            ):
                j = -1
        else:
            turn = turn + 1 if turn + 1 < m else 0
            unchanged += 1
            i, g = turn, search.where[turn]
            if g >= 0:
                j, k = _propose(search, i, g, swaps and not fixed[i], spare)
        if j >= 0:
            _change(search, i, g, j, k)
            search.work[0] += 12 * n_points + 200
            unchanged = 0
        if unchanged >= m:
            reached = value(search)
            if reached < best_value:
                best_value = reached
                for i in range(m):
                    best[i] = search.where[i]
            optima_left -= 1
            if optima_left < 0 or best_value <= TINY * n_points:
                break
            start_again = reached > WORSE * best_value
            unchanged, kicks = 0, KICKS
    if not start_again and value(search) < best_value:
        for i in range(m):
            best[i] = search.where[i]


@compiled_core
def even_out(
    search: Search, row: FloatArray, slots: IntArray, room: IntArray, best: IntArray
) -> None:
    """Choose among assignments of the same J one with less between the most and least loaded.

    The exchange of Lemma 1: as long as the instances of the largest and the smallest total are
    further apart than the largest request, a request of the one changes places with a smaller
    one of the other, if that does not raise J. With J alone, several instances at the maximum
    would hide each other's excess.

    Args: as `local_search`.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), appendix C.1, Lemma 1.
    """
    restore(search, row, slots, room, best)
    rank(search)
    m = len(best)
    for _ in range(m):
        g, k = int(np.argmax(search.row_total)), int(np.argmin(search.row_total))
        apart = search.row_total[g] - search.row_total[k]
        if m == 0 or apart <= search.ascending[m - 1]:
            break
        first, second, least = -1, -1, apart * (1 - TINY)
        for i in range(m):
            if search.where[i] != g:
                continue
            for j in range(m):
                if search.where[j] != k:
                    continue
                left = abs(apart - 2 * (search.total[i] - search.total[j]))
                if left >= least or search.room[k] < search.size[i] - search.size[j]:
                    continue
                _, largest = leave(search, g, i)
                envelope = envelope_exchanged(search, i, g, j, k)
                if envelope <= largest * (1 + TINY):
                    first, second, least = i, j, left
        if first < 0:
            break
        _change(search, first, g, second, k)
        best[first], best[second] = k, g
