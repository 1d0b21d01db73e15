"""What instances do for objectives: form batches, report their room for prompts, turn away."""

from math import inf
from typing import NamedTuple

from rescheduler.batching.batch_formation import FORMATIONS, BatchRules
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.step_time.step_time import StepTime


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
