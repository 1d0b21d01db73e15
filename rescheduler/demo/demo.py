"""`headway demo`: the same load twice, without and with requests that move between engines."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import aiohttp
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from data_collection.files import find_config
from rescheduler.demo.demo_load import (
    LoadRequest,
    LoadRun,
    Objectives,
    load_figures,
    load_session,
    metric_total,
    moves,
    preemptions,
    say,
)
from rescheduler.engines.deployment import Deployment, EngineOptions, read_deployment
from rescheduler.engines.emulated_deployment import emulated, in_real_time
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import free_ports, local_deployment
from rescheduler.page.snapshot import refuse_log
from rescheduler.serving.serve import load_tokenizer, proxy_running

_FLEET = "emulated-fleet"
_SHORTEST, _LONGEST = 100, 1_500  # prompts: eight times as long to compute as on GPUs
_MOST_TOKENS = 8_000
_RAMP_SECONDS = 40.0
"""Over which the clients come, or their prompts would be computed before anything is decoded."""
_LINE_SECONDS = 5.0
_TOKENS = "headway_proxy_generation_tokens_total"
_OTHERS = 64
_BREATH_SECONDS = 1.0
"""That a client waits after an error."""


class FleetLoad:
    """Clients without end, whose prompts are random and whose answers are as long as drawn.

    Attributes:
        running: requests that are not answered yet.
        answered, failed: those that were.
        error: why the last one failed.
    """

    def __init__(self, url: str, model: str, vocabulary: int, clients: int) -> None:
        self._url, self._model = f"{url}/v1/completions", model
        self._vocabulary, self._clients = vocabulary, clients
        self._random = np.random.default_rng()
        self.running = self.answered = self.failed = 0
        self.error = ""

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with load_session() as session, asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(session, number * _RAMP_SECONDS / self._clients))

    async def _client(self, session: aiohttp.ClientSession, begins: float) -> None:
        await asyncio.sleep(begins)
        while True:
            self.running += 1
            try:
                error = await self._asked(session)
            finally:
                self.running -= 1
            self.answered += not error
            if error:
                self.failed, self.error = self.failed + 1, error
                await asyncio.sleep(_BREATH_SECONDS)

    async def _asked(self, session: aiohttp.ClientSession) -> str:
        """Send a request and wait for its answer; return why there was none."""
        shortest, longest = np.log([_SHORTEST, _LONGEST])
        tokens = int(np.exp(self._random.uniform(shortest, longest)))
        prompt = self._random.integers(0, self._vocabulary, tokens).tolist()
        body = {"model": self._model, "prompt": prompt, "max_tokens": _MOST_TOKENS}
        try:
            async with session.post(self._url, json=body) as response:
                text = await response.text()
                return "" if response.status == 200 else f"HTTP {response.status}: {text[:200]}"
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}: {error}"


def emulated_fleet(machine: str, engines: int, clients: int) -> Deployment:
    """Return the deployment of ``configs/serve/emulated-fleet.yaml`` on free ports.

    Raises:
        ValueError: there is no such machine to emulate.
    """
    shipped = emulated(read_deployment(find_config(_FLEET)), machine)
    fleet = local_deployment(
        shipped.model,
        shipped.engine,
        engines,
        0,
        shipped.routing,
        shipped.migration,
    )
    # All come from one address, which gets half of the connections.
    proxy = replace(fleet.proxy, pool=shipped.proxy.pool, connections=2 * clients + _OTHERS)
    fleet = replace(fleet, proxy=proxy, served_model_name=shipped.served_model_name)
    fleet.check()
    return fleet


def show_fleet(machine: str, engines: int, clients: int, logs: Path, record: Path | None) -> None:
    """Start an emulated fleet, keep it busy, and say how it does until Ctrl-C.

    Raises:
        ValueError: there is no such machine to emulate.
        OSError: the file to record to exists, or cannot be written.
    """
    if record is not None:
        refuse_log(record)
    deployment = emulated_fleet(machine, engines, clients)
    tokenizer = load_tokenizer(deployment.model)
    assert tokenizer is not None  # emulated engines have one
    vocabulary = tokenizer.get_vocab_size()
    say(f"Starting {engines} engines that emulate {machine}, logs in {logs}")
    with launched(deployment, logs, show=True, tethered=True):
        asyncio.run(_shown(deployment, vocabulary, clients, record))


async def _shown(
    deployment: Deployment, vocabulary: int, clients: int, record: Path | None
) -> None:
    token = secrets.token_urlsafe(32)
    assert deployment.engine.emulate is not None
    dilation = deployment.engine.emulate.dilation
    metrics = f"{deployment.proxy_url}/metrics"
    async with proxy_running(in_real_time(deployment), token, record):
        say(
            f"See it in a browser: {deployment.admin_url}/ui#token={token}\n"
            f"{clients} clients come, each with one request after the other; everything takes "
            f"{dilation:g} times as long as on GPUs. Ctrl-C ends it."
        )
        load = FleetLoad(deployment.proxy_url, deployment.served_name, vocabulary, clients)
        serving = asyncio.create_task(load.run())
        began = time.monotonic()
        at, tokens = began, 0.0
        try:
            while not serving.done():
                await asyncio.wait([serving], timeout=_LINE_SECONDS)
                now = time.monotonic()
                try:
                    counted = await asyncio.to_thread(metric_total, metrics, _TOKENS)
                    moved = await asyncio.to_thread(moves, deployment)
                    preempted = await asyncio.to_thread(preemptions, deployment)
                except OSError as error:  # the next line may have it
                    say(f"figures are missing: {error}")
                    continue
                rate = dilation * (counted - tokens) / (now - at)
                at, tokens = now, counted
                failed = f", {load.failed} failed: {load.error}" if load.failed else ""
                say(
                    f"{at - began:4.0f} s  {load.running} running, "
                    f"{load.answered} answered, {rate:,.0f} tokens a second on GPUs, "
                    f"{moved:.0f} moved, {preempted:.0f} preempted{failed}"
                )
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


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
        pairs: Long requests, and as many short ones.
        emulate: Emulate this GPU: a shipped machine, such as h100x2-llama-70b, or a profile's file.
            Answers are scripted, see docs/rehearse.md.
        engines: Engines of the emulated fleet.
        clients: Clients of the emulated fleet. Each sends one request after the other.
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
            port, admin_port = free_ports(2)  # another proxy may run
            proxy = replace(config.proxy, host="127.0.0.1", port=port, admin_port=admin_port)
            deployment = replace(config, proxy=proxy)
        else:
            deployment = local_deployment("smollm2", _ENGINE, migration=_MIGRATION)
            say(f"Starting one prefill and two decode engines, logs in {logs}")
            stack.enter_context(launched(deployment, logs, show=True, tethered=True))
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
    placed = replace(deployment, routing={"name": "round_robin"})
    still = replace(placed, migration=None)
    moving = replace(placed, migration=placed.migration or _MIGRATION)
    token = secrets.token_urlsafe(32)  # one for all phases, so that the page finds each
    say(f"See it in a browser: {still.admin_url}/ui#token={token}")
    objectives = await _objectives(still, token)
    columns: list[dict[str, float]] = []
    for title, serves in zip(_PHASES, (still, moving), strict=True):
        say(f"{len(columns) + 1} of 2: {title}")
        preempted = await asyncio.to_thread(preemptions, serves)
        async with proxy_running(serves, token):
            run = await _answered(serves, load, title)
            moved = await asyncio.to_thread(moves, serves)
        after = await asyncio.to_thread(preemptions, serves)
        figures = load_figures(list(run.served.values()), run.seconds, objectives)
        columns.append(figures | {"preempted": after - preempted, "moves": moved})
    return _table(columns, objectives)


async def _answered(deployment: Deployment, load: Sequence[LoadRequest], salt: str) -> LoadRun:
    """Send a load and wait for all answers; say how far it is."""
    run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt)
    answers = asyncio.create_task(run.run())
    try:
        while not answers.done():
            await asyncio.wait([answers], timeout=_LINE_SECONDS)
            done = sum(bool(one.finish_reason or one.error) for one in run.served.values())
            moved = await asyncio.to_thread(moves, deployment)
            say(f"{run.seconds:4.0f} s  {done} of {len(load)} answered, {moved:.0f} moved")
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
