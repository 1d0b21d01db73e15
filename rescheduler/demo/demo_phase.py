"""One phase of the demonstration: a proxy, a load on it, and what can be seen meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from rescheduler.demo.demo_figures import preemptions
from rescheduler.demo.demo_load import LoadRequest, LoadRun, ServedRequest
from rescheduler.demo.demo_moves import Move, MoveWatcher
from rescheduler.demo.demo_proxy import proxy_running
from rescheduler.engines.deployment import Deployment
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import ControlError, EngineState

__all__ = ["Phase", "running_phase"]

_STATE_SECONDS = 0.5
_PREEMPTION_SECONDS = 2.0


@dataclass
class Phase:
    """What is seen of a phase; it changes while the phase runs.

    Attributes:
        title: what the phase is.
        deployment: that the proxy serves.
        load: what is sent.
        run: the load's run.
        states: of the decode engines, by name, as they last reported.
        moves: migrations so far.
        preempted: requests that the decode engines have preempted in this phase.
    """

    title: str
    deployment: Deployment
    load: Sequence[LoadRequest]
    run: LoadRun
    moves: list[Move]
    states: dict[str, EngineState] = field(default_factory=dict)
    preempted: int = 0

    @property
    def served(self) -> list[ServedRequest]:
        """The requests sent so far, in the load's order."""
        return [self.run.served[r.name] for r in self.load if r.name in self.run.served]


@asynccontextmanager
async def running_phase(
    title: str, deployment: Deployment, load: Sequence[LoadRequest], admin_token: str = ""
) -> AsyncIterator[tuple[Phase, asyncio.Task[list[ServedRequest]]]]:
    """Serve a deployment whose engines run, and send it a load.

    Args:
        title: of the phase.
        deployment: that is served.
        load: that is sent.
        admin_token: as of `proxy_running`.

    Yields:
        What is seen, and the task that ends when all answers are there.
    """
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxy_running(deployment, admin_token))
        watcher = MoveWatcher(proxy)
        run = LoadRun(deployment.proxy_url, deployment.served_name, load, salt=title)
        phase = Phase(title, deployment, load, run, watcher.moves)
        before = await asyncio.to_thread(preemptions, deployment)
        tasks = [
            asyncio.create_task(watcher.run()),
            asyncio.create_task(_watch_states(phase)),
            asyncio.create_task(_watch_preemptions(phase, before)),
        ]
        answers = asyncio.create_task(run.run())
        try:
            yield phase, answers
            phase.preempted = round(await asyncio.to_thread(preemptions, deployment) - before)
        finally:
            for task in (*tasks, answers):
                task.cancel()
            await asyncio.gather(*tasks, answers, return_exceptions=True)


async def _watch_states(phase: Phase) -> None:
    decodes = [instance for instance in phase.deployment.decode if instance.control is not None]
    clients = {
        instance.name: ControlClient(str(instance.control), phase.deployment.keys_folder)
        for instance in decodes
    }
    try:
        while True:
            for name, client in clients.items():
                with suppress(ControlError):  # it is shown as it was
                    phase.states[name] = await client.state(_STATE_SECONDS)
            await asyncio.sleep(_STATE_SECONDS)
    finally:
        for client in clients.values():
            client.close()


async def _watch_preemptions(phase: Phase, before: float) -> None:
    while True:
        await asyncio.sleep(_PREEMPTION_SECONDS)
        with suppress(OSError):
            now = await asyncio.to_thread(preemptions, phase.deployment)
            phase.preempted = round(now - before)
