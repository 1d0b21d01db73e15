"""Whom an instance suspends when its KV cache is full, and when it comes back.

The rules of `rescheduler.ordering.victims`, on the engine's arrays.
"""

from math import exp

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.ordering.expected_rest import (
    LONGEST_HOLD,
    LONGEST_SUSPENSION,
    LOOKED_AT,
    LOOKED_STEPS,
    RECOMPUTED,
    SHORTEST_LIMIT,
)
from rescheduler.simulator.config.rules import Rules, Suspends
from rescheduler.simulator.engine.engine_state import (
    NONE,
    Cluster,
    FloatArray,
    Rests,
)
from rescheduler.simulator.forecasts.forecast_arrays import NONE as NO_FORECAST
from rescheduler.simulator.forecasts.forecast_arrays import expected_remaining

_FOR_GOOD = 1 << 62
_HORIZONS = 16


@compiled_core
def expected_rest(
    rules: Rules, rests: Rests, cluster: Cluster, g: int, row: int, generated: int, context: int
) -> float:
    """Return the tokens that a request is expected to generate yet, at least 1."""
    if rules.suspends == Suspends.AGE or rests.forecast.kind == NO_FORECAST:
        return rest_by_age(rests, cluster, g, row, generated, context)
    request = cluster.requests[row]
    rest = expected_remaining(
        rests.forecast, request.number, request.template, generated, request.output
    )
    return _capped(rests, request.template, generated, rest)


@compiled_core
def rest_by_age(
    rests: Rests, cluster: Cluster, g: int, row: int, generated: int, context: int
) -> float:
    """Return the rest that others of a request's age had, at least 1."""
    if rests.known[g] == 0:
        rest = float(context)
    elif generated < rests.known[g]:
        rest = rests.by_age[g, generated]
    else:
        rest = float(generated)
    return _capped(rests, cluster.requests[row].template, generated, rest)


@compiled_inline
def _capped(rests: Rests, template: int, generated: int, rest: float) -> float:
    if len(rests.caps) > 0:
        rest = min(rest, float(rests.caps[template] - generated))
    return max(rest, 1.0)


