"""The compiled engine: moves a simulated cluster on until it needs something from outside.

One round of the loop is: time goes to the next event; steps that end now give their tokens;
migrations are planned, if it is time; requests that have arrived are shown; the policy places
waiting requests; instances begin their next steps. `advance` returns to Python for the next block
of a trace, for room in its buffers, for plans of migrations, and for the decisions of policies
that are not compiled, and takes up the round where it was.
"""

from math import ceil, floor, inf
from typing import NamedTuple

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.routing.policy import Kernel
from rescheduler.simulator.config.rules import Rules
from rescheduler.simulator.engine.decode_step import (
    BatchArrays,
    end_step,
    prepare_steps,
    start_steps,
    turns_away,
)
from rescheduler.simulator.engine.engine_state import (
    NONE,
    Arrivals,
    Cluster,
    PolicyState,
    Rests,
    Series,
    Wanted,
)
from rescheduler.simulator.engine.ordered_pool import charge_account, order_pool
from rescheduler.simulator.engine.routing_inputs import fill_routing_inputs
from rescheduler.simulator.engine.slots import (
    arrives,
    fill_servers,
    land_migrations,
    next_arrival,
    occupied,
    pool_has_room,
    queue,
    reveal,
    turn_away,
)
from rescheduler.simulator.engine.step_metrics import PowerModel, observe
from rescheduler.step_time.step_time import StepTime

_TIME, _PLAN, _REVEAL, _DECIDE, _START = range(5)

_SAME_MOMENT = 1e-9
"""Share of the time between two decisions by which a moment for one may be missed."""


class EngineParts(NamedTuple):
    """All that `advance` moves on, and what it goes by."""

    rules: Rules
    step_time: StepTime
    power_model: PowerModel
    policy_state: PolicyState
    rests: Rests
    cluster: Cluster
    batch: BatchArrays
    arrivals: Arrivals
    series: Series


@compiled_core
def advance(engine: EngineParts, kernel: Kernel, pause_at: float) -> Wanted:
    """Simulate until something is needed, or the next event is after ``pause_at`` seconds."""
    rules, step_time, power_model, policy_state, rests, cluster, batch, arrivals, series = engine
    scalars = cluster.scalars[0]
    while True:
        if scalars.phase == _TIME:
            if scalars.finished + rules.n_instances * rules.slots > len(cluster.finished):
                return Wanted.FLUSH
            wanted = fill_servers(rules, step_time, cluster, arrivals)
            if wanted != Wanted.DONE:
                return wanted
            if scalars.cursor == scalars.block_length and scalars.last_block == 0:
                return Wanted.TRACE
            time = _next_event(rules, policy_state, cluster, arrivals)
            if time == inf:
                if scalars.in_system > 0:
                    return Wanted.STUCK
                return Wanted.DONE
            if time > pause_at:
                return Wanted.PAUSED
            if scalars.recorded >= rules.max_steps or time > rules.max_seconds:
                return Wanted.DONE
            observe(rules, step_time, power_model, cluster, series, time)
            scalars.now = max(scalars.now, time)
            for g in range(rules.n_instances):
                instance = cluster.instances[g]
                if instance.stepping and instance.step_end <= scalars.now:
                    end_step(rules, rests, cluster, g)
            land_migrations(cluster)
            scalars.phase = _PLAN
            if scalars.learns:
                scalars.learns = 0
                return Wanted.LEARN
        if scalars.phase == _PLAN:
            scalars.phase = _REVEAL
            if rules.plan_every > 0 and scalars.all_steps >= scalars.plan_at:
                scalars.plan_at = scalars.all_steps + rules.plan_every
                scalars.plans += 1
                return Wanted.PLAN
        if scalars.phase == _REVEAL:
            if rules.service.admits and scalars.finished == len(cluster.finished):
                return Wanted.FLUSH
            wanted = reveal(rules, step_time, cluster, arrivals)
            if wanted != Wanted.DONE:
                return wanted
            scalars.phase = _DECIDE
        if scalars.phase == _DECIDE:
            if _may_decide(rules, cluster):
                scalars.shown = order_pool(rules, step_time, policy_state, cluster, arrivals)
                if policy_state.asks:
                    return Wanted.ASK
                inputs = fill_routing_inputs(rules, policy_state, cluster, arrivals, scalars.shown)
                arrivals.target[: scalars.waiting] = NONE
                target = arrivals.target[: len(inputs.size)]
                kernel(inputs, policy_state.parameters, target)
                apply_target(rules, cluster, arrivals)
            else:
                scalars.phase = _START
        if scalars.phase == _START:
            if rules.service.forms or rules.service.reports:
                prepare_steps(rules, rests, cluster, batch)
            start_steps(rules, step_time, power_model, rests, cluster, series)
            scalars.phase = _TIME


