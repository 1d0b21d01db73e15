"""The learned router: a network says where the first request of the queue goes, or to wait."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_collection.shipped_files import find_shipped
from predictor.compilation import compiled
from rescheduler.routing.inputs import RoutingInputs, fits, place
from rescheduler.routing.learned.router_network import (
    RouterCheckpoint,
    action_values,
    load_router,
    network_parameters,
)
from rescheduler.routing.learned.router_state import StateScales, router_state
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["LearnedRouter", "learned_router"]

FloatArray = npt.NDArray[np.float64]


@compiled
def learned_router(
    inputs: RoutingInputs, parameters: FloatArray, target: npt.NDArray[np.int64]
) -> None:
    """Place the first request by the highest value among the actions that are possible.

    It can go where it fits, or wait; but not while no instance has a request at all, where it
    might wait forever. Ties go to the lower load.
    """
    if len(inputs.size) == 0:
        return
    scales = StateScales(
        parameters[0], parameters[1], parameters[2], parameters[3], parameters[4], parameters[5]
    )
    n_instances = len(inputs.load)
    state = np.empty(3 + n_instances * (3 + len(inputs.edges)))
    order = np.empty(n_instances, dtype=np.int64)
    router_state(inputs, scales, order, state)
    values = action_values(parameters[6:], state)
    best = n_instances if inputs.running.sum() > 0 else -1
    for m in range(n_instances - 1, -1, -1):
        g = order[m]
        if fits(inputs, 0, g) and (best < 0 or values[m] >= values[best]):
            best = m
    if 0 <= best < n_instances:
        place(inputs, target, 0, order[best])


@routing_policy("rl")
@dataclass(frozen=True)
class LearnedRouter(RoutingPolicy):
    r"""The action of highest value, :math:`\arg\max_a Q(s, a)`, of a trained network.

    Every ``interval`` of the checkpoint the first request of the queue goes to one of the
    instances, or waits, unless all are empty. In a simulation with instant dispatch it may go to
    any of them, and queues there, as in the paper; else only to one that has a place for it.

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), §4.3.

    Attributes:
        checkpoint: folder that `headway papers train-router` wrote; or what is in one.

    Raises:
        ValueError: the folder is no checkpoint.
    """

    needs = Needs.LENGTHS
    whole_cluster = True
    kernel = learned_router

    checkpoint: str | Path | RouterCheckpoint = "checkpoints/rl-router"
    _loaded: RouterCheckpoint = field(init=False, repr=False, compare=False)
    _parameters: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = self.checkpoint
        loaded = given if isinstance(given, RouterCheckpoint) else load_router(find_shipped(given))
        object.__setattr__(self, "_loaded", loaded)
        parameters = np.concatenate([loaded.scales, network_parameters(loaded.layers)])
        object.__setattr__(self, "_parameters", parameters)

    def parameters(self) -> FloatArray:
        """Return the scales of the state, and the network."""
        return self._parameters

    def length_edges(self) -> npt.NDArray[np.int64]:
        """Return the buckets of the state."""
        return np.array(self._loaded.edges, dtype=np.int64)

    def decide_every(self) -> float:
        """Return the seconds between two decisions in training."""
        return self._loaded.interval

    def holds_back(self) -> bool:
        """Say that one of its actions is to wait."""
        return True

    def refuse_other_cluster(self, n_instances: int) -> None:
        """Refuse another number of instances: the network has an input and an action for each.

        Raises:
            ValueError: it was trained for another number.
        """
        trained = self._loaded.n_instances
        if n_instances != trained:
            raise ValueError(
                f"rl: the router was trained for {trained} instances, this cluster has "
                f"{n_instances}; train one with `headway papers train-router --config "
                f"configs/rl/paper.yaml --cluster.instances {n_instances} --out FOLDER` and give "
                "FOLDER/router as checkpoint"
            )
