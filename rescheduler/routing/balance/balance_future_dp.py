"""The released variant of BF-IO: F-scores over a horizon, and subsets by a bitset subset-sum."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.routing.balance.balance_route import discounts, envelope, raise_envelope
from rescheduler.routing.balance.subset_sum import fullest_sum, reachable_sums, subset_of_sum
from rescheduler.routing.inputs import RoutingInputs, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

__all__ = ["BalanceFutureDP", "balance_future_dp"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOST_CANDIDATES = 1024
"""Waiting requests, the oldest, that a choice is made among."""


@compiled
def _score(
    parameters: FloatArray, weights: FloatArray, margins: FloatArray, tokens: float
) -> float:
    """Return F of so many tokens added to an instance with these margins."""
    alpha, beta = parameters[0], parameters[1]
    score = 0.0
    for p in range(len(weights)):
        score += weights[p] * (alpha * tokens - beta * max(tokens - margins[p], 0.0))
    return score


@compiled
def _candidates(size: IntArray, target: IntArray, room: int, candidates: IntArray) -> int:
    """List the oldest waiting requests that fit the room, and return their number."""
    n = 0
    for i in range(len(target)):
        if n == len(candidates):
            break
        if target[i] < 0 and size[i] <= room:
            candidates[n] = i
            n += 1
    return n


@compiled
def _best_single(
    sizes: IntArray, parameters: FloatArray, weights: FloatArray, margins: FloatArray
) -> int:
    """Return the place of the size with the greatest F; ties go to the earliest."""
    best, best_score = -1, 0.0
    for c in range(len(sizes)):
        score = _score(parameters, weights, margins, float(sizes[c]))
        if best < 0 or score > best_score:
            best, best_score = c, score
    return best


@compiled
def _best_subset(
    sizes: IntArray,
    parameters: FloatArray,
    weights: FloatArray,
    margins: FloatArray,
    most_items: int,
    room: int,
) -> npt.NDArray[np.bool_]:
    """Return which sizes are in the best subset found; none if no subset's F is above 0."""
    most_items = min(most_items, len(sizes))
    largest = min(np.sort(sizes)[-most_items:].sum(), room)
    unit = max(1, -(-largest // np.int64(parameters[4])))
    units = (sizes + unit // 2) // unit
    largest_units = largest // unit
    safe = int(np.floor(margins.min() / unit))
    reach = reachable_sums(units, most_items, largest_units)
    best_items, best_total, best_score = 0, 0, 0.0
    for n_items in range(most_items, 0, -1):
        total = fullest_sum(reach[-1, n_items], safe, largest_units)
        if total < 0:
            continue
        score = _score(parameters, weights, margins, float(total * unit))
        if score > best_score:
            best_items, best_total, best_score = n_items, total, score
            if total <= safe:
                break
    subset: npt.NDArray[np.bool_] = subset_of_sum(reach, units, best_items, best_total)
    return subset


@compiled
def _next_instance(inputs: RoutingInputs, closed: npt.NDArray[np.bool_], greedy: bool) -> int:
    """Return the open instance with most slots (greedy), or of least load at the horizon's end."""
    load, slots, ahead = inputs.load, inputs.slots, inputs.ahead
    best = -1
    for g in range(len(closed)):
        if closed[g] or slots[g] <= 0:
            continue
        if best < 0:
            best = g
            continue
        gain = float(slots[g] - slots[best]) if greedy else ahead[best, -1] - ahead[g, -1]
        if gain > 0 or (gain == 0 and load[g] < load[best]):
            best = g
    return best


@compiled
def _open_slots(inputs: RoutingInputs, closed: npt.NDArray[np.bool_]) -> int:
    """Return the free slots of the instances that are open."""
    slots = inputs.slots
    total = 0
    for g in range(len(closed)):
        if not closed[g]:
            total += slots[g]
    return total


@compiled
def balance_future_dp(inputs: RoutingInputs, parameters: FloatArray, target: IntArray) -> None:
    """Spread single requests while slots are many, then fill instances with subsets."""
    slots, room, size, ahead = inputs.slots, inputs.room, inputs.size, inputs.ahead
    highest = envelope(ahead)
    weights = discounts(inputs.points, parameters[2])
    closed = np.zeros(len(slots), dtype=np.bool_)
    candidates = np.empty(min(len(target), MOST_CANDIDATES), dtype=np.int64)
    chosen = np.zeros(len(candidates), dtype=np.bool_)
    while True:
        greedy = _open_slots(inputs, closed) > parameters[3]
        g = _next_instance(inputs, closed, greedy)
        if g < 0:
            return
        n = _candidates(size, target, room[g], candidates)
        if n == 0:
            closed[g] = True  # what waits does not fit, and the room only shrinks
            continue
        sizes, margins = size[candidates[:n]], highest - ahead[g]
        chosen[:n] = False
        if not greedy:
            chosen[:n] = _best_subset(sizes, parameters, weights, margins, slots[g], room[g])
        if not chosen[:n].any():
            chosen[_best_single(sizes, parameters, weights, margins)] = True
        for c in range(n):
            # Sums of rounded sizes may be a few tokens above the room.
            if chosen[c] and size[candidates[c]] <= room[g]:
                place(inputs, target, candidates[c], g)
        raise_envelope(highest, ahead[g])


@routing_policy("balance_future_dp")
@dataclass(frozen=True)
class BalanceFutureDP(RoutingPolicy):
    r"""What the authors of BF-IO released as ``balance_future``, in place of an integer program.

    It scores what a worker would be given, S tokens in one or several requests, by

    .. math:: F_g(S) = \alpha \Big(\sum_h \gamma^h\Big) S - \beta \sum_h \gamma^h (S - m_{g,h})_+

    with BR-H's margins and its constant S. While more than ``greedy_slots`` slots are free, the
    worker with the most of them (ties: least load) is given the one waiting request of the
    greatest F. After that, the worker of the least load at the horizon's end (ties: least load
    now) is given a subset of the pool: for every number of requests up to its slots, a bitset of
    reachable sums gives the largest sum within the safe margin :math:`\min_h m_{g,h}`, or else
    the smallest above it; from many requests to few, the greatest F wins, and the first one
    within the margin ends the search. If no subset has F > 0, the single best request is placed
    anyway.

    Our reading departs from the release in what a policy here cannot know or must respect. The
    release ranks workers by a blend of present and final load whose weight, elapsed time over
    elapsed and remaining time, is close to 1 after the first steps: here it is 1. Loads it
    projects without growth, and what is placed with a size that never ends; here both come
    from the forecasts (a point forecast is its binary projection). It knows no KV capacity: here
    a subset's sum stays within the room, and a worker that nothing fits is passed over. Sums
    above ``resolution`` are counted in units of several tokens. The default numbers are those of
    the release.

    Attributes:
        horizon: last decode step looked at.
        alpha: weight of tokens accepted, above 0.
        beta: weight of tokens that overflow, above 0.
        gamma: discount of a step, in (0, 1].
        greedy_slots: free slots of all workers up to which subsets are chosen, 0 to 64.
        resolution: distinct sums distinguished, at least 64.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), its public code
    (Load-Balancing-Release, ``strategy_balance_future.py``), read, not copied.
    """

    horizon: int = 72
    alpha: float = 1.0
    beta: float = 43.0
    gamma: float = 0.86
    greedy_slots: int = 7
    resolution: int = 8192

    needs = Needs.FORECASTS
    kernel = balance_future_dp

    def __post_init__(self) -> None:
        """Refuse numbers out of range.

        Raises:
            ValueError: an option out of range.
        """
        for name, allowed in (
            ("horizon", self.horizon >= 0),
            ("alpha", self.alpha > 0),
            ("beta", self.beta > 0),
            ("gamma", 0 < self.gamma <= 1),
            ("greedy_slots", 0 <= self.greedy_slots <= 64),
            ("resolution", self.resolution >= 64),
        ):
            if not allowed:
                value = getattr(self, name)
                raise ValueError(f"balance_future_dp: {name} cannot be {value}; see its range")

    def parameters(self) -> FloatArray:
        """Return α, β, γ, the slots for the second phase, and the resolution."""
        return np.array([self.alpha, self.beta, self.gamma, self.greedy_slots, self.resolution])

    def points(self) -> IntArray:
        """Return every step of the horizon."""
        return np.arange(self.horizon + 1, dtype=np.int64)
