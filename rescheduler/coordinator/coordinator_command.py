"""`headway coordinator`: the coordinator as a command."""

import asyncio
import gc
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from rescheduler.commands.event_loop import end_when_asked, log_serving, run_server
from rescheduler.coordinator.coordinator import Coordinator
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.emulated_deployment import in_real_time
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.page.snapshot import SnapshotFeed, recording, refuse_log
from rescheduler.serving.admin_app import AdminListener
from rescheduler.serving.connection import (
    cannot_listen,
    listening_at,
    monitoring_routes,
    operators_server,
)

__all__ = ["coordinator"]


def coordinator(config: Deployment, record: Path | None = None, verbose: bool = False) -> None:
    """Place and move the requests of many proxies, as one proxy does its own.

    Every proxy is a `headway serve` with the same deployment file, on any machine. The coordinator
    carries no tokens: while it is away, the proxies place requests themselves, by least KV load,
    and move none. When it is back it learns from them what runs. `headway drain` reaches it on
    `proxy.admin_port` of its machine, where it also serves a page that shows requests, forecasts
    and moves of all proxies live: it prints the address. Ctrl-C or SIGTERM stops it.

    Args:
        config: the deployment, with a section `coordinator`.
        record: log twice a second what the page shows to this file, for `headway replay`; it must
            not exist.
        verbose: also log where requests go, why none is moved, and the messages of libraries.

    Raises:
        DeploymentError: the deployment has no coordinator, or it cannot serve it.
        OSError: the file to record to exists, or cannot be written.
    """
    log_serving(verbose)
    if record is not None:
        refuse_log(record)
    run_server(_coordinate(in_real_time(config), record))


async def _coordinate(deployment: Deployment, record: Path | None) -> None:
    ended = asyncio.Event()
    end_when_asked(ended)
    coordinator = Coordinator(deployment)
    feed = SnapshotFeed(LiveSnapshots(coordinator.cluster, scores=coordinator.metrics.scores))
    admin = AdminListener(coordinator.drainer, deployment.proxy.admin_port, feed=feed)
    options, stack = coordinator.options, AsyncExitStack()
    try:
        await coordinator.start()
        app = web.Application()
        app.add_routes(monitoring_routes(lambda: coordinator.ready, coordinator.metrics.text))
        try:
            where = listening_at(options.host, options.port)
            await stack.enter_async_context(operators_server(app, **where))
        except OSError as error:
            raise cannot_listen("coordinator.port", options.host, options.port, error) from error
        settled = asyncio.create_task(coordinator.settled())
        ending = asyncio.create_task(ended.wait())
        await asyncio.wait({settled, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ended.is_set():
            return
        await admin.start()  # before, an instance would seem empty that is not
        gc.collect()
        gc.freeze()  # else whatever has been imported is looked through now and then: 0.1 s
        print(f"coordinating on {coordinator.endpoint}", flush=True)
        print(admin.where_to_see, flush=True)
        async with recording(feed, record):
            await ending
    finally:
        await admin.close()
        await stack.aclose()
        await coordinator.close()
