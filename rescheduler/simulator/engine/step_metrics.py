"""What is measured while a simulation runs."""

from math import log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.simulator.config.rules import Rules
from rescheduler.simulator.config.simulation_config import PowerConfig
from rescheduler.simulator.engine.engine_state import (
    ITL_BINS_PER_E,
    NEVER,
    SHORTEST_ITL,
    Cluster,
    Series,
)
from rescheduler.step_time.step_time import StepTime, step_seconds


class PowerModel(NamedTuple):
    r"""The numbers of :math:`P(u)`.

    Attributes:
        idle: :math:`P_{idle}` in watts.
        max: :math:`P_{max}` in watts.
        gamma: :math:`\gamma`.
        flops_share: mfu / mfu_sat that one token per second makes.
    """

    idle: float
    max: float
    gamma: float
    flops_share: float


def power_model(config: PowerConfig) -> PowerModel:
    r"""Return the model, with :math:`mfu = tokens/s \cdot FLOPs_{token} / FLOPs_{peak}`.

    Source: Chen et al. 2026, Appendix D, equation (56).
    """
    share = config.flops_per_token / (config.peak_flops * config.mfu_sat)
    return PowerModel(float(config.idle), float(config.max), float(config.gamma), share)


@compiled_core
def watts(power: PowerModel, utilisation: float) -> float:
    """Return P(u) of one GPU, u in [0, 1]."""
    if utilisation >= 1.0:
        return power.max
    if utilisation <= 0.0:
        return power.idle
    return power.idle + (power.max - power.idle) * utilisation**power.gamma  # type: ignore[no-any-return]


@compiled_core
def load_watts(power: PowerModel, load: npt.NDArray[np.int64]) -> float:
    r"""Return the watts of all GPUs in a step behind a barrier, :math:`u_g = L_g / \max L`.

    Args:
        power: the model.
        load: [G] context tokens on each instance; GPUs without any idle.
    """
    most = 0
    for g in range(len(load)):
        most = max(most, load[g])
    total = 0.0
    for g in range(len(load)):
        total += watts(power, load[g] / most if most > 0 else 0.0)
    return total


@compiled_core
def mfu_watts(power: PowerModel, tokens: float, seconds: float) -> float:
    r"""Return the watts of one GPU in a step, :math:`u = \min(mfu / mfu_{sat}, 1)`."""
    if seconds <= 0.0:
        return power.idle
    return watts(power, tokens / seconds * power.flops_share)


@compiled_inline
def observe(
    rules: Rules,
    step_time: StepTime,
    power_model: PowerModel,
    cluster: Cluster,
    series: Series,
    until: float,
) -> None:
    """With clocks of their own, instances are observed for the time between two events."""
    scalars = cluster.scalars[0]
    seconds = until - scalars.now
    if not rules.barrier and seconds > 0.0:
        record(rules, step_time, power_model, cluster, series, seconds, seconds)
    elif rules.barrier and seconds > 0.0:
        for g in range(rules.n_instances):
            if cluster.instances[g].stepping:
                return
        idle = rules.n_instances * watts(power_model, 0.0) * seconds
        scalars.energy_load_joules += idle
        scalars.energy_mfu_joules += idle


@compiled_core
def record(
    rules: Rules,
    step_time: StepTime,
    power_model: PowerModel,
    cluster: Cluster,
    series: Series,
    weight: float,
    seconds: float,
) -> None:
    r"""Add the loads as they are to the means and to the series.

    The execution time of an instance is that of a decode step of what it has; of the G times the
    (population) variance is taken, as STAR's (Wang et al. 2026) §6.3.
    """
    scalars = cluster.scalars[0]
    most, least, total, running, held = 0, NEVER, 0, 0, 0
    mean_time, square_time = 0.0, 0.0
    for g in range(rules.n_instances):
        load = cluster.instances[g].load
        series.current[g] = load
        most = max(most, load)
        least = min(least, load)
        total += load
        running += cluster.instances[g].decoding
        reserved = cluster.instances[g].arriving_tokens + cluster.instances[g].leaving_tokens
        held = max(held, load + reserved)
        # Of the whole, less what all steps have in common: their differences are small.
        took = step_seconds(step_time, cluster.instances[g].decoding, load) - step_time.constant
        mean_time += took / rules.n_instances
        square_time += took * took / rules.n_instances
    variance = max(square_time - mean_time * mean_time, 0.0)
    power = 0.0
    if rules.barrier:
        power = load_watts(power_model, series.current)
    else:
        busy, idle = watts(power_model, 1.0), watts(power_model, 0.0)
        for g in range(rules.n_instances):
            if cluster.instances[g].stepping:
                power += busy
            else:
                power += idle
                scalars.energy_mfu_joules += seconds * idle
    scalars.energy_load_joules += power * seconds
    scalars.weight += weight
    scalars.imbalance += weight * (rules.n_instances * most - total)
    scalars.max_minus_min += weight * (most - least)
    scalars.execution_variance += weight * variance
    scalars.most_held = max(scalars.most_held, held)
    if most > 0:
        scalars.idle_share += weight * (1.0 - total / (rules.n_instances * most))
    if scalars.recorded % scalars.stride == 0 and scalars.samples == len(series.samples):
        _thin(cluster, series)
    if scalars.recorded % scalars.stride == 0:
        at = scalars.samples
        sample = series.samples[at]
        sample.step = scalars.recorded
        sample.time = scalars.now
        sample.running = running
        sample.power = power / rules.n_instances
        sample.execution_variance = variance
        sample.held = held
        sample.preemptions = scalars.preemptions
        sample.migrations = scalars.migrations
        for g in range(rules.n_instances):
            series.load[at, g] = series.current[g]
        scalars.samples += 1
    scalars.recorded += 1


@compiled_core
def _thin(cluster: Cluster, series: Series) -> None:
    """Keep each second sample, and take half as many from here on."""
    scalars = cluster.scalars[0]
    kept = 0
    for sample in range(0, scalars.samples, 2):
        series.samples[kept] = series.samples[sample]
        for g in range(series.load.shape[1]):
            series.load[kept, g] = series.load[sample, g]
        kept += 1
    scalars.samples = kept
    scalars.stride *= 2


@compiled_inline
def count_latency(cluster: Cluster, seconds: float, tokens: int) -> None:
    """Count the time since the token before, of so many tokens."""
    if tokens == 0:
        return
    at = 0
    if seconds > SHORTEST_ITL:
        at = min(int(log(seconds / SHORTEST_ITL) * ITL_BINS_PER_E), len(cluster.histogram) - 1)
    cluster.histogram[at] += tokens
