"""The inputs of a migration decision, straight from the engine's arrays."""

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled
from rescheduler.migration.inputs import MigrationInputs, RequestForecasts
from rescheduler.simulator.engine.engine_state import NONE, Cluster, Rules
from rescheduler.simulator.engine.placed_requests import gather_placed
from rescheduler.simulator.engine.routing_inputs import add_expected_loads
from rescheduler.simulator.forecasts.forecast_arrays import (
    ForecastArrays,
    expected_remaining,
    survival_row,
)

__all__ = ["simulated_migration_inputs"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def simulated_migration_inputs(
    rules: Rules, forecast: ForecastArrays, cluster: Cluster, points: IntArray
) -> tuple[MigrationInputs, IntArray]:
    """Return the inputs of a decision on the cluster as it is, and the rows of their requests.

    Requests that cannot move are in the loads, but not among the requests. One that is about to
    leave counts where it goes. The inputs hold until the engine goes on.

    Args:
        rules: of the cluster.
        forecast: what is known of lengths.
        cluster: its state.
        points: [P] decode steps ahead, ascending from 0.
    """
    n, instances, requests = gather_placed(cluster), cluster.instances, cluster.requests
    placed = cluster.placed[:n]
    leaving = requests["target"][placed["row"]] != NONE
    placed["instance"][leaving] = requests["target"][placed["row"][leaving]]
    load = np.zeros(rules.n_instances, dtype=np.int64)
    np.add.at(load, placed["instance"], placed["context"])
    free = rules.slots - np.bincount(placed["instance"], minlength=rules.n_instances)
    ahead = np.zeros((rules.n_instances, len(points)))
    if len(points) > 1:
        growth = points * rules.drift.mean()
        _add_expected_loads(forecast, cluster, n, points, growth, ahead)
    ahead[:, 0] = load
    movable = placed[placed["since_move"] >= 0]

    def forecasts_of(some: IntArray, steps: FloatArray) -> RequestForecasts:
        k = len(some)
        found = RequestForecasts(np.ones((k, len(points))), np.zeros(k), np.ones(k))
        if forecast.kind:
            _write_forecasts(forecast, requests, movable[some], points, steps, *found)
        return found

    inputs = MigrationInputs(
        load=load,
        room=rules.kv_capacity - instances["leaving_tokens"],
        free=free.astype(np.int64),
        points=points,
        ahead=ahead,
        source=movable["instance"].copy(),
        context=movable["context"].copy(),
        since_move=movable["since_move"].copy(),
        forecasts_of=forecasts_of,
    )
    return inputs, movable["row"].copy()


@compiled
def _add_expected_loads(
    forecast: ForecastArrays,
    cluster: Cluster,
    n: int,
    points: IntArray,
    growth: FloatArray,
    ahead: FloatArray,
) -> None:
    row, ending = np.empty(len(points)), np.empty((2, ahead.shape[0], len(points) + 1))
    capacity, no_excess = np.empty(len(ahead), np.int64), np.empty((len(ahead), len(points), 0))
    nowhere = np.empty((len(ahead), 0))
    add_expected_loads(
        forecast,
        cluster,
        n,
        points,
        growth,
        capacity,
        row,
        ending,
        ahead,
        no_excess,
        nowhere,
    )


@compiled
def _write_forecasts(
    forecast: ForecastArrays,
    requests: npt.NDArray[np.void],
    movable: npt.NDArray[np.void],
    points: IntArray,
    steps: FloatArray,
    survival: FloatArray,
    remaining: FloatArray,
    outlives: FloatArray,
) -> None:
    """Write the `RequestForecasts` of requests as `gather_placed` writes them."""
    after, alive = np.empty(1, dtype=np.int64), np.empty(1)
    for k in range(len(movable)):
        r, generated = requests[movable[k].row], movable[k].generated
        survival_row(forecast, r.number, r.template, generated, r.output, points, survival[k])
        remaining[k] = expected_remaining(forecast, r.number, r.template, generated, r.output)
        after[0] = np.ceil(steps[k])
        survival_row(forecast, r.number, r.template, generated, r.output, after, alive)
        outlives[k] = alive[0]
