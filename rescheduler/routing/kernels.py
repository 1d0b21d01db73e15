"""A policy's compiled kernel behind a pointer, which compiled code can call without knowing it.

The simulator's engine is thus compiled once, whatever the policy, and each policy when it is
first used; a policy of one's own runs in it as the built-in ones do.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, typeof, types

import predictor.compilation  # noqa: F401  (says where machine code is kept)
from rescheduler.routing.inputs import (
    NO_EDGES,
    FloatArray,
    IntArray,
    RoutingInputs,
    new_routing_inputs,
)
from rescheduler.routing.policy import RoutingPolicy

__all__ = ["NO_KERNEL", "Kernel", "kernel_of"]

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
