"""Fitting the time of a step to steps that were measured."""

import numpy as np
import numpy.typing as npt

from rescheduler.step_time.profile import BatchTime, FitQuality, Gradients

__all__ = ["Recalibration", "fit_batch_time", "fit_gradients", "fit_quality", "typical_steps"]


FloatArray = npt.NDArray[np.float64]


def typical_steps(steps: FloatArray) -> FloatArray:
    """Return the median seconds of all steps with the same tokens, [m, 3].

    A pause of the system in one of them does not count then. Steps whose context alone differs by
    less than a twentieth count as the same: it grows by the batch with every token.

    Args:
        steps: [n, 3] new tokens, context tokens, seconds.
    """
    cell = np.column_stack([steps[:, 0], np.rint(20 * np.log(np.maximum(steps[:, 1], 1.0)))])
    _, group = np.unique(cell, axis=0, return_inverse=True)
    group = group.ravel()
    return np.array([np.median(steps[group == i], axis=0) for i in range(group.max() + 1)])


def fit_batch_time(steps: FloatArray) -> BatchTime:
    """Return a, b and c, none below 0, with the least squared relative error.

    Relative, because a long prefill would else decide alone, and the decode steps, which are a
    thousand times as many, would be off by half.

    Args:
        steps: [n, 3] new tokens, context tokens, seconds.

    Raises:
        ValueError: fewer than three steps, or they do not separate the parts.
    """
    if len(steps) < 3 or (np.ptp(steps[:, :2], axis=0) == 0).any():
        raise ValueError(
            f"{len(steps)} steps of {len(np.unique(steps[:, :2], axis=0))} kinds do not separate "
            "the cost of a token from that of its context"
        )
    return BatchTime(*_relative_nnls(steps[:, :2], steps[:, 2]))


def fit_quality(steps: FloatArray, batch: BatchTime) -> FitQuality:
    """Return how well a fit says the seconds of steps [n, 3]."""
    seconds = steps[:, 2]
    estimate = batch.constant + steps[:, 0] * batch.per_new + steps[:, 1] * batch.per_context
    a, b = _relative_nnls(steps[:, :1], seconds)
    without = np.abs(a + b * steps[:, 0] - seconds) / seconds
    error = np.abs(estimate - seconds) / seconds
    return FitQuality(
        steps=len(steps),
        error_p50=float(np.median(error)),
        error_p95=float(np.quantile(error, 0.95)),
        new_only_error_p50=float(np.median(without)),
        r2=float(1 - ((estimate - seconds) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()),
    )


def fit_gradients(steps: FloatArray, most_decodes: int) -> Gradients:
    """Return the slopes of prefill and decode steps, which are distinguished by their tokens.

    A step whose tokens are all its context computes whole prompts; one with at most
    ``most_decodes`` tokens, and more context, decodes.

    Raises:
        ValueError: there are not two different steps of each.
    """
    new, context, seconds = steps.T
    prefill, decode = new == context, (new <= most_decodes) & (context > new)
    for kind, name in ((prefill, "prefill"), (decode, "decode")):
        if len(np.unique(context[kind])) < 2:
            raise ValueError(f"the steps hold no two different {name} steps")
    _, prompt = _relative_nnls(new[prefill, None], seconds[prefill])
    _, reading = _relative_nnls(context[decode, None], seconds[decode])
    return Gradients(prompt=prompt, decode=reading)


def _relative_nnls(columns: FloatArray, seconds: FloatArray) -> list[float]:
    """Return an offset and a slope of each column, none below 0."""
    from scipy.optimize import nnls  # not for engines, which only recalibrate

    scale = np.maximum(columns.max(axis=0), 1.0)
    design = np.column_stack([np.ones(len(columns)), columns / scale]) / seconds[:, None]
    found = nnls(design, np.ones(len(seconds)))[0] / np.concatenate([[1.0], scale])
    return [float(value) for value in found]


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
