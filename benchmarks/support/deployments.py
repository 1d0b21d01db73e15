"""Engines and the proxy of a measurement: how they are started, and waited for."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from msgspec.structs import replace

from rescheduler.engines.deployment import Deployment
from rescheduler.engines.engine_command import EngineCommand
from rescheduler.engines.launch_engines import Launched, launched
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.transfer.control_client import ControlClient

POLL_SECONDS = 0.2
_LONG = 86_400.0


class StalledError(RuntimeError):
    """Nobody has got a token for too long."""


def patient(deployment: Deployment) -> Deployment:
    """Return the deployment with a proxy that gives nothing up on a slow machine."""
    options = replace(
        deployment.proxy,
        pool=10_000,
        pool_seconds=_LONG,
        prefill_seconds=_LONG,
        first_token_seconds=_LONG,
        token_seconds=_LONG,
        control_seconds=120.0,
        freeze_seconds=120.0,
        moved_token_seconds=600.0,
    )
    return replace(deployment, proxy=options)


def engines(deployment: Deployment, logs: Path) -> AbstractContextManager[Launched]:
    """Run a deployment's engines; show how they start."""
    return launched(deployment, logs, show=True, tethered=True)


def proxy_process(
    deployment: Deployment, folder: Path, *options: str, environment: Mapping[str, str] = {}
) -> ServerProcess:
    """Return a `headway serve` for a deployment whose engines run; it is not started yet."""
    config = folder / "proxy.yaml"
    write_deployment(deployment, config)
    command = [sys.executable, "-m", "rescheduler", "serve", "--config", str(config), *options]
    return ServerProcess(
        "proxy",
        EngineCommand(command, dict(environment)),
        deployment.proxy_url,
        folder / "proxy.log",
        tethered=True,
    )


@contextmanager
def proxy(deployment: Deployment, folder: Path) -> Iterator[ServerProcess]:
    """Run `headway serve` for a deployment whose engines run; it logs all that it does.

    Raises:
        RuntimeError: it ended before it was ready.
    """
    server = proxy_process(deployment, folder, "--verbose")
    server.start()
    try:
        while not server.is_healthy():  # it may have to compile first
            if not server.is_running:
                raise RuntimeError(server.why_it_ended())
            time.sleep(POLL_SECONDS)
        yield server
    finally:
        server.signal(signal.SIGTERM)
        server.end_by(time.monotonic() + deployment.proxy.shutdown_seconds + 5)


async def until_idle(deployment: Deployment, patience: float) -> None:
    """Wait until no decode engine holds a block.

    Raises:
        StalledError: one holds the same blocks for so many seconds, so that they have leaked.
    """
    for instance in deployment.decode:
        client = ControlClient(str(instance.control))
        held, since = -1, time.monotonic()
        try:
            while (state := await client.state(60.0)).free_blocks != state.num_blocks:
                if state.free_blocks != held:
                    held, since = state.free_blocks, time.monotonic()
                if time.monotonic() - since > patience:
                    raise StalledError(f"{instance.name} is idle and yet holds blocks: {state}")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            client.close()
