"""`headway demo`: the same load twice, without and with requests that move between engines."""

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from rescheduler.demo.load import (
    LoadRequest,
    StreamedAnswer,
    answer_figures,
    chat_body,
    moves,
    preemptions,
    say,
    serve_answers,
    watched,
)
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import free_ports, local_deployment
from rescheduler.serving.serve import proxy_running

_ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=16,
    kv_blocks=72,  # of 32 tokens: five of the long answers
    enforce_eager=True,
    checkpoint="checkpoints/smollm2-135m-instruct",
    k=10,
)
_MIGRATION = {
    "name": "survival",
    "interval_seconds": 1.0,
    "handshake_seconds": 0.2,
    "bandwidth": 5e8,
    "kv_bytes_per_token": 46_080,
    "horizon": 300,
    "stride": 10,
}
_HEROES = ("sailor", "gardener", "baker", "detective", "farmer", "chess player", "train driver",
           "cartographer", "night guard", "diver", "violinist", "lighthouse keeper")  # fmt: skip
MOST_PAIRS = len(_HEROES)
_QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is 7 + 5?")
_PHASES = ("without rescheduling", "with rescheduling")
_LONG_TOKENS, _SHORT_TOKENS = 400, 40
_APART_SECONDS, _ALONE_SECONDS = 0.8, 5.0
_LINE_SECONDS = 5.0
_TTFT_TIMES, _TPOT_TIMES = 20.0, 4.0
_ROWS = (
    ("goodput, in time per minute", "goodput", 60.0, "{:.1f}"),
    ("requests in time", "met", 100.0, "{:.0f}%"),
    ("TPOT P50, ms", "tpot_p50", 1e3, "{:.0f}"),
    ("TPOT P99, ms", "tpot_p99", 1e3, "{:.0f}"),
    ("longest pause, P99, s", "gap_p99", 1.0, "{:.1f}"),
    ("TTFT P99, s", "ttft_p99", 1.0, "{:.1f}"),
    ("total time, s", "seconds", 1.0, "{:.0f}"),
    ("preemptions", "preempted", 1.0, "{:.0f}"),
    ("migrations", "moves", 1.0, "{:.0f}"),
    ("failed requests", "failed", 1.0, "{:.0f}"),
)
"""Of the table: label, figure, scale and form."""


def compare(config: Deployment | None, pairs: int, logs: Path) -> None:
    """Serve a load without moves, then with them, and print a table of both.

    Args:
        config: deployment whose engines run; None: start one.
        pairs: long requests, and as many short ones.
        logs: folder of the logs of what is started.
    """
    if config is not None:
        port, admin_port = free_ports(2)  # another proxy may run
        proxy = replace(config.proxy, host="127.0.0.1", port=port, admin_port=admin_port)
        deployment = replace(config, proxy=proxy)
    else:
        deployment = local_deployment("smollm2", _ENGINE, migration=_MIGRATION)
        say(f"Starting one prefill and two decode engines, logs in {logs}")
    engines = nullcontext() if config else launched(deployment, logs, show=True, tethered=True)
    with engines:
        Console().print(asyncio.run(compared(deployment, skewed_load(pairs))))


def skewed_load(pairs: int) -> list[LoadRequest]:
    """Return long and short requests in turn: round robin puts all long ones on one engine."""
    load = []
    for i in range(pairs):
        story = f"Write a long story about a {_HEROES[i]} who finds a letter from the future."
        question = _QUESTIONS[i % len(_QUESTIONS)]
        now, then = 2 * i * _APART_SECONDS, (2 * i + 1) * _APART_SECONDS
        load.append(LoadRequest(f"long-{i}", story, _LONG_TOKENS, 2 * i, now))
        load.append(LoadRequest(f"short-{i}", question, _SHORT_TOKENS, 2 * i + 1, then))
    return load


async def compared(deployment: Deployment, load: Sequence[LoadRequest]) -> Table:
    """Serve a load twice by engines that run; return what came of it."""
    placed = replace(deployment, routing={"name": "round_robin"})
    still = replace(placed, migration=None)
    moving = replace(placed, migration=placed.migration or _MIGRATION)
    token = secrets.token_urlsafe(32)  # one for all phases, so that the page finds each
    say(f"See it in a browser: {still.admin_url}/ui#token={token}")
    ttft_s, tpot_s = await _objectives(still, token)
    table = Table("same requests, same times", caption_justify="left")
    table.caption = (
        f"in time: first token within {ttft_s:.1f} s, then at most {1e3 * tpot_s:.0f} ms per token;"
        f" {_TTFT_TIMES:g} and {_TPOT_TIMES:g} times the latency of a request sent alone"
    )
    columns: list[dict[str, float]] = []
    for title, serves in zip(_PHASES, (still, moving), strict=True):
        table.add_column(title, justify="right")
        say(f"{len(columns) + 1} of 2: {title}")
        preempted = await asyncio.to_thread(preemptions, serves)
        async with proxy_running(serves, token):
            served = await _answered(serves, load, title)
            moved = await asyncio.to_thread(moves, serves)
        if all(answer.error for answer in served):
            raise RuntimeError(f"no request was answered: {served[0].error}")
        figures = answer_figures(served, 1.0, ttft_s, tpot_s)
        figures["tpot_p50"] = median(answer.tpot for answer in served if not answer.error)
        figures["preempted"] = await asyncio.to_thread(preemptions, serves) - preempted
        columns.append(figures | {"moves": moved})
    for label, name, scale, form in _ROWS:
        table.add_row(label, *(form.format(scale * figures[name]) for figures in columns))
    return table


def _sent(
    deployment: Deployment, load: Sequence[LoadRequest], salt: str
) -> tuple[list[StreamedAnswer[LoadRequest]], Coroutine[Any, Any, None]]:
    """Return answers, and what fills them.

    The salt keeps a phase from finding its prompts in the engines' prefix caches.
    """
    answers = [StreamedAnswer(request) for request in load]
    asked = partial(chat_body, deployment.served_name, salt=salt)
    return answers, serve_answers(deployment.proxy_url, answers, asked)


async def _answered(
    deployment: Deployment, load: Sequence[LoadRequest], salt: str
) -> list[StreamedAnswer[LoadRequest]]:
    """Send a load and wait for all answers; say how far it is."""
    answers, serving = _sent(deployment, load, salt)
    began = time.monotonic()

    async def look() -> str:
        done = sum(bool(answer.tokens or answer.error) for answer in answers)
        moved = await asyncio.to_thread(moves, deployment)
        seconds = time.monotonic() - began
        say(f"{seconds:4.0f} s  {done} of {len(load)} answered, {moved:.0f} moved")
        return ""

    await watched(serving, _LINE_SECONDS, look)
    return answers


async def _objectives(deployment: Deployment, token: str) -> tuple[float, float]:
    """Return multiples of TTFT and TPOT of requests that have the engines to themselves."""
    alone = [
        LoadRequest(f"alone-{i}", "Write a story.", 30, i, _ALONE_SECONDS * i) for i in range(4)
    ]
    async with proxy_running(deployment, token):
        answers, serving = _sent(deployment, alone, "alone")
        await serving
    served = answers[2:]  # the first two shake hands with the prefill engine
    if any(answer.error or not answer.tpot for answer in served):
        raise RuntimeError(f"a request sent alone was not served: {served[0].error}")
    figures = answer_figures(served, 1.0)
    return _TTFT_TIMES * figures["ttft"], _TPOT_TIMES * figures["tpot"]
