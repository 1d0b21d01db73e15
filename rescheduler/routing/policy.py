"""What every routing policy is: named, configured, pure, and plain about what it needs."""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from numba import cfunc, typeof, types

import predictor.compilation  # noqa: F401  (says where machine code is kept)
from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.cluster.registry import Checked, Registry
from rescheduler.routing.inputs import (
    NO_EDGES,
    FloatArray,
    IntArray,
    RoutingInputs,
    empty_target,
    new_routing_inputs,
    routing_inputs,
)

NO_POINTS: IntArray = np.empty(0, dtype=np.int64)


def spaced_points(last: int, ratio: float) -> IntArray:
    """Return the steps 0, 1, 2, ... to the last one, each about ``ratio`` times as far ahead."""
    steps = [0]
    while steps[-1] < last:
        steps.append(min(last, max(steps[-1] + 1, round(ratio * steps[-1]))))
    return np.array(steps, dtype=np.int64)


class Needs(IntEnum):
    """What a policy has to know of the requests; each level includes those before it."""

    COUNTS = 0
    """How many requests are where: nothing that an ordinary load balancer lacks."""
    LOADS = 1
    """The KV load of every instance and the size of every waiting request."""
    LENGTHS = 2
    """One number a request: the tokens it is expected to generate."""
    FORECASTS = 3
    """Survival curves of the running and the waiting requests, in place of that number."""


@dataclass(frozen=True)
class RoutingPolicy(Checked, ABC):
    """Assigns waiting requests to decode instances.

    A policy is pure: the same view gives the same assignment. It is asked with a pool of
    waiting requests, or, for instant dispatch, with a pool of one. It never fills an instance
    above its slots or its KV capacity; what fits nowhere goes on waiting.

    A subclass either names a compiled ``kernel(inputs, parameters, target)``, which the
    simulator can run without returning to Python, or overrides `assign`.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs]
    needs_lengths: ClassVar[bool] = False
    """Whether it is fitted to output lengths seen before, by `with_lengths`."""
    needs_curves: ClassVar[bool] = False
    """Whether it goes by how uncertain a length is, so that a guess must not pass for certain."""
    needs_budget: ClassVar[bool] = False
    """Whether it goes by the prefill budgets that engines report."""
    whole_cluster: ClassVar[bool] = False
    """Whether it must be shown every instance; those out of service have no slots then."""
    kernel: ClassVar[Any] = None
    """``kernel(inputs, parameters, target)``, compiled by numba; None for a Python policy."""

    def _section(self) -> str:
        return f"{self.name}: "

    def parameters(self) -> FloatArray:
        """Return the numbers that the kernel reads."""
        return np.empty(0)

    def points(self) -> IntArray:
        """Return the decode steps ahead at which the policy wants expected loads, [P]."""
        return NO_POINTS

    def with_excess(self) -> bool:
        """Return whether the policy also reads how likely each instance overflows."""
        return False

    def with_alive(self) -> bool:
        """Return whether the policy also reads how many requests are expected to remain."""
        return False

    def length_edges(self) -> IntArray:
        """Return the output lengths from which buckets of requests begin, [K], ascending from 0.

        For policies that need lengths; the last bucket has no end.
        """
        return NO_EDGES

    def decide_every(self) -> float:
        """Return the seconds between two decisions; 0 to decide whenever something happens."""
        return 0.0

    def holds_back(self) -> bool:
        """Return whether it may let a request wait that has a place, and so must be asked again."""
        return False

    def refuse_other_cluster(self, n_instances: int) -> None:
        """Refuse a cluster that the policy was not made for.

        Raises:
            ValueError: it was made for another number of instances.
        """
        del n_instances

    def with_lengths(self, lengths: npt.ArrayLike) -> Self:
        """Return the policy fitted to the output lengths seen so far, if it needs any."""
        del lengths
        return self

    def inputs(self, view: ClusterView) -> RoutingInputs:
        """Return the arrays of a decision, with what this policy reads of them."""
        with_lengths = self.needs == Needs.LENGTHS
        edges = self.length_edges()
        return routing_inputs(
            view, self.points(), self.with_alive(), with_lengths, edges, self.with_excess()
        )

    def assign(self, view: ClusterView) -> Assignment:
        """Return where the waiting requests of a view go.

        Raises:
            ValueError: the view lacks forecasts or budgets that the policy needs, or is of a
                cluster that it was not made for.
        """
        self.refuse_other_cluster(view.n_instances)
        if self.needs_budget and view.prefill_budget is None:
            raise ValueError(f"{self.name} needs prefill budgets, which no engine here reports")
        if self.needs >= Needs.LENGTHS and (view.forecast is None or view.waiting_forecast is None):
            raise ValueError(f"{self.name} needs forecasts, which this cluster does not have")
        if self.kernel is None:
            raise NotImplementedError(f"{self.name}: neither a kernel nor its own assign")
        inputs = self.inputs(view)
        target = empty_target(inputs)
        type(self).kernel(inputs, self.parameters(), target)
        return Assignment(target)


_POLICIES = Registry[RoutingPolicy]("routing policy")

routing_policy = _POLICIES.register
"""Decorator that registers a policy class under the name that configurations use."""


def policy_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_POLICIES)


def create_policy(name: str, **options: Any) -> RoutingPolicy:
    """Return the policy of that name with the given options.

    Raises:
        ValueError: no such policy, no such option, or a value that the policy refuses.
    """
    return _POLICIES.create(name, options)


Kernel = Callable[[RoutingInputs, FloatArray, IntArray], None]


def kernel_of(policy: RoutingPolicy) -> Kernel | None:
    """Return the policy's kernel behind a pointer, or None if it has to be asked in Python."""
    if policy.kernel is None:
        return None
    return _behind_pointer(type(policy).kernel.py_func)


@cache
def _behind_pointer(function: Callable[..., None]) -> Kernel:
    made: Kernel = cfunc(_signature(), cache=True)(function)
    return made


@cache
def _signature() -> Any:
    none = np.empty(0, dtype=np.int64)
    inputs = typeof(new_routing_inputs(none, 0, none, np.empty(0), False, False, NO_EDGES))
    return types.void(inputs, types.float64[::1], types.int64[::1])


def _no_kernel(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Stand in for the kernel of a policy that has none; it is never called."""


NO_KERNEL = _behind_pointer(_no_kernel)
