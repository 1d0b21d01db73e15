"""A made-up cluster, decided on before the first request comes: no stream waits for a compiler."""

import numpy as np

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView

__all__ = ["crowded_view"]

_RUNNING, _WAITING = 4, 2


def crowded_view(n_instances: int = 2) -> ClusterView:
    """Return instances of which one has all requests, so that planners have much to move."""
    none = np.zeros(n_instances, dtype=np.int64)
    running, waiting = np.full(_RUNNING, 100), np.full(_WAITING, 100)
    return ClusterView(
        slots=none + 2 * _RUNNING,
        kv_capacity=none + UNLIMITED,
        queued=none,
        instance=np.zeros(_RUNNING, dtype=np.int64),
        prompt_tokens=running,
        generated_tokens=running,
        forecast=_forecast(_RUNNING),
        waiting_prompt_tokens=waiting,
        waiting_generated_tokens=waiting,
        waiting_forecast=_forecast(_WAITING),
        waited_steps=np.zeros(_WAITING, dtype=np.int64),
        prefill_budget=np.zeros(n_instances),
    )


def _forecast(n: int) -> SurvivalForecast:
    """Return curves of requests that have a hundred thousand tokens to go, in the mean."""
    edges = np.array([0.0, 1e3, 1e6])
    survival = np.tile(np.exp(-edges / 1e5), (n, 1))
    return SurvivalForecast.new(edges, survival, np.full(n, np.inf))
