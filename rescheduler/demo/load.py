"""Loads for OpenAI-compatible servers, what clients saw of them, and what servers counted."""

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import aiohttp
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from rescheduler.emulation.scripted_answers import LARGEST, LENGTH, SEED, scripted_token
from rescheduler.engines.deployment import Deployment
from rescheduler.openai.openai_request import CHAT, COMPLETIONS
from rescheduler.openai.openai_stream import read_events

FIRST_WORD, WORDS = 1_000, 1_024
MAX_TOKENS = 8_192
TTFT_S, TPOT_S = 2.0, 0.05
"""Objectives, in seconds of the emulated engines."""

_METRICS_SECONDS = 10.0
_FAULTS = (OSError, ValueError, RuntimeError, msgspec.MsgspecError, aiohttp.ClientError)


@dataclass(frozen=True)
class EmulatedRequest:
    """A request of a load, and when it arrives, in seconds of the emulated engines."""

    seed: int
    prompt_tokens: int
    answer_tokens: int
    arrives: float


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A user's message, sent so many seconds after the start.

    Its name is sent as ``X-Request-Id``; by its seed, every run generates the same.
    """

    name: str
    prompt: str
    max_tokens: int
    seed: int
    arrives: float


Request = TypeVar("Request", EmulatedRequest, LoadRequest)


@dataclass
class StreamedAnswer(Generic[Request]):
    """What a client saw; times are real seconds on the monotonic clock."""

    request: Request
    sent: float = 0.0
    first: float = inf
    last: float = inf
    longest_gap: float = 0.0
    tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    pieces: list[str] = field(default_factory=list)

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk that comes now."""
        before = self.tokens
        self.tokens = (chunk.get("usage") or {}).get("completion_tokens", before)
        for choice in chunk.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            if not (text or "text" in choice or self.tokens > before):
                continue  # a role, or the end
            now = time.monotonic()
            self.pieces.append(text)
            if self.first == inf:
                self.first = now
            else:
                self.longest_gap = max(self.longest_gap, now - self.last)
            self.last = now

    @property
    def text(self) -> str:
        """All that came."""
        return "".join(self.pieces)

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 of a single token."""
        return (self.last - self.first) / max(1, self.tokens - 1)


EmulatedAnswer = StreamedAnswer[EmulatedRequest]
Prompt = Callable[[int, EmulatedRequest], list[int]]
"""Returns the prompt of a request, by a run's salt."""


def drawn_prompt(salt: int, request: EmulatedRequest) -> list[int]:
    """Return a prompt that no other request has, and none of another salt."""
    words = np.random.default_rng((salt, request.seed)).integers(0, WORDS, request.prompt_tokens)
    return [*(FIRST_WORD + words).tolist()]


async def serve_load(
    url: str,
    model: str,
    load: Sequence[EmulatedRequest],
    dilation: float,
    salt: int,
    max_tokens: int = MAX_TOKENS,
    until: float = inf,
    prompt: Prompt = drawn_prompt,
) -> list[EmulatedAnswer]:
    """Send a load to a server as `serve_answers` does, and return what was answered."""
    answers = [EmulatedAnswer(request) for request in load]

    def asked(request: EmulatedRequest) -> dict[str, Any]:
        return asked_body(model, request, salt, max_tokens, prompt)

    await serve_answers(url, answers, asked, dilation, until)
    return answers


