"""JSQ: to the instance with the fewest requests."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, place_least
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["JSQ", "jsq"]


@compiled
def jsq(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where the fewest requests are."""
    place_least(inputs, target, inputs.running)


@routing_policy("jsq")
@dataclass(frozen=True)
class JSQ(RoutingPolicy):
    r"""Join the shortest queue, in requests: :math:`g = \arg\min_g N_g`, started or not.

    Ties go to the lowest index: a balancer that counts requests knows no loads to break them by.
    The queue of tokens still to be processed is `decode_balancer`, that of tokens held `jsq_load`.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1.
    """

    needs = Needs.COUNTS
    kernel = jsq
