"""How a simulated cluster works: its configuration as the compiled engine reads it."""

from enum import IntEnum
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.batching.batch_formation import FORMATIONS, BatchRules
from rescheduler.migration import MigrationPolicy
from rescheduler.routing import RoutingPolicy
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.step_time.step_time import StepTime

_NO_LIMIT = np.iinfo(np.int64).max


class Prefill(IntEnum):
    """Where prompts are computed: before the simulation, on instances of its own, or in place."""

    NONE = 0
    STAGE = 1
    CHUNKED = 2


class Batching(IntEnum):
    """The order in which an instance starts what was placed on it."""

    FCFS = 0
    BIN_PACKING = 1
    LEAST_WORK_LEFT = 2


class Suspends(IntEnum):
    """Whom an instance suspends when its KV cache is full; as `Victim` has it."""

    NEWEST = 0
    REST = 1
    AGE = 2
    CONTEXT = 3


class ServiceRules(NamedTuple):
    """The part of a simulation's rules that objectives are for.

    Attributes:
        batches: how `form_batch` forms them, and what it expects of their time.
        forms: batches are formed by `form_batch`, so that decodes may sit one out; else every
            decode is in every step, and prefill takes what is left of its tokens.
        ttft: objective in seconds; infinite without objectives.
        tpot: objective in seconds; infinite without objectives.
        from_first: deadlines of later tokens count from the first token, not from the arrival.
        watches_tpot: each request's worst running mean is kept, as `SLOConfig.tpot` has it,
        since_due: counted from when its first token was due, not from when it came.
        reports: instances report their prefill budget with every batch.
        admits: they turn away prompts beyond it.
        whole_steps: of `prefill_budget`.
    """

    batches: BatchRules
    forms: bool
    ttft: float
    tpot: float
    from_first: bool
    watches_tpot: bool
    since_due: bool
    reports: bool
    admits: bool
    whole_steps: bool


class Rules(NamedTuple):
    """How the cluster works; as in `SimulationConfig`, with numbers for names.

    ``instant``: each request is decided on as it arrives. ``queueing``: it goes to an instance's
    queue whether or not there is a place for it. ``decide_every``: seconds between two decisions; 0
    to decide whenever something happens. ``prefix_caching``: a preempted request finds again what
    has not been overwritten. ``lost_tokens``: of the KV cache, to each request of an instance,
    since blocks are not full; policies do not know of them. ``dispatch_seconds``: from a request's
    placement until its instance can admit it. ``plan_every``: steps of all instances
    between two plans of migrations; 0 for none. ``suspends``: see `Suspends`.
    """

    n_instances: int
    slots: int
    kv_capacity: int
    barrier: bool
    instant: bool
    queueing: bool
    decide_every: float
    pool_limit: int
    revelation: bool
    prefill: int
    batching: int
    drift: npt.NDArray[np.int64]
    most_growth: int
    handshake_seconds: float
    tokens_per_second: float
    block_tokens: int
    prefix_caching: bool
    lost_tokens: int
    dispatch_seconds: float
    max_steps: int
    max_seconds: float
    plan_every: int
    suspends: int
    service: ServiceRules


def cluster_rules(
    config: SimulationConfig,
    step_time: StepTime,
    policy: RoutingPolicy,
    planner: MigrationPolicy | None,
) -> Rules:
    """Return the rules of a run with a policy and a planner of moves.

    Raises:
        ValueError: the policy is not simulated as the configuration has it; or as `service_rules`.
    """
    drift = np.array(config.drift, dtype=np.int64)
    queueing, every = config.dispatch == "instant", float(policy.decide_every())
    if every > 0.0 and config.clock == "barrier":
        raise ValueError(
            f"{policy.name} decides every {every:g} s, which is not simulated behind a barrier; "
            "choose clock: independent"
        )
    instant = queueing and every == 0.0
    if instant and policy.holds_back():
        raise ValueError(
            f"{policy.name}, as configured, lets requests wait that have a place, and instant "
            "dispatch asks it once about each; give it `every` (seconds), or choose dispatch: pool"
        )
    return Rules(
        n_instances=config.cluster.instances,
        slots=config.cluster.slots,
        kv_capacity=config.cluster.capacity_tokens,
        barrier=config.clock == "barrier",
        instant=instant,
        queueing=queueing,
        decide_every=every,
        pool_limit=(1 if instant else _NO_LIMIT) if queueing else config.pool_limit,
        revelation=config.arrivals.kind == "revelation",
        prefill=int(Prefill[config.prefill.kind.upper()]),
        batching=int(Batching[config.batching.upper()]),
        drift=drift,
        most_growth=int(drift.max()),
        handshake_seconds=config.transfer.handshake_s,
        tokens_per_second=config.transfer.tokens_per_second,
        block_tokens=config.transfer.block_tokens,
        prefix_caching=config.cluster.prefix_caching,
        lost_tokens=config.cluster.block_tokens // 2,
        dispatch_seconds=config.cluster.dispatch_s,
        max_steps=_NO_LIMIT if config.max_steps is None else config.max_steps,
        max_seconds=inf if config.max_seconds is None else config.max_seconds,
        suspends=int(Suspends[config.cluster.victim.upper()]),
        plan_every=0 if planner is None else config.migration.interval * config.cluster.instances,
        service=service_rules(config, step_time, policy.needs_budget),
    )


def service_rules(
    config: SimulationConfig, step_time: StepTime, asked: bool = False
) -> ServiceRules:
    """Return the rules that a configuration describes.

    Raises:
        ValueError: what needs the objectives, a linear step time or chunked prefill lacks it.
    """
    prefill, admission, slo = config.prefill, config.admission, config.slo
    linear = len(step_time.table_new) == 0 and step_time.per_mean_context == 0.0
    reports = admission.pab or asked
    why = "admission.pab" if admission.pab else "a policy that goes by prefill budgets"
    if reports and (prefill.kind != "chunked" or config.clock != "independent"):
        raise ValueError(f"{why} needs prefill.kind: chunked and clock: independent")
    if prefill.formation.startswith("fairbatching"):
        reports, why = True, f"prefill.formation: {prefill.formation}"
    if reports and slo is None:
        raise ValueError(f"{why} needs slo: {{ttft_s, tpot_s}}, which deadlines come from")
    if reports and not linear:
        raise ValueError(
            f"{why} needs a step time that is linear in an instance's own tokens, "
            "step_time: {name: batch, a, b, c}"
        )
    budget = prefill.token_budget or prefill.max_batched_tokens
    return ServiceRules(
        batches=BatchRules(
            formation=FORMATIONS[prefill.formation],
            constant=step_time.constant + step_time.per_context * prefill.expected_context,
            per_new=step_time.per_new,
            per_context=step_time.per_context,
            max_tokens=prefill.max_batched_tokens,
            token_budget=min(budget, prefill.max_batched_tokens),
        ),
        forms=prefill.formation != "sarathi",
        ttft=inf if slo is None else slo.ttft_s,
        tpot=inf if slo is None else slo.tpot_s,
        from_first=slo is not None and slo.deadlines == "first_token",
        watches_tpot=slo is not None and slo.tpot != "mean",
        since_due=slo is not None and slo.tpot == "deadline",
        reports=admission.pab or asked,
        admits=admission.pab,
        whole_steps=admission.whole_steps,
    )
