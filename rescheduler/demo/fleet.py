"""`headway demo --emulate`: a fleet of emulated engines, kept busy until Ctrl-C."""

import asyncio
import secrets
import time
from pathlib import Path

import aiohttp
import numpy as np
from msgspec.structs import replace

from data_collection.files import find_config
from rescheduler.demo.load import load_session, metric_total, moves, preemptions, say, watched
from rescheduler.engines.deployment import Deployment, read_deployment
from rescheduler.engines.emulated_deployment import emulated, in_real_time
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.page.snapshot import refuse_log
from rescheduler.serving.serve import load_tokenizer, proxy_running

_SHIPPED = "emulated-fleet"
_SHORTEST, _LONGEST = 100, 1_500  # prompts: eight times as long to compute as on GPUs
_MOST_TOKENS = 8_000
_RAMP_SECONDS = 40.0
"""Over which the clients come, or their prompts would be computed before anything is decoded."""
_LINE_SECONDS = 5.0
_OTHERS = 64
_BREATH_SECONDS = 1.0
"""That a client waits after an error."""


class FleetLoad:
    """Clients without end, whose prompts are random and whose answers are as long as drawn.

    Attributes:
        running: requests that are not answered yet.
        answered: requests that were answered.
        failed: requests that were not.
        error: why the last one failed.
    """

    def __init__(self, url: str, model: str, vocabulary: int, clients: int) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._vocabulary = vocabulary
        self._clients = clients
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
                self.failed += 1
                self.error = error
                await asyncio.sleep(_BREATH_SECONDS)

    async def _asked(self, session: aiohttp.ClientSession) -> str:
        """Send a request and wait for its answer; return why there was none."""
        tokens = int(np.exp(self._random.uniform(*np.log([_SHORTEST, _LONGEST]))))
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
    shipped = emulated(read_deployment(find_config(_SHIPPED)), machine)
    policies = shipped.routing, shipped.migration
    fleet = local_deployment(shipped.model, shipped.engine, engines, 0, *policies)
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
    url, name = deployment.proxy_url, deployment.served_name
    load = FleetLoad(url, name, tokenizer.get_vocab_size(), clients)
    say(f"Starting {engines} engines that emulate {machine}, logs in {logs}")
    with launched(deployment, logs, show=True, tethered=True):
        asyncio.run(_shown(deployment, load, clients, record))


async def _shown(
    deployment: Deployment, load: FleetLoad, clients: int, record: Path | None
) -> None:
    token = secrets.token_urlsafe(32)
    assert deployment.engine.emulate is not None
    dilation = deployment.engine.emulate.dilation
    metrics = f"{deployment.proxy_url}/metrics"
    began = before = time.monotonic()
    tokens = 0.0

    async def look() -> str:
        nonlocal before, tokens
        now = time.monotonic()
        try:
            counted = await asyncio.to_thread(
                metric_total, metrics, "headway_proxy_generation_tokens_total"
            )
            moved = await asyncio.to_thread(moves, deployment)
            preempted = await asyncio.to_thread(preemptions, deployment)
        except OSError as error:  # the next line may have it
            say(f"figures are missing: {error}")
            return ""
        rate = dilation * (counted - tokens) / (now - before)
        before, tokens = now, counted
        failed = f", {load.failed} failed: {load.error}" if load.failed else ""
        say(
            f"{now - began:4.0f} s  {load.running} running, {load.answered} answered, "
            f"{rate:,.0f} tokens a second on GPUs, {moved:.0f} moved, "
            f"{preempted:.0f} preempted{failed}"
        )
        return ""

    async with proxy_running(in_real_time(deployment), token, record):
        say(
            f"See it in a browser: {deployment.admin_url}/ui#token={token}\n"
            f"{clients} clients come, each with one request after the other; everything takes "
            f"{dilation:g} times as long as on GPUs. Ctrl-C ends it."
        )
        began = before = time.monotonic()
        await watched(load.run(), _LINE_SECONDS, look)
