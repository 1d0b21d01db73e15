"""Headway's planner: moves that requests are likely to outlive, and that pay for themselves."""

from dataclasses import dataclass

import numpy as np

from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE
from rescheduler.migration.overflow import overflow_probabilities
from rescheduler.migration.policy import (
    MigrationInputs,
    MigrationPolicy,
    Plan,
    migration_policy,
)
from rescheduler.migration.star import (
    Candidates,
    Targets,
    decayed_weights,
    planned_moves,
    weighted_variance,
    why_none,
)
from rescheduler.routing.policy import Needs


@migration_policy("survival")
@dataclass(frozen=True, kw_only=True)
class Survival(
    MigrationPolicy,
    theta=NOT_NEGATIVE,
    beta="(0, 1]",
    payback=NOT_NEGATIVE,
    load_share="(0, 1]",
    moves=COUNT,
):
    r"""STAR's objective on random loads, each move weighted by the chance that it pays back.

    With the loads' means Λ and variances V from survival curves, the expected variance over the
    horizon is

    .. math:: \sum_h \beta^h E\big[\operatorname{Var}_g(L_g(h))\big]
              = \underbrace{\sum_h \beta^h \operatorname{Var}_g(\Lambda_g(h))}_{\hat\sigma^2}
              + \sum_h \beta^h \frac{G - 1}{G^2} \sum_g V_g(h),

    of which a move changes the first term only: a request brings its variance along.

    **Pay-back.** A move freezes its request for :math:`f = C_{mig} / T_{exec}` steps. It counts
    with the probability :math:`S(\pi f)` that the request outlives its pay-back time
    :math:`\pi f`, and within that time of its last move no request moves again.

    **Cost.** If a part κ of a mean step reads the KV cache, the step that the mean token waits
    for takes :math:`1 + \kappa \operatorname{Var}(L) / \bar L^2` times that of a balanced
    cluster. What a move takes away from that, it takes away for as long as its request runs, or
    for the (weighted) horizon if that is longer; and of N running requests one waits for f steps.
    So a move is worth it if

    .. math:: S(\pi f)\,\kappa\,\frac{\Delta \hat\sigma^2}{\bar L^2 \sum_h \beta^h}
              \max\Big(E[R], \sum_h \beta^h\Big) > \frac{f}{N},

    both sides in steps of the whole cluster. In a balanced cluster no move is.

    **Several moves** a round, the best first, each between two instances that take part in no
    other: they neither share a link nor change what the others gain (`best_moves`).

    **Memory.** The target has room for the request's context and what it is expected to generate
    yet, below C_mem.

    Attributes:
        theta: how far above the mean weighted load an instance gives requests away.
        beta: weight of a step, relative to that of the step before.
        payback: π.
        load_share: κ.
        moves: most moves a round.
    """

    theta: float = 0.02
    beta: float = 0.95
    payback: float = 10.0
    load_share: float = 0.5
    moves: int = 16

    @property
    def needs(self) -> Needs:
        """Survival curves."""
        return Needs.FORECASTS

    def decide(self, inputs: MigrationInputs) -> Plan:
        """Return the moves that pay for themselves, the best first."""
        if (crowded := self.crowded_plan(inputs)) is not None:
            return crowded
        weights = decayed_weights(self.beta, inputs.points)
        variance = weighted_variance(inputs.ahead, weights)
        load = inputs.ahead @ weights
        above = load > (1 + self.theta) * load.mean()
        if not above.any() or variance <= 0.0:
            return Plan([], "every instance is expected to carry the same load")
        limits = self.limits(inputs)
        overflow = overflow_probabilities(inputs.ahead, inputs.spread, limits)
        frozen = self.move_steps(inputs.context)
        payback = self.payback * frozen
        settled = (inputs.since_move >= 0) & (inputs.since_move >= payback)
        rows = np.flatnonzero(above[inputs.source] & settled)
        if len(rows) == 0:
            return Plan([], "all requests above the mean load have moved within their pay-back")
        found = inputs.forecasts_of(rows, payback[rows])
        context = inputs.context[rows]
        lasting = np.maximum(found.remaining / weights.sum(), 1.0)
        waits = frozen[rows] / (len(inputs.source) * lasting)
        candidates = Candidates(
            source=inputs.source[rows],
            context=context,
            survival=found.survival,
            need=context + found.remaining,
            worth=found.outlives,
            cost=waits * inputs.load.mean() ** 2 / (self.load_share * variance),
        )
        targets = Targets(
            open=(load < load.mean()) & (inputs.free > 0),
            load=inputs.load.astype(np.float64),
            limit=limits,
            spread=inputs.spread,
            overflow=overflow + self.tolerance,
        )
        moves = planned_moves(inputs, weights, variance, rows, candidates, targets, self.moves)
        if not moves:
            return Plan([], why_none(candidates, targets, "is expected to pay for itself"))
        gain = np.sum([move.gain for move in moves])
        return Plan(
            moves,
            f"of {len(rows)} requests above the mean load the moves that most lower the expected "
            f"variance, by {gain:.1%} together, and are likely to outlast their pay-back",
        )
