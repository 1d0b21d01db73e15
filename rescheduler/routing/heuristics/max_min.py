"""Max-min: next the request that is completed last, where it is completed soonest."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.heuristics.min_min import assign_by_completion
from rescheduler.routing.inputs import RoutingInputs
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["MaxMin", "max_min"]


@compiled
def max_min(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place the request completed last first."""
    assign_by_completion(inputs, target, True)


@routing_policy("max_min")
@dataclass(frozen=True)
class MaxMin(RoutingPolicy):
    r"""The request whose earliest completion is the latest, to the worker of that completion.

    .. math:: i = \arg\max_i \min_g \mathrm{ECT}_{ig}, \qquad
              g = \arg\min_g \mathrm{ECT}_{ig}, \qquad \mathrm{ECT}_{ig} = W_g + \hat R_i

    with the times, and the ties, of `MinMin`. Long requests go first, so that short ones fill
    what they leave uneven.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1.
    """

    needs = Needs.LENGTHS
    kernel = max_min
