"""How BF-IO weighs the steps to come, and what it takes the freed slots to be filled with."""

import numpy as np

from predictor.compilation import compiled
from rescheduler.routing.inputs import FloatArray, IntArray, RoutingInputs

FURTHEST = 2000
"""Steps looked ahead at most: far more than an instance usually goes without an admission."""
NEGLIGIBLE = 1e-3
"""Weight below which steps are left out."""


@compiled
def free_slots(inputs: RoutingInputs) -> IntArray:
    """Return the slots that the requests of the pool can take, [G]: unlimited ones are many."""
    slots = np.empty(len(inputs.slots), dtype=np.int64)
    for g in range(len(slots)):
        slots[g] = min(max(inputs.slots[g], 0), len(inputs.size))
    return slots


@compiled
def foresight(inputs: RoutingInputs) -> tuple[FloatArray, FloatArray]:
    r"""Return the weight of each point, [P'], and what fills a freed slot by then, [P'].

    Whoever ends is replaced, and with each admission the router can take back a part of what was
    predicted to be uneven: all of it at most, and no more than the tokens that an admission brings
    for those that an end takes. With :math:`\bar c` the mean context of those that run and of
    those that wait, that share is

    .. math:: \alpha = \min(1, \bar c_{\text{waiting}} / \bar c_{\text{running}}) .

    A difference of loads predicted for step h then counts as far as it is still there:
    :math:`(1 - \alpha)^k` of it after k admissions. Of an instance on which :math:`D_g(h)`
    requests are expected to end by then, independently of each other, the expectation of that is
    :math:`\prod_i (1 - \alpha (1 - S_i(h))) \le e^{-\alpha D_g(h)}`, which needs no more than D:

    .. math::
        w(h) = \frac1G \sum_g e^{-\alpha D_g(h)}, \qquad
        D_g(h) = \sum_{i \text{ on } g} \big(1 - S_i(h)\big)
            + U \frac{c_g}{\sum_k c_k} \big(1 - \bar S(h)\big)

    with :math:`\bar S` the mean survival of those that wait, of whom U are admitted now, to an
    instance in proportion to its free slots :math:`c_g`. It is 1 at h = 0 and never rises. Where
    one admission can make up for an end (α = 1), w is the chance that no request was admitted.

    A slot freed is filled from those that are left waiting, if any are, on average half-way
    through the h steps:

    .. math:: \bar s(h) = \operatorname{median}_i c_i + \delta(h) / 2 .

    The median, because what stays in a pool for long is what fits nowhere.

    Args:
        inputs: the decision. Those without ``alive`` have weights of 1 at all P points, and slots
            stay empty.

    Returns:
        w, times the steps that each point stands for, those since the one before; and s̄.
        Both end where w is negligible.
    """
    n, n_points, n_instances = len(inputs.size), len(inputs.points), len(inputs.load)
    weight, refill = np.ones(n_points), np.zeros(n_points)
    if inputs.alive.shape[1] == 0:
        return weight, refill
    slots = free_slots(inputs)
    n_slots = slots.sum()
    admitted_per_slot = min(n, n_slots) / max(n_slots, 1)
    brought, held = inputs.size.sum() / max(n, 1), inputs.load.sum() / max(inputs.running.sum(), 1)
    share = min(brought / held, 1.0) if held > 0.0 else 1.0
    typical = np.median(inputs.size) if n > n_slots else 0.0
    for h in range(n_points):
        ending = 0.0
        for i in range(n):
            ending += (1.0 - inputs.survival[i, h]) / n
        holds = 0.0
        for g in range(n_instances):
            ended = inputs.alive[g, 0] - inputs.alive[g, h]
            ended += admitted_per_slot * slots[g] * ending
            holds += np.exp(-share * ended) / n_instances
        if holds < NEGLIGIBLE:
            return weight[:h], refill[:h]
        if h > 0:
            weight[h] = holds * (inputs.points[h] - inputs.points[h - 1])
        if n > n_slots:
            refill[h] = typical + inputs.growth[h] / 2
    return weight, refill


@compiled
def loads_ahead(
    inputs: RoutingInputs, requests: IntArray, weight: FloatArray, refill: FloatArray
) -> tuple[FloatArray, FloatArray]:
    r"""Return the weighted loads before the decision, [G, P'], and those of requests, [m, P'].

    .. math::
        w(h) \Big[\Lambda_g(h) + \bar s(h) \sum_{i \text{ on } g} \big(1 - S_i(h)\big)\Big],
        \qquad
        w(h) \Big[S_i(h) \big(c_i + \delta(h)\big) + \big(1 - S_i(h)\big) \bar s(h)\Big]

    J is homogeneous at each h: that of weighted loads is the weighted J.

    Args:
        inputs: the decision; without points the present loads and sizes are returned, P' = 1.
        requests: [m] rows of waiting requests.
        weight: [P'] as `foresight` returns it.
        refill: [P'] s̄, likewise.
    """
    m, n_instances, n_points = len(requests), len(inputs.load), len(weight)
    if n_points == 0:
        now, sizes = np.empty((n_instances, 1)), np.empty((m, 1))
        now[:, 0] = inputs.load
        for j in range(m):
            sizes[j, 0] = inputs.size[requests[j]]
        return now, sizes
    row, brought = np.empty((n_instances, n_points)), np.empty((m, n_points))
    filled = inputs.alive.shape[1] > 0
    for g in range(n_instances):
        for h in range(n_points):
            row[g, h] = inputs.ahead[g, h]
        if filled:
            for h in range(n_points):
                ended = inputs.alive[g, 0] - inputs.alive[g, h]
                row[g, h] = weight[h] * (row[g, h] + ended * refill[h])
    for j in range(m):
        i, tokens = requests[j], float(inputs.size[requests[j]])
        for h in range(n_points):
            brought[j, h] = inputs.survival[i, h] * (tokens + inputs.growth[h])
        if filled:
            for h in range(n_points):
                ended = 1.0 - inputs.survival[i, h]
                brought[j, h] = weight[h] * (brought[j, h] + ended * refill[h])
    return row, brought
