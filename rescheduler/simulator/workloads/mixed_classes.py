"""Light and heavy requests, in the orders of arrival that paper 001 compares."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rescheduler.simulator.workloads.length_generators import LengthGenerator
from rescheduler.simulator.workloads.trace import TraceBlock, block_sizes, lengths_block

__all__ = ["MixedClasses"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MixedClasses(LengthGenerator):
    """Light and heavy prompts and decodes, in the four orders of arrival of paper 001's Table 1.

    A decode is heavy from 5 s on: 250 tokens at the 0.02 s that a decode batch of Llama-2-7B
    takes on a V100 at least. A prompt is heavy from 0.5 s on, which at 3.2e-4 s a token would be
    1,563 tokens; but the paper's prompts end at 1,000 (C.5), it calls 1,024 tokens possibly heavy
    on that GPU, and 750 prompts of 1,563 tokens an instance would fill 375 s of the 425 s that
    its third scenario takes in all. So the upper half of the range counts as heavy here. Lengths
    are uniform within a class; the ranges are not published.

    The classes come in exactly equal numbers, so that scenarios differ in the order alone.

    Source: Performance Aware LLM Load Balancer for Mixed Workloads (Jain et al. 2025), §3.

    Attributes:
        scenario: ``lh_hl_random`` (light prompts with heavy decodes, and the reverse, mixed),
            ``random`` (all four classes, mixed), ``lh_then_hl``, or ``hl_then_lh``.
        heavy_prompt: tokens from which a prompt is heavy.
        heavy_decode: tokens from which a decode is heavy.
        shortest: tokens of the shortest prompt and decode.
        longest: tokens of the longest prompt and decode.
    """

    name: ClassVar[str] = "mixed_classes"

    requests: int = 3000
    scenario: Literal["lh_hl_random", "random", "lh_then_hl", "hl_then_lh"] = "lh_hl_random"
    heavy_prompt: int = 500
    heavy_decode: int = 250
    shortest: int = 10
    longest: int = 1000

    def __post_init__(self) -> None:
        """Refuse an unknown scenario and empty ranges."""
        super().__post_init__()
        self.at_least(1, "shortest")
        if self.scenario not in _SCENARIOS:
            raise ValueError(
                f"mixed_classes: scenario is one of {', '.join(_SCENARIOS)}, not {self.scenario!r}"
            )
        for option in ("heavy_prompt", "heavy_decode"):
            if not self.shortest < getattr(self, option) <= self.longest:
                raise ValueError(
                    f"mixed_classes: {option} must lie above {self.shortest} and at most at "
                    f"{self.longest}, not at {getattr(self, option)}"
                )

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield all requests, at most `BLOCK_REQUESTS` at a time."""
        classes, mixed = _SCENARIOS[self.scenario]
        share, rest = divmod(self.requests, len(classes))
        left = np.full(len(classes), share) + (np.arange(len(classes)) < rest)
        for size in block_sizes(self.requests):
            if mixed:
                here = generator.multivariate_hypergeometric(left, size)
                order = generator.permutation(np.repeat(classes, here))
            else:
                here = np.minimum(left, np.maximum(size - np.cumsum(left) + left, 0))
                order = np.repeat(classes, here)
            left = left - here
            yield lengths_block(*self._of_classes(generator, order))

    def _of_classes(
        self, generator: np.random.Generator, classes: IntArray
    ) -> tuple[IntArray, IntArray]:
        lengths = []
        for heavy, from_ in ((classes & 2, self.heavy_prompt), (classes & 1, self.heavy_decode)):
            low = np.where(heavy, from_, self.shortest)
            high = np.where(heavy, self.longest + 1, from_)
            lengths.append(generator.integers(low, high))
        return lengths[0], lengths[1]


_LL, _LH, _HL, _HH = 0, 1, 2, 3
_SCENARIOS = {
    "lh_hl_random": ((_LH, _HL), True),
    "random": ((_LL, _LH, _HL, _HH), True),
    "lh_then_hl": ((_LH, _HL), False),
    "hl_then_lh": ((_HL, _LH), False),
}
"""Classes (prompt, then decode; light or heavy) in order of arrival, and whether mixed."""
