"""What an engine computes in its next step: FairBatching, its parts, and what it is held against.

The same function forms the batches of the scheduler inside vLLM and of the simulator.
"""

from collections.abc import Set
from math import floor, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core
from rescheduler.batching.objectives import Objectives

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FAIR, FAIR_TOKENS, FAIR_FIXED, DECODE_FIRST = range(4)
FORMATIONS = {
    "fairbatching": FAIR,
    "fairbatching_tokens": FAIR_TOKENS,
    "fairbatching_fixed": FAIR_FIXED,
    "sarathi": DECODE_FIRST,
}
"""Names in configurations. The second and third are FB-TB and FB-FB of the paper's §5.4.1."""


class BatchRules(NamedTuple):
    """How batches are formed, and how long they take: a + b · new tokens + c · context tokens.

    Attributes:
        formation: one of `FORMATIONS`' values.
        constant: a, seconds.
        per_new: b, seconds per token computed.
        per_context: c, seconds per token of context that is read.
        max_tokens: most tokens of a batch, whatever it takes (vLLM's max_num_batched_tokens).
        token_budget: tokens of a batch for those formations whose budget is fixed.
    """

    formation: int
    constant: float
    per_new: float
    per_context: float
    max_tokens: int
    token_budget: int


@compiled_core
def form_batch(
    rules: BatchRules,
    slack: FloatArray,
    tpot: FloatArray,
    decoding: BoolArray,
    wanted: IntArray,
    context: IntArray,
    order: IntArray,
    tokens: IntArray,
) -> float:
    r"""Choose the tokens of a batch: Algorithm 1 of FairBatching (Lyu et al. 2025, §3.3).

    Token j of a request is due at arrival + TTFT + j · TPOT; slack is the time until that of the
    next. With the batch's time budget

    .. math:: B = \max\big(\min_{i \in \mathrm{decode}} slack_i,\ \min_i TPOT_i\big)

    come first decodes with :math:`slack < B + \min_i TPOT_i` (urgent), then prefills, then the
    other decodes, each group by slack, ties as they come, while
    :math:`a + b\,n + c\,L` stays within B. A prefill that does not fit whole is cut into a chunk.

    Where text and algorithm differ, or leave something open:

    - The minimum of slacks is over decodes, as in §3.2 (line 18 has all requests): a prefill that
      is late would else shrink the batch that is to help it. Without decodes there is no limit
      but ``max_tokens``.
    - Urgent decodes are always taken, as §3.3 says (line 38 would skip those beyond the budget),
      of a budget in tokens too: only ``max_tokens`` stops them. If they alone exceed the budget,
      nothing else is taken: decode-first, as Sarathi.
    - Line 45 adds a chunk's context to what is left of the budget; here it is subtracted.
    - ``c`` is counted on the context as it is when the whole prompt is computed, as the paper's
      estimate of a prefill, b + c a token, does.
    - A late prefill whose context leaves no room beside the urgent decodes might never get any,
      while shorter ones overtake it and become decodes in their turn. As the first of its group
      it gets the chunk that the budget has room for without its context; the batch then exceeds
      the budget by the reading of that context, c · context.

    With a fixed token budget B is the time of that many tokens, a + b · budget; with
    ``fairbatching_tokens`` the budget is (B − a) / b tokens, whatever their context.
    ``sarathi`` takes all decodes, and prefills as they come within the token budget.

    Args:
        rules: how.
        slack: [n] seconds until the deadline of each request's next token.
        tpot: [n] its TPOT objective, seconds.
        decoding: [n] whether it decodes; else it prefills.
        wanted: [n] tokens that could be computed now: 1, or what is left of the prompt.
        context: [n] tokens of context once those are computed.
        order: [n] scratch.
        tokens: [n] output, tokens to compute, 0 for requests that sit this batch out.

    Returns:
        The batch's estimated seconds; 0 for an empty one.
    """
    n = len(slack)
    least_slack, least_tpot = inf, inf
    for i in range(n):
        tokens[i] = 0
        least_tpot = min(least_tpot, tpot[i])
        if decoding[i]:
            least_slack = min(least_slack, slack[i])
    if n == 0:
        return 0.0
    budget = max(least_slack, least_tpot) if least_slack < inf else inf
    room = tokens_left = rules.max_tokens
    time_left = inf
    if rules.formation == FAIR:
        time_left = budget - rules.constant
    elif rules.formation == FAIR_TOKENS:
        if budget < inf and rules.per_new > 0.0:
            most = max(budget - rules.constant, 0.0) / rules.per_new
            tokens_left = int(min(most, float(room)))
    else:
        tokens_left = min(room, rules.token_budget)
        budget = rules.constant + rules.per_new * tokens_left
    urgent_below = budget + least_tpot
    _rank(rules, slack, decoding, urgent_below, order)
    seconds, first_prefill = 0.0, True
    for at in range(n):
        i = order[at]
        reading = rules.per_context * context[i]
        cost = rules.per_new * wanted[i] + reading
        urgent = decoding[i] and _group(rules, slack[i], True, urgent_below) == 0
        chunk = 0
        if urgent:
            chunk = min(wanted[i], room)
        elif wanted[i] <= tokens_left and cost <= time_left:
            chunk = wanted[i]
        elif not decoding[i] and tokens_left > 0 and time_left > 0.0:
            chunk = _chunk(rules, wanted[i], tokens_left, time_left - reading)
            if chunk == 0 and first_prefill and slack[i] < 0.0:
                chunk = _chunk(rules, wanted[i], tokens_left, time_left)
        first_prefill = first_prefill and decoding[i]
        if chunk > 0:
            tokens[i] = chunk
            cost = rules.per_new * chunk + reading
            seconds += cost
            time_left -= cost
            tokens_left -= chunk
            room -= chunk
    return rules.constant + seconds if room < rules.max_tokens else 0.0


