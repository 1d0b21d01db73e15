"""The prefill admission budget: how many more prompt tokens an engine can take on in time."""

from math import floor, inf

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core
from rescheduler.batching.batch_formation import BatchRules, RequestTable
from rescheduler.batching.objectives import Objectives

__all__ = ["prefill_budget", "table_prefill_budget"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@compiled_core
def prefill_budget(
    rules: BatchRules,
    ttft: float,
    tpot: float,
    slack: FloatArray,
    context: IntArray,
    prompt_left: IntArray,
    whole_steps: bool,
) -> float:
    r"""Return PAB, the tokens of new prompts that can be computed within a TTFT (Appendix A).

    Of the seconds of one TTFT, every batch takes a, and every token that falls due takes b and
    reads its context; what is left computes prompts at b + c seconds a token (steps 1 to 5), of
    which those already taken on are subtracted (step 6):

    .. math:: PAB = \frac{1}{b + c}\Big[T - N \cdot a - \sum_i N_i\,(b + c \cdot context_i)\Big]
              - \sum_{i \in \mathrm{prefill}} prompt_i, \qquad
              N_i = \frac{T - slack_i}{TPOT}, \quad N = \max_i N_i + 1

    with T the TTFT objective; the most urgent request has the most steps, so that N is the
    paper's :math:`(T - \min_i slack_i)/TPOT + 1`. The paper gives no rounding. Tokens fall due at
    :math:`slack_i + k\,TPOT`, k = 0, 1, .., so that a whole number of them, :math:`\lfloor N_i
    \rfloor + 1`, does within T, and none if :math:`slack_i > T`: ``whole_steps``. There a
    prefill's first token costs nothing of its own, being its prompt's; as many batches as the
    most urgent request has tokens due end in time for all; and what is left of T after the last
    of these costs another batch, or is lost if that is shorter than a. Without ``whole_steps``
    :math:`N_i` is as printed, but at least 0: a request far ahead of its deadlines gives no time
    back.

    Source: Lyu et al. 2025, §3.4 and Appendix A.

    Args:
        rules: a, b and c.
        ttft: T, seconds.
        tpot: TPOT objective, seconds.
        slack: [n] seconds until the deadline of each request's next token.
        context: [n] tokens of context, of a prefill when it is computed.
        prompt_left: [n] tokens of the prompt yet to compute, 0 for decodes.
        whole_steps: count the tokens that fall due.

    Returns:
        Tokens; below 0 if what has been taken on is too much already.
    """
    seconds, most, last, taken = ttft, 0.0, 0.0, 0.0
    for i in range(len(slack)):
        due = (ttft - slack[i]) / tpot
        if whole_steps:
            due = floor(due) + 1.0
        due = max(due, 0.0)
        ends = slack[i] + (due - 1.0) * tpot
        if due > most or (due == most and ends < last):
            most, last = due, ends
        decoded = max(due - 1.0, 0.0) if whole_steps and prompt_left[i] > 0 else due
        seconds -= decoded * (rules.per_new + rules.per_context * context[i])
        taken += prompt_left[i]
    after = rules.constant
    if whole_steps:
        after = min(after, ttft - max(last, 0.0))
    seconds -= most * rules.constant + after
    a_token = rules.per_new + rules.per_context
    if a_token <= 0.0:
        return inf if seconds > 0.0 else -inf
    return seconds / a_token - taken


def table_prefill_budget(
    rules: BatchRules, table: RequestTable, objectives: Objectives, whole_steps: bool
) -> float:
    """Return the tokens of new prompts that fit within a TTFT beside all requests of a table.

    Tokens of all requests count as due every TPOT of the objectives, though requests may have one
    of their own.
    """
    return prefill_budget(
        rules,
        objectives.ttft,
        objectives.tpot,
        table.slack,
        table.context,
        table.prompt_left,
        whole_steps,
    )
