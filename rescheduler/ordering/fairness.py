r"""Fairness between accounts, compiled: whose request goes next, by the service each has had.

An account a with weight :math:`w_a` has had the virtual service

.. math:: v_a = \frac1{w_a} \sum_i \big(p_i + 2\,o_i\big)

over its requests i with :math:`p_i` prompt tokens and :math:`o_i` output tokens, which cost more.
The next request is that which the order of service puts first of the accounts with

.. math:: v_a \le \min_b v_b + \Big(\frac1f - 1\Big) Q

over the accounts b that wait, with f the fairness and Q the mean service of a request. At f = 1 it
is a request of the account that has had least, towards 0 the order of service alone; at 1/2 an
account may be one request ahead of another.

Source: Sheng et al. 2024, 'Fairness in Serving Large Language Models' (the virtual token counter
and its weights); Goyal et al. 1996 for the start-time lift of `rescheduler.placement.accounts`.
"""

from math import inf

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

OUTPUT_WEIGHT = 2.0
"""Prompt tokens that an output token counts as."""
_NONE = -1


def slack(fairness: float, mean_service: float) -> float:
    """Return how much more service than another an account may have had before it has to wait."""
    return inf if fairness <= 0.0 else (1.0 / fairness - 1.0) * mean_service


@compiled_core
def interleave(
    order: IntArray,
    account: IntArray,
    served: FloatArray,
    service: FloatArray,
    slack: float,
    following: IntArray,
    ranks: IntArray,
    first: IntArray,
    n: int,
) -> None:
    """Rewrite an order of n requests so that no account gets ahead of another by too much.

    The requests of one account keep their order. Takes time of n times the accounts.

    Args:
        order: [n] requests by the order of service; rewritten.
        account: [n] of each request, below A.
        served: [A] virtual service :math:`v_a` that each account has had; changed.
        service: [n] virtual service that each request is expected to take.
        slack: as `slack` returns it, finite.
        following: [n] scratch.
        ranks: [n] scratch.
        first: [A] scratch.
        n: how many requests there are.
    """
    for a in range(len(served)):
        first[a] = _NONE
    for rank in range(n - 1, -1, -1):
        a = account[order[rank]]
        following[rank] = first[a]
        first[a] = rank
    for k in range(n):
        least = inf
        for a in range(len(served)):
            if first[a] != _NONE:
                least = min(least, served[a])
        chosen = _NONE
        for a in range(len(served)):
            waits = first[a] != _NONE and served[a] <= least + slack
            if waits and (chosen == _NONE or first[a] < first[chosen]):
                chosen = a
        rank = first[chosen]
        ranks[k] = rank
        first[chosen] = following[rank]
        served[chosen] += service[order[rank]]
    for k in range(n):
        following[k] = order[ranks[k]]
    for k in range(n):
        order[k] = following[k]
