"""What one simulated run gives: its requests, its means, and how it went over time."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LoadSeries", "RequestRecords", "RunResult"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class RequestRecords(NamedTuple):
    """The requests that finished or were turned away, [n] each, in order of that.

    Attributes:
        number: of the request in the trace, from 0.
        instance: where it ended.
        arrival: seconds at which it became visible.
        placed: seconds at which the policy gave it to an instance.
        start: seconds at which it was first admitted; of one that was turned away this is NaN,
            as the times before and after are, but for its arrival.
        first_token: seconds at which its first token was there.
        end: seconds at which its last token was there.
        prompt: tokens.
        output: tokens.
        preemptions: times it lost its place.
        migrations: times it moved.
        tpot_worst: its worst running mean of seconds per output token, see `SLOConfig`; NaN
            where that is not asked for, and of a single token.
        client: number of the account that sent it, see `TraceBlock`.
    """

    number: IntArray
    instance: IntArray
    arrival: FloatArray
    placed: FloatArray
    start: FloatArray
    first_token: FloatArray
    end: FloatArray
    prompt: IntArray
    output: IntArray
    preemptions: IntArray
    migrations: IntArray
    tpot_worst: FloatArray
    client: IntArray


class LoadSeries(NamedTuple):
    """Evenly thinned samples of a run's steps, at most 4,096.

    Attributes:
        step: [s] number of the step.
        time: [s] seconds at which it began.
        load: [s, G] context tokens on each instance.
        running: [s] requests on all instances.
        power: [s] mean watts of a GPU during the step, utilisation being own load / max load.
        execution_variance: [s] of the instances' step times, in seconds squared.
        held: [s] most tokens that an instance's KV cache holds, reserved ones included.
        preemptions: [s] until then.
        migrations: [s] until then.
    """

    step: IntArray
    time: FloatArray
    load: IntArray
    running: IntArray
    power: FloatArray
    execution_variance: FloatArray
    held: IntArray
    preemptions: IntArray
    migrations: IntArray


@dataclass(frozen=True, slots=True)
class RunResult:
    r"""One policy with one seed.

    Attributes:
        policy: its label.
        seed: of the run.
        n_instances: G.
        requests: those that finished, and those that were turned away.
        prefilled_first_token: a simulated prefill gave each first token.
        steps: steps recorded.
        seconds: from 0 to the last end.
        busy_seconds: sum of the steps' durations.
        tokens: generated, first ones included.
        imbalance: mean over steps of :math:`G \max_g L_g - \sum_g L_g`, in tokens.
        max_minus_min: mean over steps of :math:`\max_g L_g - \min_g L_g`, in tokens.
        idle_share: mean over steps of :math:`1 - \bar L / \max_g L_g`.
        execution_variance: mean over steps (or seconds, without a barrier) of the variance of the
            instances' step times, in seconds squared.
        most_held: most tokens that an instance's KV cache held, reserved ones included.
        energy_load_joules: of all GPUs, utilisation being own load / max load.
        energy_mfu_joules: of all GPUs, utilisation being mfu / mfu_sat.
        preemptions: requests that lost their place.
        migrations: requests that moved.
        decisions: times the policy was asked.
        plans: times the migration planner was asked.
        itl_histogram: [bins] tokens by the time since the token before.
        itl_edges: [bins + 1] seconds, log-spaced.
        series: loads and power over time.
    """

    policy: str
    seed: int
    n_instances: int
    requests: RequestRecords
    prefilled_first_token: bool
    steps: int
    seconds: float
    busy_seconds: float
    tokens: int
    imbalance: float
    max_minus_min: float
    idle_share: float
    execution_variance: float
    most_held: int
    energy_load_joules: float
    energy_mfu_joules: float
    preemptions: int
    migrations: int
    decisions: int
    plans: int
    itl_histogram: IntArray
    itl_edges: FloatArray
    series: LoadSeries
