r"""Energy of simulated GPUs, in both readings of how busy one is.

Paper 000 gives the power of a GPU as :math:`P(u) = P_{idle} + (P_{max} - P_{idle})\,u^\gamma`
(§6.3, equation (11); Appendix D). Its text takes :math:`u = \min(mfu / mfu_{sat}, 1)`, mfu being
the model FLOPs utilisation (reading *mfu*). Its figures show GPUs that wait at the barrier drawing
less than those that compute, which is :math:`u = L_g / \max_{g'} L_{g'}`, the share of the step
that a GPU is busy (reading *load*).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core
from rescheduler.simulator.config.simulation_config import PowerConfig

__all__ = [
    "PowerModel",
    "load_watts",
    "mfu_watts",
    "power_model",
    "watts",
]


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
    r"""Return the watts of one GPU in a step, :math:`u = \min(mfu / mfu_{sat}, 1)`.

    Args:
        power: the model.
        tokens: that it computed.
        seconds: of the step.
    """
    if seconds <= 0.0:
        return power.idle
    return watts(power, tokens / seconds * power.flops_share)
