r"""The order of service, compiled: a permutation of what waits, and who has waited too long.

Each waiting request has waited :math:`w` seconds, is expected to last :math:`e` seconds with the
cluster to itself, and to cost the others :math:`c`, those seconds times its share of an instance's
places or memory, over the mean share of those that wait. The one with the smallest key goes first,
ties in order of arrival:

.. math::

    \text{fcfs} &: -w \\
    \text{shortest} &: c \\
    \text{response_ratio} &: -(w + e) / e \\
    \text{boost} &: -w - \frac1\gamma \ln \frac{1}{1 - e^{-\gamma c}}

A request is *overdue* once it has waited ``starvation`` times what it is expected to last, or until
its latest start. The overdue go before all others, in the order in which they became overdue; so
that whatever arrives later is behind them sooner or later. One that has waited twice as long holds
back all others until it has its place.

Source: Yu and Scully 2024, "Strongly tail-optimal scheduling in the light-tailed M/G/1", for the
boost; Kleinrock 1976 for the response ratio.
"""

from enum import IntEnum
from math import expm1, inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

HOLDS_BACK = 2.0
"""Times its time to be overdue after which a request holds back all others."""

LATENCIES, LATENCIES_A_RATE = 1_000, 50
"""The last requests whose latencies tell `tail_rate`, and those that end between two estimates."""

_TAIL, _FEWEST = 0.5, 10
"""Quantile of the latencies past which the tail begins, and the fewest that have one."""


class Kind(IntEnum):
    """Which key orders."""

    FCFS = 0
    SHORTEST = 1
    RESPONSE_RATIO = 2
    BOOST = 3


class OrderParameters(NamedTuple):
    """What orders.

    Attributes:
        kind: of `Kind`.
        gamma: of a boost, per second; 0 to estimate it from the latencies seen.
        scale: of that estimate.
        starvation: times its expected time alone after which a request is overdue.
        by_prompt: costs count prompts alone, for which nothing is forecast.
        ahead: mean services by which an account may be ahead of another, see
            `rescheduler.ordering.fairness`; infinite: accounts do not matter.
    """

    kind: int
    gamma: float
    scale: float
    starvation: float
    by_prompt: bool
    ahead: float


class Waiting(NamedTuple):
    """What is known of the requests that wait, in order of arrival, and room to order them.

    Attributes:
        waited: [n] seconds since each arrived.
        cost: [n] what it is expected to take from the others, in any unit: their mean counts as
            the mean of ``alone``.
        alone: [n] seconds that it is expected to last if it need not wait.
        latest: [n] seconds after its arrival by which it should start; infinite without a deadline.
        order: [n] the permutation.
        key: [n] scratch.
        other: [n] scratch.
    """

    waited: FloatArray
    cost: FloatArray
    alone: FloatArray
    latest: FloatArray
    order: IntArray
    key: FloatArray
    other: IntArray


def new_waiting(n: int) -> Waiting:
    """Return room for so many requests."""
    numbers = [np.zeros(n) for _ in range(5)]
    whole = [np.zeros(n, dtype=np.int64) for _ in range(2)]
    waited, cost, alone, latest, key = numbers
    latest[:] = inf
    return Waiting(waited, cost, alone, latest, whole[0], key, whole[1])


@compiled_core
def put_in_order(parameters: OrderParameters, gamma: float, waiting: Waiting, n: int) -> bool:
    """Write the order of the first n requests; return whether the first holds back the others.

    Args:
        parameters: what orders.
        gamma: decay rate of the latencies seen, see `tail_rate`; 0: none yet.
        waiting: the requests.
        n: how many there are.
    """
    for i in range(n):
        waiting.order[i] = i
    if parameters.kind == Kind.FCFS or n == 0:
        return False
    overdue = 0
    for i in range(n):
        left = _due(parameters, waiting, i) - waiting.waited[i]
        if left <= 0.0:
            waiting.key[i] = left
            waiting.order[overdue] = i
            overdue += 1
    rest = overdue
    rate = parameters.gamma if parameters.gamma > 0.0 else parameters.scale * gamma
    unit = _total(waiting.alone, n) / max(_total(waiting.cost, n), 1e-300)
    for i in range(n):
        waited = waiting.waited[i]
        if _due(parameters, waiting, i) - waited <= 0.0:
            continue
        waiting.key[i] = _key(
            parameters.kind, rate, waited, unit * waiting.cost[i], waiting.alone[i]
        )
        waiting.order[rest] = i
        rest += 1
    sort_by_key(waiting.order, waiting.other, waiting.key, 0, overdue)
    sort_by_key(waiting.order, waiting.other, waiting.key, overdue, n)
    first = waiting.order[0]
    held = HOLDS_BACK * _due(parameters, waiting, first)
    return overdue > 0 and waiting.waited[first] >= held


@compiled_core
def _key(kind: int, gamma: float, waited: float, cost: float, alone: float) -> float:
    if kind == Kind.SHORTEST:
        return cost
    if kind == Kind.RESPONSE_RATIO:
        return -waited / max(alone, 1e-9)
    if gamma <= 0.0:  # no latency has been seen: nobody has waited long
        return cost
    return -waited + log(-expm1(-gamma * max(cost, 1e-9))) / gamma


@compiled_core
def _total(values: FloatArray, n: int) -> float:
    total = 0.0
    for i in range(n):
        total += values[i]
    return total


@compiled_core
def _due(parameters: OrderParameters, waiting: Waiting, i: int) -> float:
    """Return the seconds of waiting after which a request is overdue."""
    return min(parameters.starvation * waiting.alone[i], waiting.latest[i])  # type: ignore[no-any-return]


@compiled_core
def sort_by_key(order: IntArray, other: IntArray, key: FloatArray, begin: int, end: int) -> None:
    """Sort a part of an order by keys: merges, which keep ties as they are."""
    width = 1
    while width < end - begin:
        low = begin
        while low + width < end:
            middle, high = low + width, min(low + 2 * width, end)
            if key[order[middle - 1]] > key[order[middle]]:
                for i in range(low, high):
                    other[i] = order[i]
                left, right = low, middle
                for i in range(low, high):
                    takes_left = right >= high or (
                        left < middle and key[other[left]] <= key[other[right]]
                    )
                    if takes_left:
                        order[i] = other[left]
                        left += 1
                    else:
                        order[i] = other[right]
                        right += 1
            low = high
        width *= 2


@compiled_core
def tail_rate(latencies: FloatArray, n: int, order: IntArray, other: IntArray) -> float:
    r"""Return the decay rate γ of the tail of the latencies seen, per second; 0 of fewer than 10.

    .. math:: \gamma = 1 / E[T - q \mid T > q]

    with q their median: the maximum-likelihood rate of what is exponential past q. In an overload
    latencies have no such tail; then a boost is of the order of the latencies themselves.

    Args:
        latencies: [m] the last ones, in any order.
        n: how many of them there are.
        order: [m] scratch.
        other: [m] scratch.
    """
    if n < _FEWEST:
        return 0.0
    for i in range(n):
        order[i] = i
    sort_by_key(order, other, latencies, 0, n)
    first = int(_TAIL * n)
    quantile, excess = latencies[order[first - 1]], 0.0
    for i in range(first, n):
        excess += latencies[order[i]] - quantile
    return (n - first) / excess if excess > 0.0 else 0.0
