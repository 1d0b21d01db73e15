"""`headway demo`: the same load twice, without and with requests that move between engines."""

import asyncio
import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from rescheduler.demo.demo_load import (
    LoadRequest,
    LoadRun,
    Objectives,
    load_figures,
    metric_total,
    preemptions,
)
from rescheduler.demo.fleet_demo import show_fleet
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_engines import LaunchProgress, launched
from rescheduler.engines.launch_local import free_ports, local_deployment
from rescheduler.serving.serve import proxy_running

__all__ = ["demo", "skewed_load"]

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
_QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is 7 + 5?")
_PHASES = ("without rescheduling", "with rescheduling")
_PAIRS = 10
_ENGINES, _MOST_ENGINES = 8, 64
_CLIENTS, _MOST_CLIENTS = 1_000, 2_048
_LONG_TOKENS, _SHORT_TOKENS = 400, 40
_APART_SECONDS = 0.8
_TTFT_TIMES, _TPOT_TIMES = 20.0, 4.0
_LINE_SECONDS = 5.0


def demo(
    config: Deployment | None = None,
    logs: Path = Path("runs/demo/logs"),
    pairs: int = _PAIRS,
    emulate: str | None = None,
    engines: int = _ENGINES,
    clients: int = _CLIENTS,
    record: Path | None = None,
) -> None:
    """Compare a load on two decode engines with and without requests that move between them.

    Starts a small deployment of the embedded model on this machine's CPU and sends it the same
    load twice: long and short answers, placed in turn, so that all long ones meet on one engine,
    whose KV cache holds half of them. First nothing moves; then the planner moves requests,
    without interrupting their streams. Takes about four minutes and 10 GiB of memory on two cores.
    With --config it uses engines that are already running. It prints the address of a page that
    shows in a browser what happens, and in the end a table of both.

    With --emulate it shows a fleet instead, until Ctrl-C: eight engines that emulate a GPU, and a
    thousand requests that run at the same time. Takes two cores and 12 GiB of memory.

    Args:
        config: deployment whose engines are already running.
        logs: folder of the engines' logs.
        pairs: number of long and number of short requests.
        emulate: a GPU to emulate: the name of a shipped machine, such as h100x2-llama-70b, or a
            profile's file. Answers are scripted, see docs/rehearse.md.
        engines: of the emulated fleet.
        clients: of the emulated fleet, each with one request after the other.
        record: log what the page shows of the emulated fleet to this file, for `headway replay`.

    Raises:
        ValueError: a number is out of its range, or there is no such GPU.
        OSError: the file to record to exists, or cannot be written.
    """
    if emulate is not None:
        if config is not None:
            raise ValueError("--emulate starts engines of its own: leave --config out")
        for name, value, most in (
            ("engines", engines, _MOST_ENGINES),
            ("clients", clients, _MOST_CLIENTS),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"--{name} must be between 1 and {most}, not {value}")
        show_fleet(emulate, engines, clients, logs, record)
        return
    if record is not None:
        raise ValueError("--record is of an emulated fleet: give --emulate, too")
    if not 1 <= pairs <= len(_HEROES):
        raise ValueError(f"--pairs must be between 1 and {len(_HEROES)}, not {pairs}")
    with ExitStack() as stack:
        if config is not None:
            deployment = _on_free_port(config)
        else:
            deployment = local_deployment("smollm2", _ENGINE, migration=_MIGRATION)
            _say(f"Starting one prefill and two decode engines, logs in {logs}")
            progress = stack.enter_context(LaunchProgress(logs))
            stack.enter_context(launched(deployment, logs, report=progress.report, tethered=True))
            progress.finish()
        Console().print(asyncio.run(_compared(deployment, skewed_load(pairs))))