@compiled_core
def longest_rest(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> int:
    """Return the slot of the decoding request that is suspended next, or NONE.

    One that is back is kept until it has gained what it cost, and one that is to move after it.
    """
    instance = cluster.instances[g]
    chosen, longest, latest = NONE, -2.0, -1
    for slot in range(instance.decoding):
        row = cluster.slot_request[g, slot]
        request = cluster.requests[row]
        context = request.context + instance.grown
        if request.target != NONE:
            key = -1.0
        elif request.until > instance.steps:
            key = 0.0
        elif rules.suspends == Suspends.CONTEXT:
            key = float(context)
        else:
            generated = request.output - (cluster.slot_end[g, slot] - instance.steps)
            key = expected_rest(rules, rests, cluster, g, row, generated, context)
        if key > longest or (key == longest and request.admitted > latest):
            chosen, longest, latest = slot, key, request.admitted
    return chosen


@compiled_core
def suspend(rules: Rules, rests: Rests, cluster: Cluster, row: int, g: int) -> None:
    """Put a preempted request among those that others may pass, in the order of their limits."""
    instance, request = cluster.instances[g], cluster.requests[row]
    generated, context = request.generated, request.context
    request.rest = expected_rest(rules, rests, cluster, g, row, generated, context)
    sure = min(request.rest, rest_by_age(rests, cluster, g, row, generated, context))
    limit = round(max(LONGEST_SUSPENSION * sure, SHORTEST_LIMIT))
    request.allowed = limit if request.allowed == NONE else min(limit, request.allowed)
    request.until = instance.steps + request.allowed
    previous, other = NONE, instance.suspended
    while other != NONE and cluster.requests[other].until <= request.until:
        previous, other = other, cluster.requests[other].next
    request.next = other
    if previous == NONE:
        instance.suspended = row
    else:
        cluster.requests[previous].next = row
    instance.queued += 1
    instance.queued_tokens += request.context


@compiled_core
def _keeps_one(cluster: Cluster, g: int) -> bool:
    """Return whether a request runs on an instance that is protected for good."""
    instance = cluster.instances[g]
    for slot in range(instance.decoding):
        if cluster.requests[cluster.slot_request[g, slot]].until == _FOR_GOOD:
            return True
    row = instance.filling
    while row != NONE:
        if cluster.requests[row].until == _FOR_GOOD:
            return True
        row = cluster.requests[row].next
    return False


@compiled_core
def keep_for_a_while(cluster: Cluster, row: int, g: int) -> None:
    """Protect a request that is back until it has gained what it costs to compute it anew.

    One that others passed for as long as they may, in all, is protected for good: one at a time.
    """
    request, steps = cluster.requests[row], cluster.instances[g].steps
    request.allowed = max(0, request.until - steps)
    gained = round(min(request.rest, request.context / RECOMPUTED))
    for_good = request.allowed == 0 and not _keeps_one(cluster, g)
    request.until = _FOR_GOOD if for_good else steps + gained


@compiled_core
def bring_back(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> None:
    """Put the suspended requests that come back now before all others of the queue.

    Those come back that are expected to fit, with what runs, until they end (`peak`). Where nothing
    runs, or its limit has passed, the first comes back in any case, and none begins before it.
    """
    instance = cluster.instances[g]
    if instance.queue_head != NONE and cluster.requests[instance.queue_head].resumes != NONE:
        return  # it has its turn already
    idle = instance.decoding == 0 and instance.filling == NONE
    if not idle and instance.steps - instance.looked < LOOKED_STEPS:
        return
    instance.looked = instance.steps
    n, waits = _list_running(rules, rests, cluster, g), _keeps_one(cluster, g)
    room = rules.kv_capacity - instance.load - instance.arriving_tokens - instance.leaving_tokens
    room -= rules.lost_tokens * (n + instance.arriving)
    first, last, previous = NONE, NONE, NONE
    row = instance.suspended
    for _ in range(LOOKED_AT):
        if row == NONE:
            break
        request = cluster.requests[row]
        following = request.next
        rests.contexts[n] = request.context
        rests.rests[n] = request.rest
        fits = request.context + rules.lost_tokens <= room
        fits = fits and peak(rests.contexts, rests.rests, n + 1) <= rules.kv_capacity
        due = idle or (request.until <= instance.steps and not waits)
        if fits or (due and first == NONE):
            n += 1
            room -= request.context + rules.lost_tokens
            if previous == NONE:
                instance.suspended = following
            else:
                cluster.requests[previous].next = following
            if last == NONE:
                first = row
            else:
                cluster.requests[last].next = row
            last = row
        else:
            previous = row
        if due and not fits:
            break
        row = following
    if first != NONE:
        cluster.requests[last].next = instance.queue_head
        instance.queue_head = first
        if instance.queue_tail == NONE:
            instance.queue_tail = last


@compiled_core
def keeps_cache(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> bool:
    """Return whether nothing new begins yet, as it would overwrite what was just suspended.

    For as long as it would take to compute that anew, if it is expected to fit by then (`held`).
    """
    if not rules.prefix_caching:
        return False
    instance = cluster.instances[g]
    n, room, row = NONE, 0, instance.suspended
    while row != NONE:
        request = cluster.requests[row]
        ahead = min(request.context / RECOMPUTED, LONGEST_HOLD)
        if instance.steps - (request.until - request.allowed) < ahead:
            if n == NONE:
                n = _list_running(rules, rests, cluster, g)
                room = rules.kv_capacity - instance.arriving_tokens - instance.leaving_tokens
                room -= rules.lost_tokens * (n + instance.arriving)
            if request.context + held(rests.contexts, rests.rests, n, ahead) <= room:
                return True
        row = request.next
    return False


@compiled_core
def _list_running(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> int:
    """Write the contexts and expected rests of what an instance runs; return how many run."""
    instance = cluster.instances[g]
    for slot in range(instance.decoding):
        row = cluster.slot_request[g, slot]
        request = cluster.requests[row]
        context = request.context + instance.grown
        generated = request.output - (cluster.slot_end[g, slot] - instance.steps)
        rests.contexts[slot] = context
        rests.rests[slot] = expected_rest(rules, rests, cluster, g, row, generated, context)
    n, row = instance.decoding, instance.filling
    while row != NONE:
        request = cluster.requests[row]
        rests.contexts[n] = request.context
        rests.rests[n] = expected_rest(
            rules, rests, cluster, g, row, request.generated, request.context
        )
        n += 1
        row = request.next
    return n  # type: ignore[no-any-return]


@compiled_inline
def held(contexts: FloatArray, rests: FloatArray, n: int, ahead: float) -> float:
    """Return `rescheduler.ordering.expected_rest.held` of the first n."""
    tokens = 0.0
    for i in range(n):
        tokens += exp(-ahead / rests[i]) * (contexts[i] + ahead)
    return tokens


@compiled_core
def peak(contexts: FloatArray, rests: FloatArray, n: int) -> float:
    """Return `rescheduler.ordering.expected_rest.peak` of the first n."""
    longest, most = 2.0, 0.0
    for i in range(n):
        longest = max(longest, rests[i])
        most += contexts[i]
    for k in range(_HORIZONS):
        most = max(most, held(contexts, rests, n, longest ** (k / (_HORIZONS - 1))))
    return most
