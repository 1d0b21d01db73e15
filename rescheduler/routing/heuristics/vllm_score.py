"""vLLM's own choice of a data-parallel engine, by its queue counts."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, full, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["VLLMScore", "vllm_score"]


@compiled
def vllm_score(
    inputs: RoutingInputs,
    parameters: npt.NDArray[np.float64],
    target: npt.NDArray[np.int64],
) -> None:
    """Place each request, in order of arrival, where vLLM's score is least."""
    queue_weight, pressure_weight, rotates = parameters[0], parameters[1], parameters[2] > 0
    slots, room, load, capacity = inputs.slots, inputs.room, inputs.load, inputs.capacity
    running, queued = inputs.running, inputs.queued
    n_instances = len(slots)
    for i in range(len(inputs.size)):
        size = inputs.size[i]
        first = inputs.dispatched[0] % n_instances if rotates else 0
        best, least = -1, 0.0
        for step in range(n_instances):
            g = (first + step) % n_instances
            if slots[g] <= 0 or room[g] < size:
                continue
            waiting = queued[g]
            started = running[g] - waiting
            usage = min(load[g] / capacity[g], 1.0)
            pressure = pressure_weight * max(0.0, usage - 0.5)
            score = started + waiting * (queue_weight + pressure)
            if best < 0 or score < least:
                best, least = g, score
        if best >= 0:
            place(inputs, target, i, best)
            # vLLM counts what it routes as waiting until the engine reports.
            queued[best] += 1
        elif full(inputs):
            return


@routing_policy("vllm")
@dataclass(frozen=True)
class VLLMScore(RoutingPolicy):
    r"""The engine that vLLM's data-parallel client would choose.

    .. math:: \text{0.32:}\; w + r + 6\,w\,\max(0, u - \tfrac12), \qquad
              \text{0.20:}\; 4 w + r

    with w requests waiting at the engine, r running there and u the share of its KV cache in
    use. The least score wins. Version 0.32 begins to look one engine further at every request,
    so equal scores take turns; version 0.20 takes the lowest index. Tokens of requests that
    have not started are part of u here, and of nothing in vLLM, whose cache does not hold them.
    The client's own count of requests in flight, which 0.32 does not let w + r fall below, is
    w + r here, where no report is late.

    Attributes:
        version: of vLLM.

    Source: ``DPLBAsyncMPClient.get_core_engine_for_request`` of the two versions; for 0.20 also
    The EP Barrier Tax (Li 2026), 'Real EP serving experiments'.
    """

    version: Literal["0.32", "0.20"] = "0.32"

    needs = Needs.LOADS
    kernel = vllm_score

    def __post_init__(self) -> None:
        """Refuse a version whose score is not known.

        Raises:
            ValueError: neither of the two versions.
        """
        if self.version not in ("0.32", "0.20"):
            raise ValueError(f"vllm: version is {self.version!r}; choose '0.32' or '0.20', as text")

    def parameters(self) -> npt.NDArray[np.float64]:
        """Return the weights of the queue and of KV pressure, and whether ties take turns."""
        return np.array([1.0, 6.0, 1.0] if self.version == "0.32" else [4.0, 0.0, 0.0])
