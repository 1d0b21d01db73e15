r"""What a learned router sees of a cluster: a few numbers for the queue and for each instance.

Instances are alike, so that which is which says nothing: they are shown in ascending order of KV
load, and action m is the m-th of them. A network that sees them by their numbers would have to
learn each of the G! ways to number one and the same state.

Jain et al. 2025, §4.3 and C.10. Of the queue: how many wait, and of the first its prompt tokens and
the bucket of its expected output. Of each instance: requests in their prompt phase, decoding
requests by the bucket of their expected output, free capacity, and the seconds until the first of
them is expected to end. With 3 buckets that is 6 an instance and 3 for the queue, 27 for four
instances, which is what the paper's network reads; its text counts 4 for the queue.
"""

from math import floor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.routing.inputs import RoutingInputs, length_bucket

__all__ = ["QUEUE_NUMBERS", "StateScales", "router_state", "state_bounds", "state_size"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

QUEUE_NUMBERS = 3
"""Numbers of the queue, which come first."""

_MOST = 8.0
"""Times its scale above which a count or a prompt is no longer distinguished from a greater one."""


class StateScales(NamedTuple):
    """What the numbers are measured in, so that they are about in [0, 1].

    Attributes:
        slots: B, requests that an instance decodes at once. Four times as many waiting ones are
            the most that are distinguished (C.10).
        requests: of a count of requests that is many.
        prompt_tokens: of a long prompt.
        seconds_per_token: of an average decode batch.
        seconds: of a long wait for the first request to end.
        capacity: share of a KV cache whose being free is much; below it preemptions begin.
    """

    slots: float = 128.0
    requests: float = 32.0
    prompt_tokens: float = 200.0
    seconds_per_token: float = 0.02
    seconds: float = 2.0
    capacity: float = 0.2


def state_size(n_instances: int, n_buckets: int) -> int:
    """Return how many numbers a state has."""
    return QUEUE_NUMBERS + n_instances * (3 + n_buckets)


def state_bounds(
    n_instances: int, n_buckets: int, scales: StateScales
) -> tuple[FloatArray, FloatArray]:
    """Return the least and the greatest value of each number of a state."""
    low = np.zeros(state_size(n_instances, n_buckets))
    instances = low[QUEUE_NUMBERS:].reshape(n_instances, 3 + n_buckets)
    high = np.ones_like(low)
    high[:2] = 4.0 * scales.slots / scales.requests, _MOST
    most = high[QUEUE_NUMBERS:].reshape(n_instances, 3 + n_buckets)
    most[:, : 1 + n_buckets] = _MOST
    instances[:, 1 + n_buckets] = -_MOST
    most[:, 1 + n_buckets] = 1.0 / scales.capacity
    return low, high


@compiled_core
def router_state(
    inputs: RoutingInputs, scales: StateScales, order: IntArray, state: FloatArray
) -> None:
    """Write the state of a cluster into ``state``, [3 + G·(3 + K)], and who is who into ``order``.

    The order, [G], is by KV load, of equal ones by index. An instance's requests in the prompt
    phase are those without a token yet. Capacity is the free share of the KV cache, below 0 where
    more is queued than fits; it and the seconds are rounded to two decimals (C.10).
    """
    _by_load(inputs.load, order)
    n_waiting, n_buckets = len(inputs.size), len(inputs.edges)
    state[0] = min(n_waiting, 4.0 * scales.slots) / scales.requests
    state[1] = 0.0
    state[2] = 0.0
    if n_waiting > 0:
        state[1] = min(inputs.size[0] / scales.prompt_tokens, _MOST)
        bucket = length_bucket(inputs.edges, inputs.remaining[0])
        state[2] = bucket / max(n_buckets - 1, 1)
    for m in range(len(order)):
        g, at = order[m], QUEUE_NUMBERS + m * (3 + n_buckets)
        decoding = 0
        for k in range(n_buckets):
            decoding += inputs.by_length[g, k]
            state[at + 1 + k] = min(inputs.by_length[g, k] / scales.requests, _MOST)
        state[at] = min((inputs.running[g] - decoding) / scales.requests, _MOST)
        free = 1.0 - inputs.load[g] / inputs.capacity[g]
        state[at + 1 + n_buckets] = max(_two_decimals(free) / scales.capacity, -_MOST)
        seconds = _two_decimals(inputs.soonest[g] * scales.seconds_per_token)
        state[at + 2 + n_buckets] = min(seconds / scales.seconds, 1.0)


@compiled_inline
def _by_load(load: IntArray, order: IntArray) -> None:
    for g in range(len(load)):
        at = g
        while at > 0 and load[order[at - 1]] > load[g]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = g


@compiled_core
def _two_decimals(value: float) -> float:
    return floor(value * 100.0 + 0.5) / 100.0
