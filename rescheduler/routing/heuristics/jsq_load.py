"""JSQ-Load: to the instance with the least KV load."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, place_least
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["JSQLoad", "jsq_load"]


@compiled
def jsq_load(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where the load is least."""
    place_least(inputs, target, inputs.load)


@routing_policy("jsq_load")
@dataclass(frozen=True)
class JSQLoad(RoutingPolicy):
    r"""Join the shortest queue, in tokens: :math:`g = \arg\min_g L_g`.

    The greedy step that most lowers :math:`\sum_g (L_g - \bar L)^2`. Ties go to the lowest index.

    Source: The EP Barrier Tax (Li 2026), 'A Simple but Strong Baseline'.
    """

    needs = Needs.LOADS
    kernel = jsq_load
