"""Requests like those of paper 001: five tasks with lengths of their own, whose mix may drift."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from rescheduler.cluster.registry import COUNT
from rescheduler.simulator.workloads.length_generators import LengthGenerator, whole_tokens
from rescheduler.simulator.workloads.trace import TraceBlock, block_sizes, lengths_block

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_HEAVY_DECODE = 125.0
"""Tokens from which a decode of `FiveTasks` is heavy."""
_PROMPT_SIGMA = 0.6
"""Standard deviation of the logarithm of a task's prompts."""
_LONGEST_PROMPT = 1000
"""Longer prompts of `FiveTasks` have this length."""


class LengthsOfATask(NamedTuple):
    """What Table 3 says of a task.

    Attributes:
        samples: how many requests it has in the paper's dataset.
        mean_prompt: tokens.
        mean_output: tokens.
        heavy: share of outputs whose decode is heavy.
    """

    samples: int
    mean_prompt: float
    mean_output: float
    heavy: float

    def output_lognormal(self) -> tuple[float, float]:
        r"""Return μ and σ of the log-normal with that mean and that share of heavy decodes.

        .. math:: \mu + \tfrac12 \sigma^2 = \ln m, \qquad \mu - z \sigma = \ln h, \qquad
                  \sigma = -z - \operatorname{sgn}(\ln \tfrac hm) \sqrt{z^2 - 2 \ln \tfrac hm}

        with :math:`z` the normal quantile of the share; of two solutions the narrower.
        """
        z, apart = ndtri(self.heavy), np.log(_HEAVY_DECODE / self.mean_output)
        sigma = -z - (1.0 if apart > 0 else -1.0) * np.sqrt(z * z - 2 * apart)
        return float(np.log(self.mean_output) - sigma * sigma / 2), float(sigma)


TASKS = {
    "translation": LengthsOfATask(7351, 29.09, 61.76, 0.0918),
    "qna": LengthsOfATask(6988, 29.83, 334.40, 0.5818),
    "sentiment": LengthsOfATask(6564, 211.54, 142.53, 0.4101),
    "in_context_qna": LengthsOfATask(7122, 125.16, 220.02, 0.4795),
    "entities": LengthsOfATask(3304, 26.41, 64.10, 0.0871),
}
"""Table 3: Books, ELI5, IMDb, SQuAD and WNUT, with Llama-2-7B's answers."""


@dataclass(frozen=True, kw_only=True)
class FiveTasks(LengthGenerator, longest=COUNT):
    """Requests of five tasks, as Table 3 of paper 001 counts them.

    Outputs are log-normal with the mean and the share of heavy decodes that the table has of their
    task. A decode is heavy there from 5 s of estimated time on, at an average batch time which is
    not published. At 250 tokens (0.02 s a batch, its minimum) no log-normal has sentiment's mean
    and share, nor translation's; up to 146 tokens all five exist, and 125 are 0.04 s a batch.
    Of prompts only the means are known: log-normal here, cut at 1,000 (C.5).

    Source: Performance Aware LLM Load Balancer for Mixed Workloads (Jain et al. 2025), Table 3.

    Attributes:
        shares: of the tasks, in the order of `TASKS`; the table's when None. Need not sum to 1.
        drift_to: shares at the end of the trace, reached linearly; None for a mix that stays.
        longest: tokens of the model's context, at which outputs are cut.
    """

    name: ClassVar[str] = "five_tasks"

    requests: int = 2000
    shares: tuple[float, ...] | None = None
    drift_to: tuple[float, ...] | None = None
    longest: int = 4096

    def __post_init__(self) -> None:
        """Refuse shares that are none, and a context that prompts fill."""
        super().__post_init__()
        for option in ("shares", "drift_to"):
            given = getattr(self, option)
            if given is not None and (
                len(given) != len(TASKS) or min(given) < 0 or not sum(given) > 0
            ):
                raise ValueError(
                    f"five_tasks: {option} are {len(TASKS)} numbers from 0, one for each of "
                    f"{', '.join(TASKS)}, not {list(given)}"
                )
        if self.longest <= _LONGEST_PROMPT:
            raise ValueError(f"five_tasks: longest must exceed {_LONGEST_PROMPT}")

    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield all requests, at most `BLOCK_REQUESTS` at a time."""
        first = _normalised(self.shares or [task.samples for task in TASKS.values()])
        last = first if self.drift_to is None else _normalised(self.drift_to)
        mean_prompt = np.array([task.mean_prompt for task in TASKS.values()])
        mu, sigma = np.array([task.output_lognormal() for task in TASKS.values()]).T
        drawn = 0
        for size in block_sizes(self.requests):
            along = (drawn + np.arange(size)) / max(self.requests - 1, 1)
            drawn += size
            upto = np.cumsum(first + along[:, None] * (last - first), axis=1)
            task = (generator.random(size)[:, None] > upto[:, :-1]).sum(axis=1)
            prompt_mu = np.log(mean_prompt[task]) - _PROMPT_SIGMA**2 / 2
            prompt = whole_tokens(generator.lognormal(prompt_mu, _PROMPT_SIGMA), _LONGEST_PROMPT)
            output = np.ceil(generator.lognormal(mu[task], sigma[task])).astype(np.int64)
            yield lengths_block(prompt, np.clip(output, 1, self.longest - prompt))


def _normalised(shares: object) -> FloatArray:
    numbers = np.array(shares, dtype=np.float64)
    normalised: FloatArray = numbers / numbers.sum()
    return normalised


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
    """

    name: ClassVar[str] = "mixed_classes"

    requests: int = 3000
    scenario: Literal["lh_hl_random", "random", "lh_then_hl", "hl_then_lh"] = "lh_hl_random"

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
            prompt = _uniform(generator, order & 2, _MIXED_HEAVY_PROMPT)
            yield lengths_block(prompt, _uniform(generator, order & 1, _MIXED_HEAVY_DECODE))


def _uniform(generator: np.random.Generator, heavy: IntArray, heavy_from: int) -> IntArray:
    low = np.where(heavy, heavy_from, _SHORTEST)
    return generator.integers(low, np.where(heavy, _LONGEST + 1, heavy_from))


_MIXED_HEAVY_PROMPT, _MIXED_HEAVY_DECODE = 500, 250
"""Tokens from which a prompt and a decode of `MixedClasses` are heavy."""
_SHORTEST, _LONGEST = 10, 1000
"""Tokens of their shortest and of their longest one."""
_LL, _LH, _HL, _HH = 0, 1, 2, 3
_SCENARIOS = {
    "lh_hl_random": ((_LH, _HL), True),
    "random": ((_LL, _LH, _HL, _HH), True),
    "lh_then_hl": ((_LH, _HL), False),
    "hl_then_lh": ((_HL, _LH), False),
}
"""Classes (prompt, then decode; light or heavy) in order of arrival, and whether mixed."""
