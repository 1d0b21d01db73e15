"""A load for emulated engines: scripted answers, what clients saw, and how true steps were."""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from rescheduler.demo.demo_load import load_session, read_stream
from rescheduler.emulation.scripted_answers import LARGEST, LENGTH, SEED, scripted_token

FIRST_WORD, WORDS = 1_000, 1_024
MAX_TOKENS = 8_192
TTFT_S, TPOT_S = 2.0, 0.05
"""Objectives, in seconds of the emulated engines."""


@dataclass(frozen=True)
class EmulatedRequest:
    """A request of a load, and when it arrives, in seconds of the emulated engines."""

    seed: int
    prompt_tokens: int
    answer_tokens: int
    arrives: float


@dataclass
class EmulatedAnswer:
    """What a client saw; times are real seconds on the monotonic clock."""

    request: EmulatedRequest
    sent: float = 0.0
    first: float = inf
    last: float = inf
    longest_gap: float = 0.0
    tokens: int = 0
    text: str = ""
    error: str = ""


async def serve_load(
    url: str,
    model: str,
    load: Sequence[EmulatedRequest],
    dilation: float,
    salt: int,
    max_tokens: int = MAX_TOKENS,
    until: float = inf,
) -> list[EmulatedAnswer]:
    """Send a load to a server as `serve_answers` does, and return what was answered."""
    answers = [EmulatedAnswer(request) for request in load]
    await serve_answers(url, model, answers, dilation, salt, max_tokens, until)
    return answers


async def serve_answers(
    url: str,
    model: str,
    answers: Sequence[EmulatedAnswer],
    dilation: float,
    salt: int,
    max_tokens: int,
    until: float = inf,
) -> None:
    """Send requests to a server, each when its time comes, and wait for all answers.

    The salt keeps engines from finding prompts of other runs in their caches. What has not ended
    ``until`` a time of the emulated engines is given up, and has no tokens.
    """
    started = time.monotonic()

    async def serve_all(session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as group:
            for answer in sorted(answers, key=lambda one: one.request.arrives):
                due = started + dilation * answer.request.arrives
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(_serve(session, url, model, answer, salt, max_tokens))

    async with load_session() as session:
        with suppress(TimeoutError):
            await asyncio.wait_for(serve_all(session), None if until == inf else dilation * until)


def asked_body(model: str, request: EmulatedRequest, salt: int, max_tokens: int) -> dict[str, Any]:
    """Return what a server is asked for a request."""
    words = np.random.default_rng((salt, request.seed)).integers(0, WORDS, request.prompt_tokens)
    return {
        "model": model,
        "prompt": (FIRST_WORD + words).tolist(),
        "max_tokens": max_tokens,
        "ignore_eos": False,
        "temperature": 0,
        "vllm_xargs": {LENGTH: request.answer_tokens, SEED: request.seed},
    }


async def _serve(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    answer: EmulatedAnswer,
    salt: int,
    max_tokens: int,
) -> None:
    body = asked_body(model, answer.request, salt, max_tokens)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    key = os.environ.get("VLLM_API_KEY")  # engines that are started here ask for it
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer.sent = time.monotonic()
    pieces, tokens = [], 0

    def take(chunk: dict[str, Any]) -> None:
        nonlocal tokens
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        if not chunk.get("choices"):
            return
        now = time.monotonic()
        pieces.append(chunk["choices"][0]["text"])
        if answer.first == inf:
            answer.first = now
        else:
            answer.longest_gap = max(answer.longest_gap, now - answer.last)
        answer.last = now

    answer.error = await read_stream(session, f"{url}/v1/completions", body, headers, take)
    answer.text, answer.tokens = "".join(pieces), tokens
    if not answer.tokens and not answer.error:
        answer.error = "the stream ended before its request"


def changed_answers(answers: Sequence[EmulatedAnswer], model: Path) -> int:
    """Return how many answers that came are not their script: cut, doubled, or of another one.

    Raises:
        ValueError: a seed that engines refuse.
    """
    largest = max((answer.request.seed for answer in answers), default=0)
    if largest >= LARGEST:
        raise ValueError(f"engines refuse seeds of {LARGEST} or more, and one is {largest}")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    changed = 0
    for answer in answers:
        if answer.error:
            continue
        seed, length = answer.request.seed, answer.request.answer_tokens
        ids = [scripted_token(seed, n, vocabulary) for n in range(length - 1)]
        # Decoded at once, some tokenizers leave out the space that a stream begins with.
        same = answer.text.lstrip() == tokenizer.decode(ids).lstrip()
        changed += answer.tokens != length or not same
    return changed


def answer_figures(
    answers: Sequence[EmulatedAnswer],
    dilation: float,
    ttft_s: float = TTFT_S,
    tpot_s: float = TPOT_S,
) -> dict[str, float]:
    """Return latencies of a load in seconds of the emulated engines."""
    good = [one for one in answers if not one.error]
    ttft = np.array([one.first - one.sent for one in good]) / dilation
    latency = np.array([one.last - one.sent for one in good]) / dilation
    several = [one for one in good if one.tokens > 1] or good
    tpot = np.array([_tpot(one, dilation) for one in several])
    gap = np.array([one.longest_gap for one in several]) / dilation
    begun = min(one.sent for one in answers)
    seconds = (max(one.last for one in good) - begun) / dilation
    met = [(ttft[i] <= ttft_s) and _tpot(one, dilation) <= tpot_s for i, one in enumerate(good)]
    return {
        "requests": float(len(answers)),
        "failed": float(len(answers) - len(good)),
        "seconds": seconds,
        "tokens_per_s": sum(one.tokens for one in good) / seconds,
        "goodput": float(np.sum(met)) / seconds,
        "met": float(np.sum(met)) / len(answers),
        "latency": float(latency.mean()),
        "latency_p50": float(np.median(latency)),
        "latency_p99": float(np.quantile(latency, 0.99)),
        "ttft": float(ttft.mean()),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "tpot": float(tpot.mean()),
        "tpot_p99": float(np.quantile(tpot, 0.99)),
        "gap_p99": float(np.quantile(gap, 0.99)),
    }


def _tpot(one: EmulatedAnswer, dilation: float) -> float:
    return (one.last - one.first) / max(1, one.tokens - 1) / dilation


class StepSums(NamedTuple):
    """Seconds that the steps of a time should have taken, took and were off, and their number."""

    asked: float
    real: float
    off: float
    steps: int

    @property
    def excess(self) -> float:
        """Return the share of time beyond that of the emulated engines."""
        return self.real / self.asked - 1 if self.asked else 0.0

    @property
    def jitter(self) -> float:
        """Return the mean distance of a step's time from the one asked for, relative to it."""
        return self.off / self.asked if self.asked else 0.0


def step_sums(logs: Sequence[Path], since: float) -> StepSums:
    """Return the sums over the steps that ended since a time of `time.perf_counter`."""
    asked = real = off = 0.0
    steps = 0
    for log in logs:
        rows = step_rows(log)
        rows = rows[rows["end"] > since]
        asked += float(rows["asked_seconds"].sum())
        real += float(rows["seconds"].sum())
        off += float(np.abs(rows["seconds"] - rows["asked_seconds"]).sum())
        steps += len(rows)
    return StepSums(asked, real, off, steps)


def step_rows(log: Path) -> Any:
    """Return the rows of a log of steps, which may still be written."""
    text = log.read_text() or "end,asked_seconds,seconds\n"
    lines = text[: text.rfind("\n")].split("\n")  # the last line may not be whole
    return np.atleast_1d(np.genfromtxt(lines, delimiter=",", names=True))
