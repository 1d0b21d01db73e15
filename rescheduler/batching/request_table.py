"""The requests of an engine as its scheduler sees them, and what is to be computed of them."""

from collections.abc import Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.batching.batch_formation import BatchRules, form_batch
from rescheduler.batching.objectives import Objectives
from rescheduler.batching.prefill_budget import prefill_budget

__all__ = ["BatchPlan", "RequestRow", "RequestTable", "plan_batch", "table_prefill_budget"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class RequestRow(NamedTuple):
    """One request.

    Attributes:
        name: its id inside the engine.
        slack: seconds until its next token is due.
        tpot: its TPOT objective, seconds.
        decoding: whether it decodes; else it prefills.
        wanted: tokens that could be computed now: 1, or what is left of the prompt.
        context: tokens of context once those are computed.
        generated: tokens generated so far.
        eligible: whether it can be in the next batch: its turn may come, and a slot is free.
    """

    name: str
    slack: float
    tpot: float
    decoding: bool
    wanted: int
    context: int
    generated: int
    eligible: bool


class RequestTable(NamedTuple):
    """All requests of an engine, as a struct of arrays [n]; the fields of `RequestRow`."""

    names: tuple[str, ...]
    slack: FloatArray
    tpot: FloatArray
    decoding: BoolArray
    wanted: IntArray
    context: IntArray
    generated: IntArray
    eligible: BoolArray

    @classmethod
    def of(cls, rows: list[RequestRow]) -> "RequestTable":
        """Return the rows as a table."""
        columns = zip(*rows, strict=True) if rows else [()] * len(RequestRow._fields)
        names, slack, tpot, decoding, wanted, context, generated, eligible = columns
        return cls(
            tuple(names),
            np.array(slack, dtype=np.float64),
            np.array(tpot, dtype=np.float64),
            np.array(decoding, dtype=np.bool_),
            np.array(wanted, dtype=np.int64),
            np.array(context, dtype=np.int64),
            np.array(generated, dtype=np.int64),
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


def table_prefill_budget(
    rules: BatchRules,
    table: RequestTable,
    objectives: Objectives,
    remaining: FloatArray,
    whole_steps: bool,
) -> float:
    """Return the tokens of new prompts that fit within a TTFT, see `prefill_budget`.

    Args:
        rules: a, b and c.
        table: all requests, also those that wait.
        objectives: of the window. Tokens of all requests count as due every TPOT of it, though
            requests may have one of their own.
        remaining: [n] tokens expected yet; infinite where nothing is known.
        whole_steps: count whole tokens that fall due.
    """
    return prefill_budget(
        rules,
        objectives.ttft,
        objectives.tpot,
        table.slack,
        table.context,
        table.prompt_left,
        remaining,
        whole_steps,
    )
