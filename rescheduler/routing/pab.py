"""PAB: to the engine that can take on most prompt tokens within their time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, best_by_load, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["PAB", "pab"]


@compiled
def pab(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where the budget is greatest."""
    for i in range(len(inputs.size)):
        best = best_by_load(inputs, i, -inputs.budget)
        if best >= 0:
            place(inputs, target, i, best)
        elif full(inputs):
            return


@routing_policy("pab")
@dataclass(frozen=True)
class PAB(RoutingPolicy):
    r"""The engine with the greatest prefill admission budget, :math:`g = \arg\max_g PAB_g`.

    Every engine reports with each batch how many more prompt tokens it could compute within a
    TTFT without its tokens being late (`prefill_budget`). Whoever routes subtracts the prompts
    that it has sent there since. Ties go to the lowest load, then to the lowest index. The paper
    asks for a suitable engine with sufficient budget; the greatest budget is one if any is.

    Source: FairBatching (Lyu et al. 2025), §3.4.
    """

    needs = Needs.LOADS
    needs_budget = True
    kernel = pab
