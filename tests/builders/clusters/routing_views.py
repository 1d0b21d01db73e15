"""Small clusters as routing policies see them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import Forecast, PointForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.routing import create_policy

IntArray = npt.NDArray[np.int64]

Request = tuple[int, float]
"""Context tokens, and tokens expected to come."""


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
    return ClusterView(
        slots=np.broadcast_to(np.asarray(slots, dtype=np.int64), n_instances),
        kv_capacity=np.broadcast_to(np.asarray(capacity, dtype=np.int64), n_instances),
        queued=np.array(queued or [0] * n_instances, dtype=np.int64),
        instance=np.repeat(np.arange(n_instances), [len(instance) for instance in instances]),
        prompt_tokens=integers(tokens - 1 for tokens, _ in running),
        generated_tokens=np.ones(len(running), dtype=np.int64),
        forecast=points(running),
        waiting_prompt_tokens=integers(tokens - 1 for tokens, _ in waiting),
        waiting_generated_tokens=np.ones(len(waiting), dtype=np.int64),
        waiting_forecast=points(waiting),
        waited_steps=np.zeros(len(waiting), dtype=np.int64),
        dispatched=dispatched,
        instant=instant,
        prefill_budget=np.array(budget or [0.0] * n_instances),
    )


def integers(values: object) -> IntArray:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def points(requests: Sequence[Request]) -> Forecast:
    return PointForecast.new([float(left) for _, left in requests])


def placed(name: str, view: ClusterView, **options: object) -> list[int]:
    """Where the policy of that name sends the waiting requests."""
    instance: list[int] = create_policy(name, **options).assign(view).instance.tolist()
    return instance
