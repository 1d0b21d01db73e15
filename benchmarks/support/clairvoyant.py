"""The least imbalance that any placement of a small pool can have, the future being known.

Behind a barrier every running request grows by a token a step and leaves after its output. As
`BFIO` does, a policy fills as many free slots as it can. What is minimised is the sum over all
steps of G max L - Σ L, by exhaustive search over whole runs: some ten requests are the limit.
"""

from collections.abc import Callable
from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import PointForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView

__all__ = ["least_imbalance", "reached_imbalance"]

Requests = tuple[tuple[int, int], ...]
"""Context and tokens left of each, sorted."""
Choice = Callable[[ClusterView], npt.NDArray[np.int64]]


def least_imbalance(instances: int, slots: int, pool: Requests) -> int:
    """Return the least sum over a whole run that begins with empty instances, in tokens.

    Args:
        instances: G.
        slots: of each.
        pool: prompt and output of every request, all waiting at the beginning.
    """

    @cache
    def rest(running: tuple[Requests, ...], waiting: Requests) -> int:
        if not waiting and not any(running):
            return 0
        return min(
            imbalance + rest(*after)
            for imbalance, after in {
                _stepped(placed, left) for placed, left in _placements(running, waiting, slots)
            }
        )

    return rest(((),) * instances, tuple(sorted(pool)))


def reached_imbalance(instances: int, slots: int, pool: Requests, choose: Choice) -> int:
    """Return the sum over the run of a policy that knows the lengths; see `least_imbalance`."""
    running: tuple[Requests, ...] = ((),) * instances
    waiting, total = tuple(pool), 0
    while waiting or any(running):
        target = choose(_view(running, waiting, slots))
        placed = [list(requests) for requests in running]
        for request, g in zip(waiting, target, strict=True):
            if g >= 0:
                placed[g].append(request)
        waiting = tuple(r for r, g in zip(waiting, target, strict=True) if g < 0)
        imbalance, (running, _) = _stepped(tuple(tuple(sorted(p)) for p in placed), waiting, False)
        total += imbalance
    return total


def _placements(
    running: tuple[Requests, ...], waiting: Requests, slots: int
) -> set[tuple[tuple[Requests, ...], Requests]]:
    """Return all ways to fill the instances, one after the other, and who goes on waiting."""
    free = [slots - len(requests) for requests in running]
    admitted = min(sum(free), len(waiting))
    found: set[tuple[tuple[Requests, ...], Requests]] = set()

    def fill(g: int, placed: tuple[Requests, ...], left: Requests, still: int) -> None:
        if g == len(running):
            if still == 0:
                found.add((placed, left))
            return
        for count in range(min(free[g], still) + 1):
            for chosen in set(combinations(range(len(left)), count)):
                joined = tuple(sorted(running[g] + tuple(left[i] for i in chosen)))
                others = tuple(r for i, r in enumerate(left) if i not in chosen)
                fill(g + 1, (*placed, joined), others, still - count)

    fill(0, (), waiting, admitted)
    return found


def _stepped(
    placed: tuple[Requests, ...], waiting: Requests, interchangeable: bool = True
) -> tuple[int, tuple[tuple[Requests, ...], Requests]]:
    """Return the imbalance of one step, and what runs after it; equal instances are one."""
    loads = [sum(context for context, _ in requests) for requests in placed]
    after = [tuple((c + 1, left - 1) for c, left in requests if left > 1) for requests in placed]
    if interchangeable:
        after.sort()
    return len(loads) * max(loads) - sum(loads), (tuple(after), waiting)


def _view(running: tuple[Requests, ...], waiting: Requests, slots: int) -> ClusterView:
    """Return the cluster as the policy sees it; its forecasts are the truth."""
    there = [request for requests in running for request in requests]
    counts = [len(requests) for requests in running]
    return ClusterView(
        slots=np.full(len(running), slots),
        kv_capacity=np.full(len(running), UNLIMITED),
        queued=np.zeros(len(running), dtype=np.int64),
        instance=np.repeat(np.arange(len(running)), counts),
        prompt_tokens=np.array([context for context, _ in there], dtype=np.int64),
        generated_tokens=np.zeros(len(there), dtype=np.int64),
        forecast=PointForecast.new([float(left) for _, left in there]),
        waiting_prompt_tokens=np.array([prompt for prompt, _ in waiting], dtype=np.int64),
        waiting_generated_tokens=np.zeros(len(waiting), dtype=np.int64),
        waiting_forecast=PointForecast.new([float(output) for _, output in waiting]),
        waited_steps=np.zeros(len(waiting), dtype=np.int64),
    )
