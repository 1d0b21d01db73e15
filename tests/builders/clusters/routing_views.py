"""Small clusters as routing policies see them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import Forecast, PointForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.routing import create_policy

IntArray = npt.NDArray[np.int64]

Request = tuple[int, float]
"""Context tokens, and tokens expected to come."""


def view_of(
    slots: Any, instance: Any, context: Any, waiting: Any = (), **fields: Any
) -> ClusterView:
    """A cluster of requests of so many tokens, on their instances and waiting.

    What the fields do not say is as little as can be: nothing is forecast, memory has no limit.
    """
    running, waits = integers(context), integers(waiting)
    made: dict[str, Any] = {
        "slots": integers(slots),
        "kv_capacity": np.full(len(slots), UNLIMITED),
        "queued": np.zeros(len(slots), dtype=np.int64),
        "instance": integers(instance),
        "prompt_tokens": running,
        "generated_tokens": np.zeros_like(running),
        "forecast": None,
        "waiting_prompt_tokens": waits,
        "waiting_generated_tokens": np.zeros_like(waits),
        "waiting_forecast": None,
        "waited_steps": np.zeros_like(waits),
    }
    return ClusterView(**(made | fields))


def cluster(
    instances: Sequence[Sequence[Request]],
    waiting: Sequence[Request],
    *,
    slots: int | Sequence[int] = 100,
    capacity: int | Sequence[int] = UNLIMITED,
    queued: Sequence[int] | None = None,
    dispatched: int = 0,
    instant: bool = False,
    budget: Sequence[float] | None = None,
) -> ClusterView:
    """A cluster of the requests on each instance and those that wait, with point forecasts."""
    n_instances = len(instances)
    running = [request for instance in instances for request in instance]
    return view_of(
        np.broadcast_to(slots, n_instances),
        np.repeat(np.arange(n_instances), [len(instance) for instance in instances]),
        [tokens - 1 for tokens, _ in running],
        [tokens - 1 for tokens, _ in waiting],
        kv_capacity=np.broadcast_to(np.asarray(capacity, dtype=np.int64), n_instances),
        queued=integers(queued or [0] * n_instances),
        generated_tokens=np.ones(len(running), dtype=np.int64),
        forecast=points(running),
        waiting_generated_tokens=np.ones(len(waiting), dtype=np.int64),
        waiting_forecast=points(waiting),
        dispatched=dispatched,
        instant=instant,
        prefill_budget=np.array(budget or [0.0] * n_instances),
    )


def integers(values: Any) -> IntArray:
    return np.array(values, dtype=np.int64)


def points(requests: Sequence[Request]) -> Forecast:
    return PointForecast.new([float(left) for _, left in requests])


def placed(name: str, view: ClusterView, **options: object) -> list[int]:
    """Where the policy of that name sends the waiting requests."""
    instance: list[int] = create_policy(name, **options).assign(view).instance.tolist()
    return instance
