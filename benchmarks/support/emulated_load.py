"""Loads of drawn requests for emulated engines."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rescheduler.demo.scripted_load import EmulatedRequest
from rescheduler.emulation.emulate_options import AnswerLengths


class PromptLengths(NamedTuple):
    """Prompts of so many tokens, uniform in their logarithm."""

    shortest: int
    longest: int


def drawn_load(
    number: int, requests: int, rate: float, prompts: PromptLengths, law: AnswerLengths
) -> list[EmulatedRequest]:
    """Return a round's requests, a Poisson process; at an infinite rate all come at once.

    A round draws lengths and gaps of its own, the same every time; a rate only stretches its gaps.
    """
    generator = np.random.default_rng(number)
    gaps = generator.exponential(size=requests) / rate
    low, high = np.log(prompts.shortest), np.log(prompts.longest)
    prompt = np.exp(generator.uniform(low, high, requests)).astype(int)
    answer = law.median * np.exp(law.sigma * generator.standard_normal(requests))
    answer = np.clip(np.round(answer), 2, law.longest).astype(int)
    seeds = number * 1_000_000 + np.arange(requests)
    columns = (seeds.tolist(), prompt.tolist(), answer.tolist(), np.cumsum(gaps).tolist())
    return [EmulatedRequest(*row) for row in zip(*columns, strict=True)]


def steady_rate(ended: Iterable[float]) -> float:
    """Return how many of a load that came at once ended in a second, in its steady part."""
    times = np.sort(list(ended))
    low, high = int(0.2 * len(times)), int(0.7 * len(times))
    return float((high - low) / (times[high] - times[low]))
