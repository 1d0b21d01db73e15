r"""What a router is rewarded for, of the requests of a simulation as they are.

.. math:: r_t = -\sum_{j} \frac{1}{\hat T_j} (1 - f_{jt}) + \sum_i r_w w_{it}, \qquad
   f_{jt} = \frac{o_{jt}}{\hat d_{jt}}, \qquad \hat T_j = p_j t_p + \hat d_{jt} t_d \tag{3}

over all requests j in the system, in the queue or on an instance; :math:`w_{it}` is 1 for those
completed since the last step. With :math:`o` tokens so far and :math:`\hat R` expected yet,
:math:`\hat d = o + \hat R`. Jain et al. 2025, §4.3.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.routing.learned.workload_impact import ImpactRules
from rescheduler.simulator.engine.engine_state import Arrivals, Cluster
from rescheduler.simulator.engine.placed_requests import gather_placed
from rescheduler.simulator.engine.routing_inputs import expected_left
from rescheduler.simulator.forecasts.forecast_arrays import ForecastArrays

__all__ = ["WORK", "RewardRules", "work_left"]

FloatArray = npt.NDArray[np.float64]

WORK = 4
"""Sums that `work_left` writes."""


class RewardRules(NamedTuple):
    """The constants of the reward.

    Attributes:
        completion: r_w, of a completed request.
        prompt_seconds: t_p, of a prompt token when a request is alone.
        token_seconds: t_d, of a decoded token when a request is alone.
        impact: of mixing requests, in r_mixing.
        guide: the same in h.
    """

    completion: float
    prompt_seconds: float
    token_seconds: float
    impact: ImpactRules
    guide: ImpactRules


@compiled_core
def work_left(
    rules: RewardRules,
    forecast: ForecastArrays,
    cluster: Cluster,
    arrivals: Arrivals,
    since: float,
    work: FloatArray,
) -> None:
    r"""Add up what is left of the requests in the system.

    Args:
        rules: constants of the reward.
        forecast: of the requests.
        cluster: the instances.
        arrivals: the queue.
        since: seconds from which a request's arrival is new.
        work: [4] is written: :math:`\sum_j (1 - f_j) / \hat T_j`, the first sum of equation 3
            without its sign, and :math:`\sum_j (1 - f_j)`; then both of new requests alone.
    """
    work[:] = 0.0
    for i in range(gather_placed(cluster)):
        placed = cluster.placed[i]
        _add_left(rules, forecast, cluster, placed.row, placed.generated, since, work)
    for i in range(cluster.scalars[0].waiting):
        row = arrivals.pool[i]
        _add_left(rules, forecast, cluster, row, cluster.requests[row].generated, since, work)


@compiled_inline
def _add_left(
    rules: RewardRules,
    forecast: ForecastArrays,
    cluster: Cluster,
    row: int,
    generated: int,
    since: float,
    work: FloatArray,
) -> None:
    request = cluster.requests[row]
    left = expected_left(forecast, cluster, row, generated)
    whole = generated + left
    alone = request.prompt * rules.prompt_seconds + whole * rules.token_seconds
    unfinished = left / whole / alone
    to_come = 1.0 - generated / request.output
    work[0] += unfinished
    work[1] += to_come
    if request.arrival > since:
        work[2] += unfinished
        work[3] += to_come
