"""A step of an instance: what it computes, how long that takes, and what has come of it."""

from math import isnan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.batching.batch_formation import form_batch, prefill_budget
from rescheduler.simulator.config.rules import Prefill, Rules, Suspends
from rescheduler.simulator.engine.engine_state import (
    MIGRATED,
    NEVER,
    NONE,
    PREEMPTED,
    Cluster,
    Rests,
    Series,
)
from rescheduler.simulator.engine.slots import (
    admit,
    arrives,
    decode,
    finish,
    occupied,
    preempt,
    send_migrations,
    take,
    vacate,
)
from rescheduler.simulator.engine.step_metrics import PowerModel, count_latency, mfu_watts, record
from rescheduler.simulator.engine.suspension import bring_back, keeps_cache
from rescheduler.step_time.step_time import StepTime, step_seconds

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class BatchArrays(NamedTuple):
    """The requests that an instance may compute now, decodes first, then prefills.

    As `form_batch` and `prefill_budget` read them; each is [rows], of which as many are in use
    as the instance has requests.

    Attributes:
        row: of each request.
        slack: seconds until its next token is due.
        tpot: its objective, seconds.
        decoding: it decodes; else it prefills.
        wanted: tokens that could be computed now.
        context: tokens of context once they are.
        order: scratch.
        tokens: to compute.
        prompt_left: tokens of its prompt yet to compute, 0 for decodes.
    """

    row: IntArray
    slack: FloatArray
    tpot: FloatArray
    decoding: npt.NDArray[np.bool_]
    wanted: IntArray
    context: IntArray
    order: IntArray
    tokens: IntArray
    prompt_left: IntArray


def new_batch_arrays(rows: int) -> BatchArrays:
    """Return arrays for as many requests as a cluster has rows."""
    return BatchArrays(
        row=np.zeros(rows, dtype=np.int64),
        slack=np.zeros(rows),
        tpot=np.zeros(rows),
        decoding=np.zeros(rows, dtype=np.bool_),
        wanted=np.zeros(rows, dtype=np.int64),
        context=np.zeros(rows, dtype=np.int64),
        order=np.zeros(rows, dtype=np.int64),
        tokens=np.zeros(rows, dtype=np.int64),
        prompt_left=np.zeros(rows, dtype=np.int64),
    )


@compiled_inline
def slack_of(rules: Rules, cluster: Cluster, row: int, generated: int) -> float:
    r"""Return the seconds until a request's next token is due.

    .. math:: arrival + TTFT + j \cdot TPOT - now

    with j tokens generated so far; or :math:`t_0 + j \cdot TPOT` from its first token on, as
    `SLOConfig.deadlines` has it. Source: Lyu et al. 2025, §3.1.
    """
    service, request = rules.service, cluster.requests[row]
    first = request.arrival + service.ttft
    if service.from_first and generated > 0:
        first = request.first_token
    return first + generated * service.tpot - cluster.scalars[0].now  # type: ignore[no-any-return]


@compiled_core
def choose_batch(rules: Rules, cluster: Cluster, batch: BatchArrays, g: int) -> None:
    """Choose an instance's next step by `form_batch`: who decodes, who waits, what is prefilled.

    A prompt that is begun takes a place and the memory of all of its context. One whose last
    chunk is computed decodes from this step on, as with any chunked prefill.
    """
    instance, scalars = cluster.instances[g], cluster.scalars[0]
    started, begun = instance.decoding, instance.decoding + instance.n_filling
    n = _list_requests(rules, cluster, batch, g, False)
    form_batch(
        rules.service.batches,
        batch.slack[:n],
        batch.tpot[:n],
        batch.decoding[:n],
        batch.wanted[:n],
        batch.context[:n],
        batch.order[:n],
        batch.tokens[:n],
    )
    new, reading = 0, 0
    for i in range(n):
        if batch.tokens[i] > 0:
            new += batch.tokens[i]
            reading += batch.context[i]
    instance.new_tokens = new
    instance.reading = reading
    instance.waiting = 0
    instance.joined = 0
    for slot in range(started):
        waits = batch.tokens[slot] == 0
        cluster.slot_waits[g, slot] = waits
        if waits:
            instance.waiting += 1
            request = cluster.requests[batch.row[slot]]
            if isnan(request.last_token):  # it was in the step that has just ended
                request.last_token = scalars.now
    instance.filling = NONE
    instance.n_filling = 0
    last, before = NONE, NONE
    for i in range(started, n):
        row = batch.row[i]
        request = cluster.requests[row]
        if i >= begun:
            if batch.tokens[i] == 0:
                before = row
                continue
            take(rules, cluster, g, row, before)
            request.todo = request.context
        request.todo -= batch.tokens[i]
        if request.todo == 0:
            instance.load -= request.context  # counted again as it decodes
            request.resumes = NONE
            cluster.slot_waits[g, instance.decoding] = False
            decode(cluster, row, g)
            continue
        request.next = NONE
        if last == NONE:
            instance.filling = row
        else:
            cluster.requests[last].next = row
        last = row
        instance.n_filling += 1