async def serve_answers(
    url: str,
    answers: Sequence[StreamedAnswer[Request]],
    asked: Callable[[Request], dict[str, Any]],
    dilation: float = 1.0,
    until: float = inf,
) -> None:
    """Send requests to a server, each when its time comes, and wait for all answers.

    What has not ended ``until`` a time of the emulated engines is given up, and has no tokens.

    Args:
        url: of the server.
        answers: of the requests; they are filled.
        asked: returns what a server is asked for a request.
        dilation: real seconds in a second of the load.
        until: the load's time.
    """
    started = time.monotonic()

    async def serve_all(session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as group:
            for answer in sorted(answers, key=lambda one: one.request.arrives):
                due = started + dilation * answer.request.arrives
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(_serve(session, url, asked(answer.request), answer))

    async with load_session() as session:
        with suppress(TimeoutError):
            await asyncio.wait_for(serve_all(session), None if until == inf else dilation * until)


def asked_body(
    model: str,
    request: EmulatedRequest,
    salt: int,
    max_tokens: int,
    prompt: Prompt = drawn_prompt,
) -> dict[str, Any]:
    """Return what a server is asked for a request."""
    return {
        "model": model,
        "prompt": prompt(salt, request),
        "max_tokens": max_tokens,
        "ignore_eos": False,
        "temperature": 0,
        "vllm_xargs": {LENGTH: request.answer_tokens, SEED: request.seed},
    }


def chat_body(model: str, request: LoadRequest, salt: str) -> dict[str, Any]:
    """Return what a server is asked for a user's message."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": request.max_tokens,
        "temperature": 0.8,
        "seed": request.seed,
        "cache_salt": salt,
    }


async def _serve(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], answer: StreamedAnswer[Any]
) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    options = body.get("stream_options", {}) | {"include_usage": True}
    body |= {"stream": True, "stream_options": options}
    key = os.environ.get("VLLM_API_KEY")  # engines that are started here ask for it
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if isinstance(answer.request, LoadRequest):
        headers["X-Request-Id"] = answer.request.name
    answer.sent = time.monotonic()
    try:
        async with session.post(url + path, json=body, headers=headers) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for chunk in read_events(response.content):
                if "error" in chunk:
                    answer.error = str(chunk["error"])
                    return
                answer.take(chunk)
    except _FAULTS as error:
        answer.error = f"{type(error).__name__}: {error}"
        return
    if not (answer.tokens and answer.finish_reason):
        answer.error = "the stream ended before its request"


def say(what: str) -> None:
    """Print to standard error, at once."""
    print(what, file=sys.stderr, flush=True)


def load_session() -> aiohttp.ClientSession:
    """Return a session for as many requests as are sent, however long they take."""
    # Servers close idle connections, perhaps just as one is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def watched(
    load: Coroutine[Any, Any, object], seconds: float, look: Callable[[], Awaitable[str]]
) -> str:
    """Serve a load, and look at it every so often; return why a look ended it, or nothing."""
    serving = asyncio.create_task(load)
    try:
        while not serving.done():
            await asyncio.wait([serving], timeout=seconds)
            if ended := await look():
                return ended
        await serving
        return ""
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


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
    answers: Sequence[StreamedAnswer[Any]],
    dilation: float,
    ttft_s: float = TTFT_S,
    tpot_s: float = TPOT_S,
) -> dict[str, float]:
    """Return latencies of a load in seconds of the emulated engines."""
    good = [one for one in answers if not one.error]
    ttft = np.array([one.first - one.sent for one in good]) / dilation
    latency = np.array([one.last - one.sent for one in good]) / dilation
    several = [one for one in good if one.tokens > 1] or good
    tpot = np.array([one.tpot for one in several]) / dilation
    gap = np.array([one.longest_gap for one in several]) / dilation
    begun = min(one.sent for one in answers)
    seconds = (max(one.last for one in good) - begun) / dilation
    met = [(ttft[i] <= ttft_s) and one.tpot / dilation <= tpot_s for i, one in enumerate(good)]
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


def preemptions(deployment: Deployment) -> float:
    """Return how many requests the decode engines have preempted since they started."""
    return sum(
        metric_total(f"{instance.url}/metrics", "vllm:num_preemptions_total")
        for instance in deployment.decode
    )


def moves(deployment: Deployment) -> float:
    """Return how many requests the proxy has moved since it started."""
    metrics = f"{deployment.proxy_url}/metrics"
    return metric_total(metrics, "headway_proxy_migrations_total", outcome="moved")


def scheduler_failures(deployment: Deployment) -> str:
    """Return that engines' own order or choice of victims failed; nothing where none has."""
    name = "headway_instance_scheduler_failures_total"
    failures = metric_total(f"{deployment.proxy_url}/metrics", name)
    what = "an engine's own order or choice of victims failed"
    return f"{what}, {failures:.0f} times: see the engines' logs" if failures else ""


def metric_total(url: str, name: str, **labels: str) -> float:
    """Return the sum of a Prometheus metric over its labels, of those that have these values.

    Raises:
        OSError: nothing answers there.
    """
    # Without the proxies of the environment: what is asked runs on this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=_METRICS_SECONDS) as response:
        return metric_in(response.read().decode(), name, **labels)


def metric_in(text: str, name: str, **labels: str) -> float:
    """Return such a sum of what ``/metrics`` answered; 0 where the metric is missing."""
    return sum(metric_by(text, name, "", **labels).values())


def metric_by(text: str, name: str, label: str, **labels: str) -> dict[str, float]:
    """Return a metric by the values of one label, summed over the labels that are not given."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                key = sample.labels.get(label, "")
                found[key] = found.get(key, 0.0) + sample.value
    return found
