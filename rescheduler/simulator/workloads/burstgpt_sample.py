"""Lengths like those of the BurstGPT sample that the authors of BF-IO released."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from rescheduler.simulator.workloads.length_generators import IndependentLengths

__all__ = ["BurstGPTSample"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class _Lengths(NamedTuple):
    """A distribution known by its quartiles, mean, deviation and extremes.

    Attributes:
        levels: ascending from 0 to 0.75.
        tokens: lengths at those levels, linear in between.
        tail_mu: mean logarithm of what a length above the third quartile has beyond it.
        tail_sigma: deviation of that logarithm.
        shortest: in tokens.
        longest: in tokens.
    """

    levels: tuple[float, ...]
    tokens: tuple[float, ...]
    tail_mu: float
    tail_sigma: float
    shortest: int
    longest: int

    def at(self, level: FloatArray) -> IntArray:
        """Return the lengths at some levels in (0, 1), [n]."""
        body = np.interp(level, self.levels, self.tokens)
        last = self.levels[-1]
        in_tail = np.clip((level - last) / (1 - last), 1e-12, 1 - 1e-12)
        tail = self.tokens[-1] + np.exp(self.tail_mu + self.tail_sigma * ndtri(in_tail))
        lengths = np.where(level > last, tail, body)
        tokens: IntArray = np.rint(lengths).astype(np.int64)
        return tokens.clip(self.shortest, self.longest)


_PROMPTS = _Lengths(
    levels=(0.0, 0.05, 0.25, 0.5, 0.75),
    tokens=(30, 80, 188, 217, 292),
    tail_mu=5.915,
    tail_sigma=0.99,
    shortest=9,
    longest=14_117,
)
_OUTPUTS = _Lengths(
    levels=(0.0, 0.06, 0.12, 0.13, 0.58, 0.6, 0.75),
    tokens=(1, 1, 6, 7, 7, 14, 33),
    tail_mu=4.49,
    tail_sigma=1.115,
    shortest=1,
    longest=3206,
)
_COPULA = 0.54


@dataclass(frozen=True, kw_only=True)
class BurstGPTSample(IndependentLengths):
    """Many short calls and a few long conversations, prompt and output correlated.

    The file ``burst_data_8000.json`` that BF-IO's authors released with their simulator says
    of its own 8,000 requests: prompts of mean 363, deviation 502,
    quartiles 188/217/292, from 9 to 14,117; outputs of mean 57, deviation 154, quartiles 7/7/33,
    from 1 to 3,206; correlation 0.367. Of its first few hundred rows about half generate exactly
    7 tokens.

    Below the third quartile lengths are linear between these quantiles; above it a log-normal
    excess meets the mean and the deviation. A Gaussian copula of 0.54 gives the correlation. With
    the file's lengths as a CSV of input_tokens,output_tokens, give its path instead.

    Source: github.com/Echoscd/Load-Balancing-Release (54539d6), the file's ``statistics``.
    """

    name: ClassVar[str] = "burstgpt_sample"

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        prompt, other = generator.standard_normal((2, n))
        output = _COPULA * prompt + np.sqrt(1 - _COPULA**2) * other
        return _PROMPTS.at(ndtr(prompt)), _OUTPUTS.at(ndtr(output))