@compiled_core
def _list_requests(
    rules: Rules, cluster: Cluster, batch: BatchArrays, g: int, whole_queue: bool
) -> int:
    """List an instance's requests: its decodes by slot, prompts begun, its queue in its order.

    Of the queue all, or those that there are places and memory for now.
    """
    instance = cluster.instances[g]
    for slot in range(instance.decoding):
        row = cluster.slot_request[g, slot]
        request = cluster.requests[row]
        generated = request.output - (cluster.slot_end[g, slot] - instance.steps)
        context = request.context + instance.grown
        _write(rules, cluster, batch, slot, row, generated, context, 0)
    n = instance.decoding
    row = instance.filling
    while row != NONE:
        request = cluster.requests[row]
        _write(rules, cluster, batch, n, row, request.generated, request.context, request.todo)
        n += 1
        row = request.next
    room = rules.kv_capacity - instance.load
    row = instance.queue_head
    while row != NONE:
        request = cluster.requests[row]
        context = request.context
        on_its_way = arrives(rules, cluster, row) > cluster.scalars[0].now
        if not whole_queue and (n >= rules.slots or context > room or on_its_way):
            break
        # Only a budget knows that what has moved here has its cache already.
        left = 0 if whole_queue and request.resumes == MIGRATED else context
        _write(rules, cluster, batch, n, row, request.generated, context, left)
        room -= context
        n += 1
        row = request.next
    row = instance.suspended if whole_queue else NONE
    while row != NONE:
        request = cluster.requests[row]
        context = request.context
        _write(rules, cluster, batch, n, row, request.generated, context, context)
        n += 1
        row = request.next
    return n  # type: ignore[no-any-return]


@compiled_inline
def _write(
    rules: Rules,
    cluster: Cluster,
    batch: BatchArrays,
    i: int,
    row: int,
    generated: int,
    context: int,
    prompt_left: int,
) -> None:
    batch.row[i] = row
    batch.slack[i] = slack_of(rules, cluster, row, generated)
    batch.tpot[i] = rules.service.tpot
    batch.decoding[i] = prompt_left == 0
    batch.wanted[i] = max(prompt_left, 1)
    batch.context[i] = context
    batch.prompt_left[i] = prompt_left


@compiled_core
def resume_tokens(cluster: Cluster, g: int, end: float) -> int:
    """Count the time between tokens of decodes that had sat steps out; return how many."""
    instance, resumed = cluster.instances[g], 0
    for slot in range(instance.decoding - instance.joined):
        request = cluster.requests[cluster.slot_request[g, slot]]
        if not cluster.slot_waits[g, slot] and not isnan(request.last_token):
            count_latency(cluster, end - request.last_token, 1)
            request.last_token = np.nan
            resumed += 1
    return resumed


@compiled_core
def sit_out(cluster: Cluster, g: int, growth: int) -> None:
    """Put off the ends of the decodes that had no token in the step that ends, nor growth."""
    instance = cluster.instances[g]
    next_end = cluster.slot_end[g, 0] + 1
    for slot in range(instance.decoding):
        if cluster.slot_waits[g, slot]:
            cluster.slot_end[g, slot] += 1
            cluster.requests[cluster.slot_request[g, slot]].context -= growth
        next_end = min(next_end, cluster.slot_end[g, slot])
    instance.next_end = next_end


@compiled_core
def report_budget(rules: Rules, cluster: Cluster, batch: BatchArrays, g: int) -> None:
    """Set an instance's budget as of the step that it is about to compose, see `prefill_budget`.

    Until the next report, prompts placed there are subtracted from it where they are placed.
    """
    n = _list_requests(rules, cluster, batch, g, True)
    service = rules.service
    cluster.instances[g].budget = prefill_budget(
        service.batches,
        service.ttft,
        service.tpot,
        batch.slack[:n],
        batch.context[:n],
        batch.prompt_left[:n],
        service.whole_steps,
    )


@compiled_inline
def turns_away(rules: Rules, cluster: Cluster, row: int, g: int) -> bool:
    """Return whether a prompt is beyond an instance's budget; an empty instance takes any."""
    if not rules.service.admits or occupied(cluster, g) == 0:
        return False
    return cluster.instances[g].budget < cluster.requests[row].prompt  # type: ignore[no-any-return]


