"""Which of the requests that wait fits a place best, found by their totals over the horizon."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_inline
from rescheduler.routing.bfio.state import Search, envelope_with

__all__ = ["best_waiting", "nearest_waiting"]

FloatArray = npt.NDArray[np.float64]


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
