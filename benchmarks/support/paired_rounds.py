"""Differences between arms that served the same requests in the same rounds."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rescheduler.simulator.results.metrics import half_interval


class Estimate(NamedTuple):
    """A mean over rounds, with half its 95% interval by Student's t (NaN of one round)."""

    mean: float
    half: float
    rounds: int

    @property
    def is_certain(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.half


def mean_of(values: Mapping[int, float]) -> Estimate:
    """Return the mean over the rounds, by number; NaN where a round says nothing."""
    found = np.array([value for value in values.values() if not np.isnan(value)])
    if len(found) == 0:
        return Estimate(float("nan"), float("nan"), 0)
    half = float(half_interval(found)) if len(found) > 1 else float("nan")
    return Estimate(float(found.mean()), half, len(found))


def paired_difference(values: Mapping[int, float], others: Mapping[int, float]) -> Estimate:
    r"""Return the mean difference, :math:`\bar d \pm t_{0.975, n - 1}\, s_d / \sqrt n`.

    Only rounds that both have count. What a round's requests and the machine at that time do to
    both alike is not in the interval.

    Args:
        values: by round.
        others: by round, which are subtracted.
    """
    return mean_of({i: values[i] - others[i] for i in values if i in others})
