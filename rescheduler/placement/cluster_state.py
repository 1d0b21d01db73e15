"""The proxy's knowledge as the view that policies decide on."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from rescheduler.cluster.cluster_view import CANNOT_MOVE, NEVER_MOVED, UNLIMITED, ClusterView
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Counted, Placeable, PlacedRequests

__all__ = ["cluster_view", "longest_prompt", "running_requests"]

C = TypeVar("C", bound=Counted)

_ELSEWHERE = -1
"""In place of the index of an instance that is not shown."""

_MOST_GENERATED = 2**30
"""Of one request, so that sums of many do not overflow."""


def running_requests(placements: PlacedRequests[C], instances: Sequence[InstanceState]) -> list[C]:
    """Return the requests on these instances, in the order of `cluster_view`."""
    return [request for instance in instances for request in placements.on(instance)]


def longest_prompt(instances: Sequence[InstanceState]) -> int:
    """Return the tokens of the longest prompt that each of these instances takes.

    They serve one model. If one says more than the others, nothing waits for room that only it has.
    """
    return min(map(_longest, instances), default=int(UNLIMITED))


def cluster_view(
    placements: PlacedRequests[Counted],
    instances: Sequence[InstanceState],
    waiting: Sequence[Placeable],
    forecasts: LiveForecasts | None,
    now: float,
    step_seconds: float,
    dispatched: int = 0,
    prefill_budget: np.ndarray | None = None,
) -> ClusterView:
    """Return the view of some decode instances.

    A request that is on its way counts at its target. A request generates one token a decode
    step, so that the tokens since its last move are the steps since then. A prompt whose length
    is guessed counts as no longer than what the instances take: one that is longer waits for no
    room, and the engine answers that it is too long.

    Args:
        placements: of all requests.
        instances: that requests may go to.
        waiting: requests that wait for one of them, in order of arrival.
        forecasts: of remaining lengths; None if the decision needs none.
        now: seconds on the clock of ``waiting_since``.
        step_seconds: mean duration of a decode step lately.
        dispatched: requests placed so far.
        prefill_budget: tokens of prompts that each instance can compute in time, if it is known.
    """
    longest = longest_prompt(instances)
    index: dict[InstanceState | None, int] = {instance: g for g, instance in enumerate(instances)}
    listed = [placements.on(instance) for instance in instances]
    running = [request for requests in listed for request in requests]
    here = np.repeat(np.arange(len(listed)), _integers(list(map(len, listed))))
    where = _integers([index.get(request.destination, _ELSEWHERE) for request in running])
    generating = np.array([request.generating for request in running], dtype=bool)
    since = np.full(len(running), CANNOT_MOVE, dtype=np.int64)
    for i, request in enumerate(running):
        if request.can_move:
            before = request.generated_at_move
            since[i] = NEVER_MOVED if before is None else _generated(request) - before
    return ClusterView(
        slots=_integers([instance.slots for instance in instances]),
        kv_capacity=_integers([instance.kv_capacity for instance in instances]),
        queued=np.bincount(here[~generating], minlength=len(listed)),
        instance=np.where(where == _ELSEWHERE, here, where),
        prompt_tokens=_integers(
            [
                min(request.prompt_tokens, _longest(instance))
                for instance, requests in zip(instances, listed, strict=True)
                for request in requests
            ]
        ),
        generated_tokens=_integers([_generated(request) for request in running]),
        forecast=forecasts.forecast(running) if forecasts else None,
        waiting_prompt_tokens=_integers([min(one.prompt_tokens, longest) for one in waiting]),
        waiting_generated_tokens=_integers([_generated(request) for request in waiting]),
        waiting_forecast=forecasts.forecast(waiting) if forecasts else None,
        waited_steps=_integers(
            [int((now - request.waiting_since) / step_seconds) for request in waiting]
        ),
        dispatched=dispatched,
        since_move=since,
        prefill_budget=prefill_budget,
        step_seconds=step_seconds,
    )


def _longest(instance: InstanceState) -> int:
    return instance.engine.max_model_len if instance.engine else int(UNLIMITED)


def _generated(request: Counted) -> int:
    return min(request.generated_tokens, _MOST_GENERATED)


def _integers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
