"""Random: each request to any instance it fits, by a counter-based generator."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from predictor.compilation import compiled, compiled_inline
from rescheduler.cluster.registry import COUNT
from rescheduler.routing.inputs import FloatArray, IntArray, RoutingInputs, fits, settle
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["PowerOfD", "RandomChoice", "RoundRobin", "splitmix64"]


SEED = f"[0, {2**53 - 1}]"
"""Seeds travel among the kernel's numbers, which are exact up to there."""


@compiled_inline
def splitmix64(number: np.uint64) -> np.uint64:
    """Return the output of SplitMix64 that follows the state ``number`` (Steele et al. 2014)."""
    mixed = number + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@compiled
def draw(seed: int, counter: int, which: int, n: int) -> int:
    """Return the ``which``-th number below n that belongs to a seed and a counter."""
    key = splitmix64(splitmix64(np.uint64(seed)) + np.uint64(counter))
    return np.int64(splitmix64(key + np.uint64(which)) % np.uint64(n))  # type: ignore[return-value]


@compiled_inline
def _list_fitting(inputs: RoutingInputs, i: int, fitting: IntArray) -> int:
    """Write the instances that request i fits, in ascending order; return how many there are."""
    n_fitting = 0
    for g in range(len(inputs.slots)):
        if fits(inputs, i, g):
            fitting[n_fitting] = g
            n_fitting += 1
    return n_fitting


@compiled
def random_choice(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, on one of the instances it fits."""
    fitting = np.empty(len(inputs.slots), dtype=np.int64)
    for i in range(len(inputs.size)):
        n_fitting, best = _list_fitting(inputs, i, fitting), -1
        if n_fitting > 0:
            best = fitting[draw(int(parameters[0]), inputs.dispatched[0], 0, n_fitting)]
        if not settle(inputs, target, i, best):
            return


@routing_policy("random")
@dataclass(frozen=True)
class RandomChoice(RoutingPolicy, seed=SEED):
    """Uniformly one of the instances that a request fits.

    The choice is a hash of the seed and of the number of requests dispatched before: the same
    view gives the same choice, and no generator has to be kept.

    Attributes:
        seed: from 0 to 2^53 - 1.
    """

    seed: int = 0

    needs = Needs.COUNTS
    kernel = random_choice

    def parameters(self) -> FloatArray:
        """Return the seed."""
        return np.array([self.seed], dtype=np.float64)


@compiled
def power_of_d(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Place each request, in order of arrival, on the least of d sampled instances."""
    seed, d, by_load = int(parameters[0]), int(parameters[1]), parameters[2] > 0
    queue = inputs.load if by_load else inputs.running
    sample = np.empty(len(queue), dtype=np.int64)
    for i in range(len(inputs.size)):
        n_fitting, best = _list_fitting(inputs, i, sample), -1
        for drawn in range(min(d, n_fitting)):
            # The first places of a shuffle, one at a time: distinct instances.
            at = drawn + draw(seed, inputs.dispatched[0], drawn, n_fitting - drawn)
            g = sample[at]
            sample[at] = sample[drawn]
            if best < 0 or queue[g] < queue[best] or (queue[g] == queue[best] and g < best):
                best = g
        if not settle(inputs, target, i, best):
            return


@routing_policy("power_of_d")
@dataclass(frozen=True)
class PowerOfD(RoutingPolicy, d=COUNT, seed=SEED):
    """The shortest queue among d distinct instances sampled uniformly.

    The sample is drawn from the instances that the request fits, by a hash as in `RandomChoice`;
    ties go to the lowest index.

    Attributes:
        d: instances sampled, at least 1; all of them if there are fewer.
        metric: what a queue is measured by: ``requests`` on the instance, or KV ``load``.
        seed: from 0 to 2^53 - 1.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1.
    """

    d: int = 2
    metric: Literal["requests", "load"] = "requests"
    seed: int = 0

    needs = Needs.COUNTS
    kernel = power_of_d

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, measured or hashed; loads have to be known."""
        super().__post_init__()
        if self.metric == "load":
            object.__setattr__(self, "needs", Needs.LOADS)

    def parameters(self) -> FloatArray:
        """Return the seed, d, and whether loads are compared."""
        return np.array([self.seed, self.d, self.metric == "load"], dtype=np.float64)


@compiled
def round_robin(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Send each request, in order of arrival, to the instance whose turn it is."""
    n_instances = len(inputs.slots)
    for i in range(len(inputs.size)):
        turn = inputs.dispatched[0] % n_instances
        best = -1
        for step in range(n_instances):
            g = (turn + step) % n_instances
            if fits(inputs, i, g):
                best = g
                break
        if not settle(inputs, target, i, best):
            return


@routing_policy("round_robin")
@dataclass(frozen=True)
class RoundRobin(RoutingPolicy):
    r"""The k-th request dispatched goes to worker :math:`k \bmod G`.

    Where it does not fit there, it goes to the next worker in the circle that it fits; the turn
    is counted by requests dispatched, so it goes on as if it had not happened.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), A.1.1; Performance Aware LLM
    Load Balancer (Jain et al. 2025), C.2.5.
    """

    needs = Needs.COUNTS
    kernel = round_robin
