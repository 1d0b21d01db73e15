"""Distributions of prompt and output lengths: textbook ones, and those of published workloads."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE, Checked
from rescheduler.simulator.workloads.trace import TraceBlock, block_sizes, lengths_block

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LengthGenerator(Checked, ABC, requests=COUNT):
    """A trace of drawn requests, without arrival times.

    Attributes:
        requests: how many there are.
    """

    name: ClassVar[str]
    has_arrivals: ClassVar[bool] = False

    requests: int = 10_000

    def _section(self) -> str:
        return f"{self.name}: "

    @abstractmethod
    def blocks(self, generator: np.random.Generator) -> Iterator[TraceBlock]:
        """Yield all requests, at most `BLOCK_REQUESTS` at a time."""


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
class GeometricLengths(IndependentLengths, mean_prompt=COUNT, mean_output=COUNT):
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

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        if self.prompts == "uniform":
            prompt = generator.integers(1, 2 * self.mean_prompt, n)
        else:
            prompt = generator.geometric(1 / self.mean_prompt, n)
        return prompt, generator.geometric(1 / self.mean_output, n)


@dataclass(frozen=True, kw_only=True)
class LognormalLengths(
    IndependentLengths,
    prompt_median=COUNT,
    prompt_sigma=NOT_NEGATIVE,
    prompt_max=COUNT,
    output_median=COUNT,
    output_sigma=NOT_NEGATIVE,
    output_max=COUNT,
):
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

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        prompt = lognormal(generator, self.prompt_median, self.prompt_sigma, n)
        output = lognormal(generator, self.output_median, self.output_sigma, n)
        return whole_tokens(prompt, self.prompt_max), whole_tokens(output, self.output_max)


@dataclass(frozen=True, kw_only=True)
class HomogeneousLengths(IndependentLengths, output=COUNT, longest_prompt=COUNT):
    """Outputs that are all alike: only the prompts can be balanced.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), Theorem 1.

    Attributes:
        output: o, tokens of every request.
        longest_prompt: s_max; prompts are uniform on 1 .. s_max.
    """

    name: ClassVar[str] = "homogeneous"

    output: int = 200
    longest_prompt: int = 1000

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


class _Quantiles(NamedTuple):
    """A distribution known by some quantiles.

    Attributes:
        levels: ascending from 0.
        tokens: lengths at those levels; the first is the shortest.
        longest: the model's context, where lengths are cut.
    """

    levels: tuple[float, ...]
    tokens: tuple[float, ...]
    longest: int

    def draw(self, generator: np.random.Generator, n: int) -> IntArray:
        """Draw lengths: log-uniform between quantiles, and past the last an exponential tail.

        The tail decays as it does between the last two quantiles.
        """
        u = generator.random(n)
        length = np.exp(np.interp(u, self.levels, np.log(self.tokens)))
        (before, last), (low, high) = self.levels[-2:], self.tokens[-2:]
        decay = (high - low) / np.log((1 - before) / (1 - last))
        in_tail = u > last
        length[in_tail] = high - decay * np.log((1 - u[in_tail]) / (1 - last))
        return whole_tokens(length, self.longest)


def _of_successes(level: float, failures: int) -> float:
    """Return a level among all requests of BurstGPT_1.csv as one among those with a length."""
    return (level * 1_429_737 - failures) / (1_429_737 - failures)


_BURSTGPT = {
    "all": (
        _Quantiles(
            (0.0, *(_of_successes(level, 25_427) for level in (0.5, 0.75, 0.9, 0.95))),
            (60, 251, 758, 1796, 2461),
            8192,
        ),
        _Quantiles(
            (0.0, *(_of_successes(level, 25_443) for level in (0.5, 0.75, 0.9, 0.95))),
            (1, 34, 134, 272, 460),
            4096,
        ),
    ),
    "gpt4_conversation": (
        _Quantiles((0.0, 0.5, 0.8, 0.95, 0.99), (55, 582, 1427, 2345, 3549), 8192),
        _Quantiles((0.0, 0.5, 0.8, 0.95, 0.99), (22, 243, 434, 669, 964), 4096),
    ),
}


@dataclass(frozen=True, kw_only=True)
class BurstGPTLike(IndependentLengths):
    """Lengths with the published quantiles of BurstGPT, when its files are not at hand.

    BurstGPT (Wang et al. 2024, arXiv:2401.17644) logs ChatGPT and GPT-4 of a regional Azure
    OpenAI service. What is known of the lengths, in tokens:

    - ``all``: of the 1,429,737 rows of BurstGPT_1.csv (SHA-256 46fc9480…), as measured in
      github.com/David-Wu1119/tracebench, configs/trace-calibration.json (403d691): prompts
      P50/P75/P90/P95 = 251/758/1796/2461, 25,427 of them 0; outputs 34/134/272/460, 25,443 of
      them 0 (failures, left out here). Standard deviations of the logarithms 1.13 and 1.82.
    - ``gpt4_conversation``: mean and P50/P80/P95/P99, from Llumnix (Sun et al., OSDI 2024),
      Table 1: prompts 830 and 582/1427/2345/3549; outputs 271 and 243/434/669/964.

    Between these quantiles lengths are log-uniform, past the last one the tail is exponential
    and goes on as between the last two. The shortest length is what meets the deviation of the
    logarithms (``all``) or the mean. Prompt and output are independent here; how they depend on
    each other is not published as numbers. With the files, give their path instead.

    Attributes:
        subset: of the log: ``all`` or ``gpt4_conversation``.
    """

    name: ClassVar[str] = "burstgpt_like"

    subset: Literal["all", "gpt4_conversation"] = "all"

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        prompts, outputs = _BURSTGPT[self.subset]
        return prompts.draw(generator, n), outputs.draw(generator, n)


class _StarModel(NamedTuple):
    """Parameters of `StarLengths`, fitted to STAR's Table 2; see there."""

    p_cap: float
    input_median: float
    input_sigma: float
    mu1: float
    w: float = 0.9542
    sigma1: float = 0.6375
    mu2: float = 10.1805
    sigma2: float = 0.6

    def body(self, generator: np.random.Generator, n: int, longest: int) -> FloatArray:
        """Draw n lengths of requests that end by themselves, each component truncated."""
        first = generator.random(n) < self.w
        mu = np.where(first, self.mu1, self.mu2)
        sigma = np.where(first, self.sigma1, self.sigma2)
        lengths = np.full(n, np.inf)
        while (over := lengths > longest).any():
            lengths[over] = generator.lognormal(mu[over], sigma[over])
        return lengths


