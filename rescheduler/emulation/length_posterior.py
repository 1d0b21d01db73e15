"""What is expected of a remaining length, by its law and by what was seen of it."""

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from rescheduler.emulation.emulate_options import AnswerLengths

__all__ = ["forecast_edges", "posterior_survival"]

FloatArray = npt.NDArray[np.float64]

_EDGES, _POINTS = 24, 160
_LEAST_SIGMA = 1e-6


def forecast_edges(law: AnswerLengths) -> FloatArray:
    """Return the grid of curves for lengths of a law: [n_edges] tokens, from 0."""
    first = min(20.0, law.longest / 2)
    return np.unique(np.r_[0.0, np.round(np.geomspace(first, law.longest, _EDGES))])


def posterior_survival(
    law: AnswerLengths,
    sigma: float,
    generated: npt.ArrayLike,
    observed: npt.ArrayLike,
    edges: FloatArray,
) -> FloatArray:
    r"""Return P(remaining > edge) of whoever knows the law, and has seen the remaining length.

    .. math:: p(r \mid y) \propto f(n + r)\, e^{-(y - \log r)^2 / 2\sigma^2}

    with f the law's density, n the tokens generated, and y what was seen of :math:`\log r`. It is
    calibrated: the curve of a request is right as often as it says.

    Args:
        law: of whole answers.
        sigma: of the error in the observation; above 0.
        generated: [n_requests] tokens.
        observed: [n_requests] :math:`\log r + \sigma z`.
        edges: [n_edges] tokens.

    Returns:
        [n_requests, n_edges].
    """
    n = np.asarray(generated, dtype=np.float64)[:, None]
    y = np.asarray(observed, dtype=np.float64)[:, None]
    # Cells of the remaining length, [n_points + 1], each with the law's probability.
    ends = np.r_[0.5, np.geomspace(1.5, law.longest + 1.5, _POINTS)]
    widths = np.diff(np.log(ends))
    below = ndtr((np.log(n + ends[None, :]) - np.log(law.median)) / law.sigma)
    # What the law thinks impossible is only very unlikely: clients may state other lengths.
    prior = np.diff(below, axis=1) + 1e-12 * widths
    # The mean likelihood of a cell, which may be wider than the error.
    up_to = ndtr((np.log(ends)[None, :] - y) / max(sigma, _LEAST_SIGMA))
    weight = prior * (np.diff(up_to, axis=1) / widths + 1e-12)
    weight /= weight.sum(axis=1, keepdims=True)
    reached = np.c_[np.zeros(len(n)), np.cumsum(weight, axis=1)]
    return np.array([1.0 - np.interp(edges, ends, row, left=0.0, right=1.0) for row in reached])
