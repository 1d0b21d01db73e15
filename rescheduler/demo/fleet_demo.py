"""A fleet of emulated GPUs at work: a thousand clients, each with one request after the other."""

import asyncio
import secrets
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
from msgspec.structs import replace

from data_collection.shipped_files import find_config
from rescheduler.demo.demo_load import load_session, metric_total, preemptions
from rescheduler.engines.deployment import Deployment, read_deployment
from rescheduler.engines.emulated_deployment import emulated, in_real_time
from rescheduler.engines.launch_engines import LaunchProgress, launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.page.snapshot_log import refuse_log
from rescheduler.serving.serve import load_tokenizer, proxy_running

__all__ = ["FleetLoad", "emulated_fleet", "show_fleet"]

_FLEET = "emulated-fleet"
_SHORTEST, _LONGEST = 100, 1_500  # prompts: eight times as long to compute as on GPUs
_MOST_TOKENS = 8_000
_RAMP_SECONDS = 40.0
"""Over which the clients come, or their prompts would be computed before anything is decoded."""
_LINE_SECONDS = 5.0
_TOKENS, _MOVES = "headway_proxy_generation_tokens_total", "headway_proxy_migrations_total"
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


def show_fleet(
    machine: str, engines: int, clients: int, logs: Path, record: Path | None = None
) -> None:
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
    with ExitStack() as stack:
        _say(f"Starting {engines} engines that emulate {machine}, logs in {logs}")
        progress = stack.enter_context(LaunchProgress(logs))
        stack.enter_context(launched(deployment, logs, report=progress.report, tethered=True))
        progress.finish()
        asyncio.run(_shown(deployment, vocabulary, clients, record))


async def _shown(
    deployment: Deployment, vocabulary: int, clients: int, record: Path | None
) -> None:
    token = secrets.token_urlsafe(32)
    assert deployment.engine.emulate is not None
    dilation = deployment.engine.emulate.dilation
    async with proxy_running(in_real_time(deployment), token, record):
        _say(
            f"See it in a browser: {deployment.admin_url}/ui#token={token}\n"
            f"{clients} clients come, each with one request after the other; everything takes "
            f"{dilation:g} times as long as on GPUs. Ctrl-C ends it."
        )
        load = FleetLoad(deployment.proxy_url, deployment.served_name, vocabulary, clients)
        serving = asyncio.create_task(load.run())
        began = time.monotonic()
        seen = _Seen(began, 0.0, 0.0, 0.0)
        try:
            while not serving.done():
                await asyncio.wait([serving], timeout=_LINE_SECONDS)
                before = seen
                try:
                    seen = await asyncio.to_thread(_seen, deployment)
                except OSError as error:  # the next line may have it
                    _say(f"figures are missing: {error}")
                    continue
                rate = dilation * (seen.tokens - before.tokens) / (seen.at - before.at)
                failed = f", {load.failed} failed: {load.error}" if load.failed else ""
                _say(
                    f"{seen.at - began:4.0f} s  {load.running} running, "
                    f"{load.answered} answered, {rate:,.0f} tokens a second on GPUs, "
                    f"{seen.moved:.0f} moved, {seen.preempted:.0f} preempted{failed}"
                )
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


class _Seen(NamedTuple):
    """When it was seen what the proxy and the engines have counted."""

    at: float
    tokens: float
    moved: float
    preempted: float


def _seen(deployment: Deployment) -> _Seen:
    metrics = f"{deployment.proxy_url}/metrics"
    at, tokens = time.monotonic(), metric_total(metrics, _TOKENS)
    moved = metric_total(metrics, _MOVES, outcome="moved")
    return _Seen(at, tokens, moved, preemptions(deployment))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