_STAR = {
    "sharegpt": _StarModel(0.173, 67.1, 1.6, 7.1192),
    "alpaca": _StarModel(0.2214, 25.0, 0.8, 6.6089),
}


@dataclass(frozen=True, kw_only=True)
class StarLengths(IndependentLengths):
    r"""Outputs of a reasoning model, a sixth of which run into the context's limit.

    .. math:: o = \begin{cases} 32768 - 6 - s & \text{with probability } p_{cap} \\
        X & \text{else} \end{cases} \qquad
        X \sim w\,LN(\mu_1, \sigma_1) + (1 - w)\,LN(\mu_2, \sigma_2)

    with both components truncated at 30,000 tokens, and prompts :math:`s \sim LN(\ln m, \sigma)`,
    also where the limit is not met, of which nothing is published. Fitted to STAR (Wang et al.
    2026), Table 2, of DeepSeek-R1-Distill-Qwen-7B: to ShareGPT's mean, standard deviation, P50,
    P90 and shares below 1K and above 30K, and to Alpaca's mean and P50. Alpaca's shape is an
    assumption: ShareGPT's with another :math:`\mu_1` and :math:`p_{cap}`.

    Attributes:
        dataset: ``sharegpt`` or ``alpaca``.
    """

    name: ClassVar[str] = "star"

    dataset: Literal["sharegpt", "alpaca"] = "sharegpt"

    CONTEXT: ClassVar[int] = 32_768
    TEMPLATE: ClassVar[int] = 6
    BODY_MAX: ClassVar[int] = 30_000

    def draw(self, generator: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output tokens of n requests, [n] each."""
        model, room = _STAR[self.dataset], self.CONTEXT - self.TEMPLATE
        inputs = lognormal(generator, model.input_median, model.input_sigma, n)
        prompt = whole_tokens(inputs, room - 1)
        body = model.body(generator, n, self.BODY_MAX)
        at_limit = generator.random(n) < model.p_cap
        output = np.where(at_limit, room - prompt, whole_tokens(body, self.BODY_MAX))
        return prompt, np.minimum(output, room - prompt)


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
