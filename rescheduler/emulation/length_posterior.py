"""What is expected of scripted lengths, by their law and by what was seen of them."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw
from scipy.special import ndtr

from rescheduler.emulation.emulate_options import AnswerLengths, ForecastQuality
from rescheduler.emulation.scripted_answers import LENGTH, SEED, standard_normal

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

    with f the law's density, cut at its longest, n the tokens ``generated`` [n_requests], and y
    what was ``observed`` of :math:`\log r` [n_requests], with an error of ``sigma`` above 0.
    ``edges`` [n_edges] are tokens, the result is [n_requests, n_edges]. It is calibrated: the curve
    of a request is right as often as it says.
    """
    n = np.asarray(generated, dtype=np.float64)[:, None]
    y = np.asarray(observed, dtype=np.float64)[:, None]
    # Cells of the remaining length, [n_points + 1], each with the law's probability.
    ends = np.r_[0.5, np.geomspace(1.5, law.longest + 1.5, _POINTS)]
    widths = np.diff(np.log(ends))
    whole = n + ends[None, :]
    below = ndtr((np.log(whole) - np.log(law.median)) / law.sigma)
    below[whole >= law.longest] = 1.0
    # What the law thinks impossible is only very unlikely: clients may state other lengths.
    prior = np.diff(below, axis=1) + 1e-12 * widths
    # The mean likelihood of a cell, which may be wider than the error.
    up_to = ndtr((np.log(ends)[None, :] - y) / max(sigma, _LEAST_SIGMA))
    weight = prior * (np.diff(up_to, axis=1) / widths + 1e-12)
    weight /= weight.sum(axis=1, keepdims=True)
    reached = np.c_[np.zeros(len(n)), np.cumsum(weight, axis=1)]
    below_edge = [np.interp(edges, ends, row, left=0.0, right=1.0) for row in reached]
    return np.clip(1.0 - np.array(below_edge), 0.0, 1.0)  # a sum of shares may exceed 1


_PROMPT_POINTS = 96
_xargs = msgspec.json.Decoder(dict[str, Any])


class EmulatedPrompts:
    """What a predictor that reads prompts would expect of requests that state their lengths."""

    def __init__(self, law: AnswerLengths, quality: ForecastQuality) -> None:
        self._law, self._quality = law, quality
        self._seen = 0
        self._edges = np.unique(
            np.round(np.r_[0.0, np.geomspace(1.0, law.longest, _PROMPT_POINTS)])
        )

    def expected_tokens(self, body: Mapping[str, Raw], most: int | None) -> int | None:
        """Return the tokens expected of an answer, at most so many; None: it states no length."""
        try:
            arguments = _xargs.decode(body["vllm_xargs"])
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        length = arguments.get(LENGTH)
        if isinstance(length, float) and length.is_integer():
            length = int(length)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 < length < 1 << 31:
            return None
        if bytes(body.get("ignore_eos", b"")) == b"true":
            length = max(length, most or length)
        quality, limit = self._quality, min(most or self._law.longest, self._law.longest)
        if quality.sigma == 0:
            return min(length, most or length)
        self._seen += 1
        key = arguments.get(SEED, f"request {self._seen}")
        z = standard_normal(f"prompt {quality.seed} {key} {length}")
        observed = np.log(length) + quality.sigma * z
        edges = np.minimum(self._edges, limit)
        survival = posterior_survival(self._law, quality.sigma, [0], [observed], edges)[0]
        heights = (survival[1:] + survival[:-1]) / 2
        return max(1, round(float((heights * np.diff(edges)).sum())))
