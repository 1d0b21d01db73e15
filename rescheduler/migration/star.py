"""STAR's decode rescheduling: the one move that lowers the variance of the loads most."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rescheduler.cluster.registry import NOT_NEGATIVE
from rescheduler.migration.inputs import MigrationInputs
from rescheduler.migration.policy import Migration, MigrationPolicy, Plan, migration_policy
from rescheduler.migration.search import (
    Candidates,
    Targets,
    best_moves,
    weighted_variance,
    why_none,
)
from rescheduler.routing.inputs import FloatArray, IntArray
from rescheduler.routing.policy import Needs

__all__ = ["Star", "decayed_weights"]


def decayed_weights(beta: float, points: IntArray) -> FloatArray:
    r"""Return the weight of each point ahead, 1 at h = 0 and :math:`\beta^h` of each step after.

    A point stands for the steps since the one before:
    :math:`\beta_p = \sum_{h = h_{p-1} + 1}^{h_p} \beta^h`.
    """
    steps = np.arange(1, points[-1] + 1)
    until = np.concatenate([[0.0], np.cumsum(float(beta) ** steps)])
    return np.concatenate([[1.0], np.diff(until[points])])


@migration_policy("star")
@dataclass(frozen=True, kw_only=True)
class Star(MigrationPolicy, theta=NOT_NEGATIVE, beta="[0, 1]"):
    r"""Algorithm 1 of STAR (Wang et al. 2026, §5.2); its oracle is the same with true lengths.

    .. math:: w_i = \sum_{t=1}^H \beta_t \hat N_i(t), \quad O = \{w_i > (1 + \theta)\bar w\}, \quad
              \hat\sigma^2 = \operatorname{Var}(N(0)) + \sum_{t=1}^H \beta_t
              \operatorname{Var}(\hat N(t))

    and, of all requests r of overloaded instances with :math:`\hat N(r) > C_{mig} / T_{exec}`
    that fit, the one move is chosen that lowers :math:`\hat\sigma^2` most, if any does. Without
    prediction w_i and σ² are those of the loads now, and no request is too short.

    What the paper leaves open: :math:`\beta_t = \beta^t`, H and θ have no values there. Line 15
    as printed, :math:`N_i(0) < (1 + \theta) \bar w`, holds current loads against a weighted sum
    of H loads, which is true of every instance unless the weights add up to 1, and also of
    overloaded ones. Targets here are the instances with :math:`w_i < \bar w`; ``underloaded:
    paper`` is the printed test with weights that add up to 1. Line 21 as printed,
    :math:`N_t + \hat N(r) \le C_{mem}`, leaves out the context that comes along; here it counts,
    :math:`N_t + N(r) + \hat N(r) \le C_{mem}`; ``memory: paper`` is the printed test, beside which
    :math:`N_t + N(r) \le C_{mem}` always holds.

    Attributes:
        prediction: use forecasts; without them, only the loads now.
        theta: θ, how far above the mean an instance is overloaded.
        beta: β of a step.
        underloaded: which instances are targets, ``below_mean`` or ``paper``.
        memory: what a target must have room for, ``whole`` or ``paper``.
    """

    prediction: bool = True
    theta: float = 0.05
    beta: float = 0.99
    underloaded: Literal["below_mean", "paper"] = "below_mean"
    memory: Literal["whole", "paper"] = "whole"

    @property
    def needs(self) -> Needs:
        """Forecasts, or the loads alone."""
        return Needs.FORECASTS if self.prediction else Needs.LOADS

    def decide(self, inputs: MigrationInputs) -> Plan:
        """Return the best move, or none."""
        weights = decayed_weights(self.beta, inputs.points)
        variance = weighted_variance(inputs.ahead, weights)
        overloaded, underloaded = self._classify(inputs, weights)
        rows = np.flatnonzero(overloaded[inputs.source] & (inputs.since_move >= 0))
        if not overloaded.any() or variance <= 0.0:
            return Plan([], f"no instance is above {1 + self.theta:g} times the mean load")
        steps = self.move_steps(inputs.context[rows])
        found = inputs.forecasts_of(rows, steps)
        lasts = (found.remaining > steps) | (not self.prediction)
        if not lasts.any():
            return Plan([], f"none of {len(rows)} requests on overloaded instances outlasts a move")
        context = inputs.context[rows]
        candidates = Candidates(
            source=inputs.source[rows],
            context=context,
            survival=found.survival,
            need=self._need(context, found.remaining),
            worth=lasts.astype(np.float64),
            cost=np.zeros(len(rows)),
        )
        targets = Targets(
            open=underloaded & (inputs.free > 0),
            load=inputs.load.astype(np.float64),
            limit=np.asarray(self.memory_share * inputs.room, dtype=np.float64),
        )
        moved, where, gain = best_moves(
            inputs.points, inputs.ahead, weights, variance, candidates, targets, 1
        )
        if len(moved) == 0:
            return Plan([], why_none(candidates, targets, "lowers the variance"))
        i, target, share = int(moved[0]), int(where[0]), float(gain[0])
        migration = Migration(int(rows[i]), int(candidates.source[i]), target, share)
        return Plan(
            [migration],
            f"of {np.count_nonzero(lasts)} requests on {np.count_nonzero(overloaded)} overloaded "
            f"instances it lowers the variance most, by {share:.1%}",
        )

    def _classify(
        self, inputs: MigrationInputs, weights: FloatArray
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which instances are overloaded and which may be targets, [G] each."""
        load = inputs.load.astype(np.float64)
        if len(weights) == 1 or weights[1:].sum() == 0.0:
            weighted = load
        else:
            # Weights that add up to 1 change neither line 14 nor below_mean.
            weighted = inputs.ahead[:, 1:] @ (weights[1:] / weights[1:].sum())
        mean = weighted.mean()
        overloaded = weighted > (1 + self.theta) * mean
        if self.underloaded == "paper":
            return overloaded, load < (1 + self.theta) * mean
        return overloaded, weighted < mean

    def _need(self, context: IntArray, remaining: FloatArray) -> FloatArray:
        if not self.prediction:
            return context.astype(np.float64)
        if self.memory == "paper":
            return np.maximum(context, remaining)
        return context + remaining
