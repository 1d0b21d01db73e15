"""Keeping a profile true while the engine serves."""

import numpy as np

from rescheduler.step_time.profile import BatchTime

__all__ = ["Recalibration"]

_FORGETS = 0.995  # a step's weight halves in 139 steps
_PRIOR_STEPS = 0.05
_FURTHEST_STEP = 3.0
_FURTHEST = 4.0
_SOLVED_EVERY = 16


class Recalibration:
    r"""Least squares of the steps served, exponentially forgotten, held near the profile.

    With :math:`\theta_j = m_j\,\theta^0_j`, multiples of the profile's a, b and c,

    .. math:: \min_m \sum_n \lambda^{N - n} \Big(t_n - \sum_j m_j z_{nj}\Big)^2 +
              \kappa\,\overline{t^2} \sum_j (m_j - 1)^2, \qquad
              z_n = (\theta^0_1,\ \theta^0_2 \cdot \text{new}_n,\ \theta^0_3 \cdot \text{context}_n)

    with λ = 0.995 and κ = 0.05 steps, which keep what the steps do not determine where it was. One
    slow step cannot poison it: a step counts as at most 3 times, at least a third of, what is
    estimated of it, and no multiple leaves [1/4, 4].

    Source: the paper calibrates 'continuously' and says no more (Lyu et al. 2025, §3.2).

    Args:
        batch: the profile's.
    """

    def __init__(self, batch: BatchTime) -> None:
        self._profile = np.array(batch, dtype=np.float64)
        self._now = batch
        self._products = np.zeros((3, 3))
        self._seconds = np.zeros(3)
        self._squares = self._weight = 0.0
        self._since = 0

    @property
    def batch(self) -> BatchTime:
        """What is estimated now."""
        return self._now

    def update(self, new: int, context: int, seconds: float) -> None:
        """Learn from a step; durations that are not positive and finite are ignored."""
        if not 0 < seconds < np.inf or new <= 0:
            return
        expected = self._now.seconds(new, context)
        if expected > 0:
            seconds = min(max(seconds, expected / _FURTHEST_STEP), expected * _FURTHEST_STEP)
        parts = self._profile * np.array([1.0, new, context])
        self._products = _FORGETS * self._products + np.outer(parts, parts)
        self._seconds = _FORGETS * self._seconds + seconds * parts
        self._squares = _FORGETS * self._squares + seconds * seconds
        self._weight = _FORGETS * self._weight + 1.0
        self._since += 1
        if self._since == _SOLVED_EVERY:
            self._since = 0
            self._solve()

    def _solve(self) -> None:
        prior = _PRIOR_STEPS * self._squares / self._weight
        multiples = np.linalg.solve(self._products + prior * np.eye(3), self._seconds + prior)
        multiples = np.clip(multiples, 1 / _FURTHEST, _FURTHEST)
        self._now = BatchTime(*(float(value) for value in multiples * self._profile))
