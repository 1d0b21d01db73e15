"""Runs a load through a deployment while it is harmed, and looks at what is left."""

import asyncio
import random
import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType

import aiohttp
import msgspec

from benchmarks.chaos.clients import HonestClients, RudeClients
from benchmarks.chaos.harm import SETTING, Harm, Setting
from benchmarks.chaos.ledger import Ledger, ProxyCounters, ServiceWatch
from benchmarks.support.deployments import proxy_process
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.launch_engines import Launched
from rescheduler.serving.admin_client import TOKEN_VARIABLE
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import ControlError

STOP = "stop"
KINDS = (STOP, "fill", "garbage", "restart", "kill_decode", "kill_prefill")
SLOW, OVERLOAD, KILLER = "slow", "overload", "killer"
"""Further kinds."""
_QUESTIONS = 40
_RUDE_SECONDS = 3.0
_LOOK_SECONDS = 1.0
_IDLE_SECONDS = 120.0


async def chaos(
    engines: Launched,
    deployment: Deployment,
    seconds: float,
    kinds: tuple[str, ...] = KINDS,
    questions: int = _QUESTIONS,
    at_once: int = 12,
    seed: int = 1,
    at_least: Mapping[str, int] = MappingProxyType({}),
    setting: Setting = SETTING,
) -> Ledger:
    """Cause chaos for a while, then wait until all is idle, and look for what is left.

    ``at_least`` are counts to reach, however much longer a slow machine takes.
    """
    ledger, generator, token = Ledger(), random.Random(seed), secrets.token_urlsafe(16)
    emulate = deployment.engine.emulate
    dilation = 1.0 if emulate is None else emulate.dilation  # what happens is not dilated
    options = msgspec.structs.replace(
        deployment.proxy,
        first_token_seconds=setting.first_token / dilation,
        token_seconds=setting.token / dilation,
        shutdown_seconds=3.0 / dilation,
        client_write_seconds=10.0 / dilation,
    )
    deployment = msgspec.structs.replace(deployment, proxy=options)
    proxy = proxy_process(deployment, engines.logs, environment={TOKEN_VARIABLE: token})
    proxy.start()
    try:
        while not await asyncio.to_thread(proxy.is_healthy):
            await asyncio.sleep(0.2)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            harm = Harm(engines, proxy, deployment, ledger, generator, session, token, setting)
            await harm.all_in_service()
            await _under_load(harm, seconds, kinds, questions, at_once, at_least)
        await _look(deployment, ledger)
    finally:
        proxy.signal(signal.SIGTERM)
        await asyncio.to_thread(proxy.end_by, time.monotonic() + 30)
    ledger.counts["seconds"] = round(seconds)
    return ledger


async def _under_load(
    harm: Harm,
    seconds: float,
    kinds: tuple[str, ...],
    questions: int,
    at_once: int,
    at_least: Mapping[str, int],
) -> None:
    """Learn the answers, then ask among chaos for a while, and let what runs end."""
    ledger, name, url = harm.ledger, harm.deployment.served_name, harm.deployment.proxy_url
    scripted, setting = harm.deployment.engine.emulate is not None, harm.setting
    honest = HonestClients(url, name, questions, ledger, scripted, setting.silent_tokens)
    rude = RudeClients("127.0.0.1", harm.deployment.proxy.port, name, ledger, harm.random)
    ending, counters = asyncio.Event(), ProxyCounters(harm.lives, ledger)
    watch = ServiceWatch(harm.lives, ledger)
    try:
        await honest.learn(at_once)
        print(f"{questions} answers learnt; chaos for {seconds:.0f} s", flush=True)
        generator, streams = harm.random, setting.silent_streams
        burst = partial(honest.burst, generator=generator)
        ending_by_themselves = [
            asyncio.create_task(harm.run(kinds, ending, burst)),
            asyncio.create_task(honest.run(at_once, ending, generator)),
            asyncio.create_task(honest.run_silent(streams, ending, setting.silent)),
        ]
        tasks = [
            *ending_by_themselves,
            asyncio.create_task(counters.watch(url, harm.session)),
            asyncio.create_task(watch.watch(harm.breakers, lambda: harm.proxy.pid)),
            asyncio.create_task(rude.run(_RUDE_SECONDS)),
            asyncio.create_task(harm.drain_in_turns()),
        ]
        try:
            await _wait(seconds, at_least, ledger, tasks)
            ending.set()
            await asyncio.gather(*ending_by_themselves)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await counters.read(url, harm.session)
    finally:
        await honest.close()
    counts = ledger.counts
    if not counters.tells_of_prompts:
        counts["prompts_computed_twice"] = counts["prompts_computed_twice_in_overloads"]
        ledger.notes.append("prompts_computed_twice: as decode engines count, in overloads")
    asked = sum(log.asked for log in harm.step_logs)
    taken = sum(log.taken for log in harm.step_logs)
    counts["slow_steps_times"] = round(taken / asked) if asked else 0


async def _wait(
    seconds: float, at_least: Mapping[str, int], ledger: Ledger, tasks: list[asyncio.Task[None]]
) -> None:
    """Wait, and print how it goes every minute; raise what ended a task."""
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0 or any(
        ledger.counts[name] < count for name, count in at_least.items()
    ):
        done, _ = await asyncio.wait(
            tasks,
            timeout=min(60.0, left) if left > 0 else _LOOK_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in done:
            task.result()
        line = ", ".join(f"{key} {value}" for key, value in sorted(ledger.counts.items()))
        counted = f"{time.monotonic() - began:5.0f} s: {line}"
        print(*ledger.new_notes(), counted, sep="\n", flush=True)


async def _look(deployment: Deployment, ledger: Ledger) -> None:
    """Count the blocks that are not free though nothing runs, once leases have ended."""
    deadline, leaked = time.monotonic() + _IDLE_SECONDS, 1
    controls = [
        ControlClient(instance.control, deployment.keys_folder)
        for instance in deployment.instances
        if instance.control is not None
    ]
    try:
        while leaked and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            with suppress(ControlError):
                states = [await control.state(5.0) for control in controls]
                leaked = sum(state.num_blocks - state.free_blocks for state in states)
    finally:
        for control in controls:
            control.close()
    ledger.counts["blocks_leaked"] = leaked
