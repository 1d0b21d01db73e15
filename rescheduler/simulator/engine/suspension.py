"""Whom an instance suspends when its KV cache is full, and when it comes back.

The rules of `rescheduler.ordering.victims`, on the engine's arrays.
"""

from math import exp

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.simulator.engine.engine_state import (
    NONE,
    Cluster,
    FloatArray,
    Rests,
    Rules,
    Suspends,
)
from rescheduler.simulator.forecasts.forecast_arrays import NONE as NO_FORECAST
from rescheduler.simulator.forecasts.forecast_arrays import expected_remaining

LOOKED_STEPS, LOOKED_AT = 8, 16
"""Steps between two looks for room, and suspended requests that each looks at."""
_LONGEST_SUSPENSION, _SHORTEST_LIMIT = 2.0, 256.0
"""Steps for which one is passed by, as a multiple of its expected rest, and at least."""
_RECOMPUTED = 64.0
"""Tokens of context that are computed again in the time of about a step."""
_HORIZONS = 16


@compiled_core
def expected_rest(
    rules: Rules, rests: Rests, cluster: Cluster, g: int, row: int, generated: int, context: int
) -> float:
    """Return the tokens that a request is expected to generate yet, at least 1."""
    request = cluster.requests[row]
    if rules.suspends != Suspends.AGE and rests.forecast.kind != NO_FORECAST:
        rest = expected_remaining(
            rests.forecast, request.number, request.template, generated, request.output
        )
    elif rests.known[g] == 0:
        rest = float(context)
    elif generated < rests.known[g]:
        rest = rests.by_age[g, generated]
    else:
        rest = float(generated)
    if len(rests.caps) > 0:
        rest = min(rest, float(rests.caps[request.template] - generated))
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
    rest = expected_rest(rules, rests, cluster, g, row, request.generated, request.context)
    request.rest = rest
    request.until = instance.steps + round(max(_LONGEST_SUSPENSION * rest, _SHORTEST_LIMIT))
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


@compiled_inline
def keep_for_a_while(cluster: Cluster, row: int, g: int) -> None:
    """Protect a request that is back until it has gained what it costs to compute it anew."""
    request = cluster.requests[row]
    gained = min(request.rest, request.context / _RECOMPUTED)
    request.until = cluster.instances[g].steps + round(gained)


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
    n = _list_running(rules, rests, cluster, g)
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
        due = idle or request.until <= instance.steps
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


@compiled_core
def peak(contexts: FloatArray, rests: FloatArray, n: int) -> float:
    """Return `rescheduler.ordering.expected_rest.peak` of the first n."""
    longest, most = 2.0, 0.0
    for i in range(n):
        longest = max(longest, rests[i])
        most += contexts[i]
    for k in range(_HORIZONS):
        ahead, held = longest ** (k / (_HORIZONS - 1)), 0.0
        for i in range(n):
            held += exp(-ahead / rests[i]) * (contexts[i] + ahead)
        most = max(most, held)
    return most