@compiled_core
def prepare_steps(rules: Rules, rests: Rests, cluster: Cluster, batch: BatchArrays) -> None:
    """Report budgets and form batches, where objectives say so, before `start_steps`."""
    for g in range(rules.n_instances):
        if cluster.instances[g].stepping:
            continue
        if rules.service.reports:
            report_budget(rules, cluster, batch, g)
        if rules.service.forms:
            if cluster.instances[g].suspended != NONE:
                bring_back(rules, rests, cluster, g)
            choose_batch(rules, cluster, batch, g)


@compiled_inline
def start_steps(
    rules: Rules,
    step_time: StepTime,
    power_model: PowerModel,
    rests: Rests,
    cluster: Cluster,
    series: Series,
) -> None:
    """Let every instance that is not in a step begin its next; behind a barrier, all at once."""
    scalars = cluster.scalars[0]
    if rules.barrier:
        for g in range(rules.n_instances):
            if cluster.instances[g].stepping:
                return
    busy = False
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        if instance.stepping:
            continue
        if not rules.service.forms:
            if instance.suspended != NONE:
                bring_back(rules, rests, cluster, g)
            _compose(rules, rests, cluster, g)
        if instance.decoding > 0 or instance.filling != NONE:
            busy = True
            if not rules.barrier:
                seconds = step_seconds(step_time, instance.new_tokens, instance.reading)
                seconds += step_time.per_mean_context * instance.reading
                going_on = _step(rules, cluster, g, scalars.now + seconds)
                count_latency(cluster, seconds, going_on)
                scalars.busy_seconds += seconds
                scalars.energy_mfu_joules += seconds * mfu_watts(
                    power_model, instance.new_tokens, seconds
                )
    if not rules.barrier or not busy:
        return
    slowest, total = 0.0, 0
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        slowest = max(slowest, step_seconds(step_time, instance.new_tokens, instance.load))
        total += instance.load
    seconds = slowest + step_time.per_mean_context * (total / rules.n_instances)
    going_on, computed, watts_now = 0, -1, 0.0
    for g in range(rules.n_instances):
        going_on += _step(rules, cluster, g, scalars.now + seconds)
        if cluster.instances[g].new_tokens != computed:  # most instances compute as many
            computed = cluster.instances[g].new_tokens
            watts_now = mfu_watts(power_model, computed, seconds)
        scalars.energy_mfu_joules += seconds * watts_now
    count_latency(cluster, seconds, going_on)
    scalars.busy_seconds += seconds
    record(rules, step_time, power_model, cluster, series, 1.0, seconds)


