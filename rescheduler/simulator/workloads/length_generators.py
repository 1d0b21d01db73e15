"""Distributions of prompt and output lengths: what they share, and the textbook ones."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rescheduler.simulator.workloads.trace import TraceBlock, block_sizes, lengths_block

__all__ = [
    "GeometricLengths",
    "HomogeneousLengths",
    "IndependentLengths",
    "LengthGenerator",
    "LognormalLengths",
    "lognormal",
    "whole_tokens",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LengthGenerator(ABC):
    """A trace of drawn requests, without arrival times.

    Attributes:
        requests: how many there are.

    Raises:
        ValueError: an option that describes no lengths.
    """

    name: ClassVar[str]
    has_arrivals: ClassVar[bool] = False

    requests: int = 10_000

    def __post_init__(self) -> None:
        """Refuse an option that describes no lengths."""
        self.at_least(1, "requests")

    @abstractmethod
    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield all requests, at most `BLOCK_REQUESTS` at a time."""

    def at_least(self, least: float, *options: str) -> None:
        """Refuse options that are not numbers of their kind, below a bound, or not finite.

        Raises:
            ValueError: names the option.
        """
        kinds = {field.name: field.type for field in fields(self)}
        for option in options:
            value: Any = getattr(self, option)
            whole = kinds[option] is int
            if not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{self.name}: {option} must be {kind}, not {value!r}")
            if not least <= value < np.inf:
                raise ValueError(f"{self.name}: {option} must be at least {least}, not {value}")


class IndependentLengths(LengthGenerator):
    """A trace whose requests are drawn one like the other."""

    @abstractmethod
    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield all requests, at most `BLOCK_REQUESTS` at a time."""
        for size in block_sizes(self.requests):
            yield lengths_block(*self.draw(generator, size))


@dataclass(frozen=True, kw_only=True)
class GeometricLengths(IndependentLengths):
    r"""Outputs that end with the same probability at every token.

    .. math:: P(o = n) = p (1 - p)^{n - 1}, \qquad p = 1 / \text{mean\_output}

    Source: A Universal Load Balancing Principle (Chen et al. 2026), Theorem 2, where prompts come
    from any bounded distribution.

    Attributes:
        mean_prompt: in tokens.
        mean_output: in tokens.
        prompts: ``uniform`` on 1 .. 2·mean_prompt - 1, or ``geometric``.
    """

    name: ClassVar[str] = "geometric"

    mean_prompt: int = 500
    mean_output: float = 200.0
    prompts: Literal["uniform", "geometric"] = "uniform"

    def __post_init__(self) -> None:
        """Refuse lengths below one token, and an unknown distribution."""
        super().__post_init__()
        self.at_least(1, "mean_prompt", "mean_output")
        if self.prompts not in ("uniform", "geometric"):
            raise ValueError(f"geometric: prompts is uniform or geometric, not {self.prompts!r}")

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        if self.prompts == "uniform":
            prompt = generator.integers(1, 2 * self.mean_prompt, n)
        else:
            prompt = generator.geometric(1 / self.mean_prompt, n)
        return prompt, generator.geometric(1 / self.mean_output, n)


@dataclass(frozen=True, kw_only=True)
class LognormalLengths(IndependentLengths):
    """Prompts and outputs from log-normal distributions, cut as a ``max_tokens`` would.

    Attributes:
        prompt_median: in tokens.
        prompt_sigma: standard deviation of the logarithm.
        prompt_max: longer prompts have this length.
        output_median: in tokens.
        output_sigma: standard deviation of the logarithm.
        output_max: longer outputs are cut here.
    """

    name: ClassVar[str] = "lognormal"

    prompt_median: float = 300.0
    prompt_sigma: float = 1.0
    prompt_max: int = 8192
    output_median: float = 150.0
    output_sigma: float = 1.0
    output_max: int = 4096

    def __post_init__(self) -> None:
        """Refuse lengths below one token and negative spreads."""
        super().__post_init__()
        self.at_least(1, "prompt_median", "prompt_max", "output_median", "output_max")
        self.at_least(0, "prompt_sigma", "output_sigma")

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        prompt = lognormal(generator, self.prompt_median, self.prompt_sigma, n)
        output = lognormal(generator, self.output_median, self.output_sigma, n)
        return whole_tokens(prompt, self.prompt_max), whole_tokens(output, self.output_max)


@dataclass(frozen=True, kw_only=True)
class HomogeneousLengths(IndependentLengths):
    """Outputs that are all alike: only the prompts can be balanced.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), Theorem 1.

    Attributes:
        output: o, tokens of every request.
        longest_prompt: s_max; prompts are uniform on 1 .. s_max.
    """

    name: ClassVar[str] = "homogeneous"

    output: int = 200
    longest_prompt: int = 1000

    def __post_init__(self) -> None:
        """Refuse lengths below one token."""
        super().__post_init__()
        self.at_least(1, "output", "longest_prompt")

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        prompt = generator.integers(1, self.longest_prompt + 1, n)
        return prompt, np.full(n, self.output)


def lognormal(generator: np.random.Generator, median: float, sigma: float, n: int) -> FloatArray:
    """Draw n numbers whose logarithm is normal with the given deviation, [n]."""
    return generator.lognormal(np.log(median), sigma, n)


def whole_tokens(lengths: FloatArray, longest: int) -> IntArray:
    """Return lengths rounded up to whole tokens, at least 1 and at most ``longest``, [n]."""
    return np.clip(np.ceil(lengths), 1, longest).astype(np.int64)