@compiled_inline
def _next_event(
    rules: Rules, policy_state: PolicyState, cluster: Cluster, arrivals: Arrivals
) -> float:
    """Return the time of what happens next, or infinity."""
    scalars = cluster.scalars[0]
    time = inf
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        if instance.stepping and instance.step_end < time:
            time = instance.step_end
    in_step = time < inf
    if rules.barrier and not rules.instant and in_step:
        return time
    for move in range(scalars.moving):
        time = min(time, cluster.moves[move].arrives)
    if rules.dispatch_seconds > 0.0:
        time = min(time, _first_on_its_way(rules, cluster))
    if rules.revelation:
        if not in_step and scalars.cursor < scalars.block_length and pool_has_room(rules, cluster):
            time = min(time, scalars.now)
    elif rules.instant or pool_has_room(rules, cluster):
        arrival = next_arrival(rules, cluster, arrivals)
        # What a full pool has kept out is looked at with the next event, not at once.
        if arrival > scalars.now or not in_step:
            time = min(time, arrival)
    # A compiled policy would leave them waiting forever where nothing else can change.
    stays = time == inf and scalars.given_up and not policy_state.asks
    if rules.decide_every > 0.0 and scalars.waiting > 0 and not stays:
        missed = ceil(scalars.now / rules.decide_every - _SAME_MOMENT)
        time = min(time, max(scalars.next_decision, missed) * rules.decide_every)
    return max(time, scalars.now)  # type: ignore[no-any-return]


@compiled_core
def _first_on_its_way(rules: Rules, cluster: Cluster) -> float:
    """Return when the first request arrives at an instance that is not in a step, or infinity."""
    first = inf
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        if not instance.stepping and instance.queue_head != NONE:
            time = arrives(rules, cluster, instance.queue_head)
            if time > cluster.scalars[0].now:
                first = min(first, time)
    return first


@compiled_inline
def _may_decide(rules: Rules, cluster: Cluster) -> bool:
    """Return whether a request waits and a place is free, and now is the time to decide."""
    scalars = cluster.scalars[0]
    if scalars.waiting == 0:
        return False
    if rules.decide_every > 0.0:
        moment = floor(scalars.now / rules.decide_every + _SAME_MOMENT)
        between = scalars.now - moment * rules.decide_every
        if moment < scalars.next_decision or between > _SAME_MOMENT * rules.decide_every:
            return False
        scalars.next_decision = moment + 1
    if rules.queueing:
        return True
    free = False
    for g in range(rules.n_instances):
        if rules.barrier and cluster.instances[g].stepping:
            return False
        free = free or occupied(cluster, g) < rules.slots
    return free


@compiled_inline
def _goes_on(rules: Rules, cluster: Cluster) -> bool:
    """Return whether something happens without a decision: a step, a migration, an arrival."""
    for g in range(rules.n_instances):
        instance = cluster.instances[g]
        if instance.stepping or (rules.dispatch_seconds > 0.0 and instance.queued > 0):
            return True
    return cluster.scalars[0].moving > 0  # type: ignore[no-any-return]


@compiled_inline
def apply_target(rules: Rules, cluster: Cluster, arrivals: Arrivals) -> None:
    """Put the pool's requests where ``arrivals.target`` says, and keep the others in order."""
    scalars = cluster.scalars[0]
    kept, waited = 0, scalars.waiting
    for i in range(waited):
        row, g = arrivals.pool[i], arrivals.target[i]
        if g == NONE:
            arrivals.pool[kept] = row
            kept += 1
        else:
            scalars.dispatched += 1
            charge_account(cluster, row)
            if turns_away(rules, cluster, row, g):
                turn_away(cluster, row, g)
                continue
            cluster.requests[row].placed = scalars.now
            if rules.service.reports:
                cluster.instances[g].budget -= cluster.requests[row].prompt
            queue(cluster, row, g)
    in_vain = kept == scalars.waiting and not _goes_on(rules, cluster)
    scalars.given_up = 1 if in_vain else 0
    scalars.waiting = kept
    scalars.decisions += 1
    # With instant dispatch the next arrival is decided on by itself.
    scalars.phase = _REVEAL if rules.instant else _START
    if scalars.shown < waited and kept < waited:
        scalars.phase = _DECIDE  # the one that held back the others has its place