def skewed_load(pairs: int = _PAIRS) -> list[LoadRequest]:
    """Return long and short requests in turn: round robin puts all long ones on one engine."""
    load: list[tuple[str, str, int]] = []
    for pair in range(pairs):
        story = f"Write a long story about a {_HEROES[pair]} who finds a letter from the future."
        question = _QUESTIONS[pair % len(_QUESTIONS)]
        load += [(f"long-{pair}", story, _LONG_TOKENS), (f"short-{pair}", question, _SHORT_TOKENS)]
    return [LoadRequest(*one, i, _APART_SECONDS * i) for i, one in enumerate(load)]


async def _compared(deployment: Deployment, load: list[LoadRequest]) -> Table:
    placed = msgspec.structs.replace(deployment, routing={"name": "round_robin"})
    still = msgspec.structs.replace(placed, migration=None)
    moving = msgspec.structs.replace(placed, migration=placed.migration or _MIGRATION)
    token = secrets.token_urlsafe(32)  # one for all phases, so that the page finds each
    _say(f"See it in a browser: {still.admin_url}/ui#token={token}")
    objectives = await _objectives(still, token)
    columns: list[dict[str, float]] = []
    for title, serves in zip(_PHASES, (still, moving), strict=True):
        _say(f"{len(columns) + 1} of 2: {title}")
        preempted = await asyncio.to_thread(preemptions, serves)
        async with proxy_running(serves, token):
            run = await _answered(serves, load, title)
            moves = await asyncio.to_thread(_moves, serves)
        after = await asyncio.to_thread(preemptions, serves)
        figures = load_figures(list(run.served.values()), run.seconds, objectives)
        columns.append(figures | {"preempted": after - preempted, "moves": moves})
    return _table(columns, objectives)


async def _answered(deployment: Deployment, load: Sequence[LoadRequest], salt: str) -> LoadRun:
    """Send a load and wait for all answers; say how far it is."""
    run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt)
    answers = asyncio.create_task(run.run())
    try:
        while not answers.done():
            await asyncio.wait([answers], timeout=_LINE_SECONDS)
            done = sum(bool(one.finish_reason or one.error) for one in run.served.values())
            moves = await asyncio.to_thread(_moves, deployment)
            _say(f"{run.seconds:4.0f} s  {done} of {len(load)} answered, {moves:.0f} moved")
        await answers
    finally:
        answers.cancel()
    return run


async def _objectives(deployment: Deployment, token: str) -> Objectives:
    """Measure the latency of requests that have the engines to themselves."""
    alone = [LoadRequest(f"alone-{i}", "Write a story.", 30, i, 5.0 * i) for i in range(4)]
    async with proxy_running(deployment, token):
        run = LoadRun(deployment.proxy_url, deployment.served_name, alone, "alone")
        served = (await run.run())[2:]  # the first two shake hands with the prefill engine
    if any(one.error or not one.tpot for one in served):
        raise RuntimeError(f"a request sent alone was not served: {served[0].error}")
    ttft, tpot = fmean(one.ttft or 0 for one in served), fmean(one.tpot or 0 for one in served)
    return Objectives(_TTFT_TIMES * ttft, _TPOT_TIMES * tpot)


def _moves(deployment: Deployment) -> float:
    url = f"{deployment.proxy_url}/metrics"
    return metric_total(url, "headway_proxy_migrations_total", outcome="moved")


def _table(columns: Sequence[dict[str, float]], objectives: Objectives) -> Table:
    table = Table("same requests, same times", *_PHASES, caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    table.caption = (
        f"in time: first token within {objectives.ttft_s:.1f} s, then at most "
        f"{1e3 * objectives.tpot_s:.0f} ms per token; {_TTFT_TIMES:g} and {_TPOT_TIMES:g} times "
        "the latency of a request sent alone"
    )
    for label, name, scale, form in (
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
    ):
        table.add_row(label, *(form.format(scale * figures[name]) for figures in columns))
    return table


def _on_free_port(deployment: Deployment) -> Deployment:
    """Return a deployment whose proxy is another than the one that may run."""
    replace, (port, admin_port) = msgspec.structs.replace, free_ports(2)
    proxy = replace(deployment.proxy, host="127.0.0.1", port=port, admin_port=admin_port)
    return replace(deployment, proxy=proxy)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