@compiled_core
def _chunk(rules: BatchRules, wanted: int, tokens_left: int, seconds: float) -> int:
    """Return the tokens of a prompt that fit into the given seconds, not counting its context."""
    chunk = min(wanted, tokens_left)
    if seconds < 0.0:
        return 0
    if rules.per_new > 0.0 and seconds < rules.per_new * chunk:
        return int(seconds / rules.per_new)
    return chunk


@compiled_core
def _rank(
    rules: BatchRules, slack: FloatArray, decoding: BoolArray, urgent_below: float, order: IntArray
) -> None:
    """Sort requests by group, and for FairBatching by slack, into ``order``, stably.

    Insertion: most come nearly sorted.
    """
    by_slack = rules.formation != DECODE_FIRST
    for i in range(len(order)):
        group = _group(rules, slack[i], decoding[i], urgent_below)
        at = i
        while at > 0:
            before = order[at - 1]
            other = _group(rules, slack[before], decoding[before], urgent_below)
            later = by_slack and slack[before] > slack[i]
            if other < group or (other == group and not later):
                break
            order[at] = before
            at -= 1
        order[at] = i


@compiled_core
def _group(rules: BatchRules, slack: float, decoding: bool, urgent_below: float) -> int:
    """Return the place of a request's group: urgent decodes, prefills, other decodes."""
    if rules.formation == DECODE_FIRST:
        return 0 if decoding else 1
    if not decoding:
        return 1
    return 0 if slack < urgent_below else 2


class RequestRow(NamedTuple):
    """One request.

    Attributes:
        name: its id inside the engine.
        slack: seconds until its next token is due.
        tpot: its TPOT objective, seconds.
        decoding: whether it decodes; else it prefills.
        wanted: tokens that could be computed now: 1, or what is left of the prompt.
        context: tokens of context once those are computed.
        eligible: whether it can be in the next batch: its turn may come, and a slot is free.
    """

    name: str
    slack: float
    tpot: float
    decoding: bool
    wanted: int
    context: int
    eligible: bool


class RequestTable(NamedTuple):
    """All requests of an engine, as a struct of arrays [n]; the fields of `RequestRow`."""

    names: tuple[str, ...]
    slack: FloatArray
    tpot: FloatArray
    decoding: BoolArray
    wanted: IntArray
    context: IntArray
    eligible: BoolArray

    @classmethod
    def of(cls, rows: list[RequestRow]) -> "RequestTable":
        """Return the rows as a table."""
        columns = zip(*rows, strict=True) if rows else [()] * len(RequestRow._fields)
        names, slack, tpot, decoding, wanted, context, eligible = columns
        return cls(
            tuple(names),
            np.array(slack, dtype=np.float64),
            np.array(tpot, dtype=np.float64),
            np.array(decoding, dtype=np.bool_),
            np.array(wanted, dtype=np.int64),
            np.array(context, dtype=np.int64),
            np.array(eligible, dtype=np.bool_),
        )

    def without(self, names: Set[str]) -> "RequestTable":
        """Return the table of the other requests."""
        kept = [i for i, name in enumerate(self.names) if name not in names]
        arrays = (column[kept] for column in self[1:])
        return RequestTable._make([tuple(self.names[i] for i in kept), *arrays])

    @property
    def prompt_left(self) -> IntArray:
        """[n] tokens of the prompt yet to compute, 0 for decodes."""
        return np.where(self.decoding, 0, self.wanted)


class BatchPlan(NamedTuple):
    """What is to be computed in the next step.

    Attributes:
        tokens: of each eligible request, most urgent group first; 0 for those that sit it out.
        seconds: that it is estimated to take.
    """

    tokens: dict[str, int]
    seconds: float


def plan_batch(rules: BatchRules, table: RequestTable) -> BatchPlan:
    """Form a batch of the eligible requests, see `form_batch`."""
    rows = np.flatnonzero(table.eligible)
    order, tokens = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    seconds = form_batch(
        rules,
        table.slack[rows],
        table.tpot[rows],
        table.decoding[rows],
        table.wanted[rows],
        table.context[rows],
        order,
        tokens,
    )
    return BatchPlan({table.names[rows[i]]: int(tokens[i]) for i in order}, seconds)


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
