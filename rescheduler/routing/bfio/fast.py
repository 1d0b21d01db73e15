"""BF-IO in microseconds: the weights of the steps to come, a few constructions, a local search."""

import numpy as np

from predictor.compilation import compiled, compiled_inline
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

FURTHEST = 2000
"""Steps looked ahead at most: far more than an instance usually goes without an admission."""
NEGLIGIBLE = 1e-3
"""Weight below which steps are left out."""


@compiled
def free_slots(inputs: RoutingInputs) -> IntArray:
    """Return the slots that the requests of the pool can take, [G]: unlimited ones are many."""
    slots = np.empty(len(inputs.slots), dtype=np.int64)
    for g in range(len(slots)):
        slots[g] = min(max(inputs.slots[g], 0), len(inputs.size))
    return slots


@compiled
def foresight(inputs: RoutingInputs) -> tuple[FloatArray, FloatArray]:
    r"""Return the weight of each point, [P'], and what fills a freed slot by then, [P'].

    Whoever ends is replaced, and with each admission the router can take back a part of what was
    predicted to be uneven: all of it at most, and no more than the tokens that an admission brings
    for those that an end takes. With :math:`\bar c` the mean context of those that run and of
    those that wait, that share is

    .. math:: \alpha = \min(1, \bar c_{\text{waiting}} / \bar c_{\text{running}}) .

    A difference of loads predicted for step h then counts as far as it is still there:
    :math:`(1 - \alpha)^k` of it after k admissions. Of an instance on which :math:`D_g(h)`
    requests are expected to end by then, independently of each other, the expectation of that is
    :math:`\prod_i (1 - \alpha (1 - S_i(h))) \le e^{-\alpha D_g(h)}`, which needs no more than D:

    .. math::
        w(h) = \frac1G \sum_g e^{-\alpha D_g(h)}, \qquad
        D_g(h) = \sum_{i \text{ on } g} \big(1 - S_i(h)\big)
            + U \frac{c_g}{\sum_k c_k} \big(1 - \bar S(h)\big)

    with :math:`\bar S` the mean survival of those that wait, of whom U are admitted now, to an
    instance in proportion to its free slots :math:`c_g`. It is 1 at h = 0 and never rises. Where
    one admission can make up for an end (α = 1), w is the chance that no request was admitted.

    A slot freed is filled from those that are left waiting, if any are, on average half-way
    through the h steps:

    .. math:: \bar s(h) = \operatorname{median}_i c_i + \delta(h) / 2 .

    The median, because what stays in a pool for long is what fits nowhere.

    Args:
        inputs: the decision. Those without ``alive`` have weights of 1 at all P points, and slots
            stay empty.

    Returns:
        w, times the steps that each point stands for, those since the one before; and s̄.
        Both end where w is negligible.
    """
    n, n_points, n_instances = len(inputs.size), len(inputs.points), len(inputs.load)
    weight, refill = np.ones(n_points), np.zeros(n_points)
    if inputs.alive.shape[1] == 0:
        return weight, refill
    slots = free_slots(inputs)
    n_slots = slots.sum()
    admitted_per_slot = min(n, n_slots) / max(n_slots, 1)
    brought, held = inputs.size.sum() / max(n, 1), inputs.load.sum() / max(inputs.running.sum(), 1)
    share = min(brought / held, 1.0) if held > 0.0 else 1.0
    typical = np.median(inputs.size) if n > n_slots else 0.0
    for h in range(n_points):
        ending = 0.0
        for i in range(n):
            ending += (1.0 - inputs.survival[i, h]) / n
        holds = 0.0
        for g in range(n_instances):
            ended = inputs.alive[g, 0] - inputs.alive[g, h]
            ended += admitted_per_slot * slots[g] * ending
            holds += np.exp(-share * ended) / n_instances
        if holds < NEGLIGIBLE:
            return weight[:h], refill[:h]
        if h > 0:
            weight[h] = holds * (inputs.points[h] - inputs.points[h - 1])
        if n > n_slots:
            refill[h] = typical + inputs.growth[h] / 2
    return weight, refill


@compiled
def loads_ahead(
    inputs: RoutingInputs, requests: IntArray, weight: FloatArray, refill: FloatArray
) -> tuple[FloatArray, FloatArray]:
    r"""Return the weighted loads before the decision, [G, P'], and those of requests, [m, P'].

    .. math::
        w(h) \Big[\Lambda_g(h) + \bar s(h) \sum_{i \text{ on } g} \big(1 - S_i(h)\big)\Big],
        \qquad
        w(h) \Big[S_i(h) \big(c_i + \delta(h)\big) + \big(1 - S_i(h)\big) \bar s(h)\Big]

    J is homogeneous at each h: that of weighted loads is the weighted J.

    Args:
        inputs: the decision; without points the present loads and sizes are returned, P' = 1.
        requests: [m] rows of waiting requests.
        weight: [P'] as `foresight` returns it.
        refill: [P'] s̄, likewise.
    """
    m, n_instances, n_points = len(requests), len(inputs.load), len(weight)
    if n_points == 0:
        now, sizes = np.empty((n_instances, 1)), np.empty((m, 1))
        now[:, 0] = inputs.load
        for j in range(m):
            sizes[j, 0] = inputs.size[requests[j]]
        return now, sizes
    row, brought = np.empty((n_instances, n_points)), np.empty((m, n_points))
    filled = inputs.alive.shape[1] > 0
    for g in range(n_instances):
        for h in range(n_points):
            row[g, h] = inputs.ahead[g, h]
        if filled:
            for h in range(n_points):
                ended = inputs.alive[g, 0] - inputs.alive[g, h]
                row[g, h] = weight[h] * (row[g, h] + ended * refill[h])
    for j in range(m):
        i, tokens = requests[j], float(inputs.size[requests[j]])
        for h in range(n_points):
            brought[j, h] = inputs.survival[i, h] * (tokens + inputs.growth[h])
        if filled:
            for h in range(n_points):
                ended = 1.0 - inputs.survival[i, h]
                brought[j, h] = weight[h] * (brought[j, h] + ended * refill[h])
    return row, brought


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