@compiled_inline
def _compose(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> None:
    """Admit what an instance has room for, and choose the tokens of its next step."""
    instance = cluster.instances[g]
    instance.joined = 0
    new = instance.decoding
    if rules.prefill != Prefill.CHUNKED:
        while instance.queued > 0:
            row = _begun(rules, rests, cluster, g)
            if row == NONE:
                break
            again = cluster.requests[row].resumes == PREEMPTED
            new += _to_compute(rules, cluster, row, g) if again else 1
            cluster.requests[row].resumes = NONE
            decode(cluster, row, g)
        instance.new_tokens = new
        instance.reading = instance.load
        return
    budget = max(rules.service.batches.token_budget - instance.decoding, 0)
    while budget > 0:
        row = instance.filling
        if row == NONE:
            row = _begun(rules, rests, cluster, g)
            if row == NONE:
                break
            moved = cluster.requests[row].resumes == MIGRATED
            cluster.requests[row].todo = 0 if moved else _to_compute(rules, cluster, row, g)
            cluster.requests[row].next = NONE
            instance.filling = row
            instance.n_filling = 1
        chunk = min(cluster.requests[row].todo, budget)
        cluster.requests[row].todo -= chunk
        budget -= chunk
        new += chunk
        if cluster.requests[row].todo > 0:
            break
        instance.filling = NONE
        instance.n_filling = 0
        instance.load -= cluster.requests[row].context  # counted again as it decodes
        cluster.requests[row].resumes = NONE
        decode(cluster, row, g)
    instance.new_tokens = new
    instance.reading = instance.load


@compiled_inline
def _begun(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> int:
    """Take the request that an instance begins next out of its queue, or return NONE."""
    instance = cluster.instances[g]
    if instance.suspended != NONE and instance.queue_head != NONE:
        is_new = cluster.requests[instance.queue_head].resumes == NONE
        if is_new and keeps_cache(rules, rests, cluster, g):
            return NONE
    return admit(rules, cluster, g)


@compiled_inline
def _to_compute(rules: Rules, cluster: Cluster, row: int, g: int) -> int:
    """Return the context tokens that a request which has been admitted computes.

    With prefix caching, the blocks of a preempted request are the first to be taken for something
    new, its last ones first: nothing else was free when it was preempted. What is left of them is
    found again, but for the last token.
    """
    instance, request = cluster.instances[g], cluster.requests[row]
    computed = request.context
    if rules.prefix_caching and request.resumes == PREEMPTED:
        overwritten = instance.taken - request.freed
        computed = min(max(request.missing + overwritten, 1), request.context)
    instance.taken += computed
    return computed  # type: ignore[no-any-return]


@compiled_inline
def _step(rules: Rules, cluster: Cluster, g: int, end: float) -> int:
    """Begin a step, whose end is known already; return how many had a token just before it."""
    instance = cluster.instances[g]
    instance.stepping = 1
    instance.step_end = end
    for j in range(instance.joined):
        request = cluster.requests[cluster.joined[g, j]]
        if isnan(request.first_token):
            request.first_token = end
        elif not isnan(request.last_token):
            count_latency(cluster, end - request.last_token, 1)
        request.last_token = np.nan
    going_on = instance.decoding - instance.joined
    if rules.service.forms:
        going_on -= instance.waiting + resume_tokens(cluster, g, end)
    return going_on  # type: ignore[no-any-return]


@compiled_inline
def end_step(rules: Rules, rests: Rests, cluster: Cluster, g: int) -> None:
    """Give each decoding request its token; free what ended, preempt what no longer fits."""
    instance, scalars = cluster.instances[g], cluster.scalars[0]
    growth = rules.drift[instance.steps % len(rules.drift)]
    instance.stepping = 0
    if rules.service.forms and instance.waiting > 0:
        sit_out(cluster, g, growth)
    if rules.service.watches_tpot:
        _watch_tpot(rules, cluster, g)
    given = instance.decoding - instance.waiting
    instance.steps += 1
    scalars.all_steps += 1
    if g == 0:
        scalars.steps += 1
    scalars.tokens += given
    if instance.steps == instance.next_end:
        slot = 0
        next_end = NEVER
        while slot < instance.decoding:
            if cluster.slot_end[g, slot] == instance.steps:
                row = cluster.slot_request[g, slot]
                instance.load -= cluster.requests[row].context + instance.grown
                vacate(cluster, g, slot)
                finish(cluster, row, g, scalars.now)
                if rules.suspends != Suspends.NEWEST:
                    instance.unlearned += 1
                    if instance.unlearned > instance.learn_after:
                        scalars.learns = 1
            else:
                next_end = min(next_end, cluster.slot_end[g, slot])
                slot += 1
        instance.next_end = next_end
    instance.grown += growth
    instance.load += growth * (instance.decoding - instance.waiting)
    instance.taken += growth * (instance.decoding - instance.waiting)
    instance.waiting = 0
    if scalars.leaving > 0:
        send_migrations(rules, cluster, g)
    held = instance.arriving_tokens + instance.leaving_tokens
    while instance.load > 0 and instance.load + held + _lost(rules, cluster, g) > rules.kv_capacity:
        preempt(rules, rests, cluster, g)


@compiled_inline
def _lost(rules: Rules, cluster: Cluster, g: int) -> int:
    """Return the tokens of an instance's KV cache that are in blocks which are not full."""
    instance = cluster.instances[g]
    return rules.lost_tokens * (  # type: ignore[no-any-return]
        instance.decoding + instance.n_filling + instance.arriving
    )


@compiled_core
def _watch_tpot(rules: Rules, cluster: Cluster, g: int) -> None:
    r"""Keep the worst running mean of the requests that get a token now.

    .. math:: \max_{j \ge 1} \frac{t_j - t_0}{j}

    with :math:`t_0` the time of the first token, or the time at which it was due.
    """
    instance, now = cluster.instances[g], cluster.scalars[0].now
    for slot in range(instance.decoding):
        request = cluster.requests[cluster.slot_request[g, slot]]
        before = request.output - (cluster.slot_end[g, slot] - instance.steps)
        if cluster.slot_waits[g, slot] or before == 0:
            continue
        since = request.first_token
        if rules.service.since_due:
            since = request.arrival + rules.service.ttft
        mean = (now - since) / before
        if not request.tpot_worst >= mean:  # so is NaN, for none yet
            request.tpot_worst = mean
