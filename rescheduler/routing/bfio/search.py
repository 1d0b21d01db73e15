"""The local search of BF-IO: requests swapped, exchanged and moved until J falls no more."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.routing.bfio.state import (
    Search,
    add,
    best_waiting,
    envelope_exchanged,
    leave,
    rank,
    refresh,
    remove,
    restore,
    value,
)
from rescheduler.routing.inputs import FloatArray, IntArray

__all__ = ["even_out", "local_search"]

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
