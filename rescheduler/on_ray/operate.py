"""See, restart and stop what runs on a Ray cluster."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rescheduler.commands.event_loop import ending_signals_held
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.engine_command import LaunchError
from rescheduler.engines.launch_engines import LaunchProgress
from rescheduler.on_ray.composition import COORDINATOR
from rescheduler.on_ray.launch_on_ray import take_down
from rescheduler.on_ray.ray_cluster import NoAnswerError, RayCluster, connected
from rescheduler.on_ray.ray_deployment import RayDeployment, cluster_of
from rescheduler.on_ray.server_actor import ServerState
from rescheduler.serving.admin_client import Listed

__all__ = ["restart", "status", "stop"]


_STATUS_SECONDS = 10.0


def status(config: RayDeployment | None = None) -> int:
    """Show the engines, proxies and coordinator of a deployment that runs on a Ray cluster.

    For each: its state, its address on its node, how often it was restarted, and how many requests
    run there, as far as the coordinator knows. Exit status: 0 when all are in service, 1 when not.

    Args:
        config: the deployment, for the address of its cluster and its namespace; without it, the
            cluster that this machine belongs to, and ``headway``.

    Returns:
        The exit status.

    Raises:
        LaunchError: there is no such cluster, or no such deployment in it.
    """
    address, namespace = cluster_of(config)
    with connected(address, namespace) as cluster:
        names = cluster.names()
        if not names:
            raise LaunchError(
                f"no deployment runs in namespace {namespace!r}: `headway launch --on ray`"
            )
        states: dict[str, ServerState] = cluster.ask(names, "state", seconds=_STATUS_SECONDS)
        listed = {one.name: one for one in _instances(cluster)}
    rows = [_row(name, states.get(name), listed.get(name)) for name in names]
    table = Table(box=box.SIMPLE)
    for title in ("name", "state", "address", "restarts", "requests"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for name, state in states.items():
        if state.why and state.stage != "ready":
            print(f"{name}, on {state.server.address}: {state.why}")
    return 0 if all(row[1] == "ready" for row in rows) else 1


def _instances(cluster: RayCluster) -> Sequence[Listed]:
    try:
        found: Sequence[Listed] = cluster.ask_one(COORDINATOR, "instances", seconds=_STATUS_SECONDS)
    except NoAnswerError:
        return []
    return found


def _row(name: str, state: ServerState | None, listed: Listed | None) -> tuple[str, ...]:
    if state is None:
        return name, "no answer", "", "", ""
    requests = str(listed.requests) if listed is not None else ""
    stage: str = state.stage
    if stage == "ready" and listed is not None:
        if listed.draining:
            stage = "draining"
        elif listed.state != "closed":
            stage = "out of service"
    return name, stage, state.server.url, str(max(0, state.starts - 1)), requests


_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.5
_AWAY_SECONDS = 300.0
_READY_SECONDS = 2000.0


def restart(
    config: RayDeployment | None = None, only: Sequence[str] = (), drain_seconds: float = 3600.0
) -> None:
    """Restart the engines of a deployment on a Ray cluster, one after another.

    Clients notice nothing where requests can move: see docs/serve.md for those that cannot.
    Each is drained first: its requests move to others, and those that cannot move finish. Once it
    is empty it is restarted, receives requests again, and the next one follows. Ctrl-C leaves the
    engine that is being restarted drained: `headway restart --only` that one goes on.

    Args:
        config: the deployment, for the address of its cluster and its namespace; without it, the
            cluster that this machine belongs to, and ``headway``.
        only: names of the engines; all when not given.
        drain_seconds: longest time for an engine to become empty.

    Raises:
        LaunchError: no such cluster, deployment or engine; an engine that does not become empty or
            does not come back.
    """
    address, namespace = cluster_of(config)
    with connected(address, namespace) as cluster:
        if COORDINATOR not in cluster.names():
            raise LaunchError(f"no deployment runs in namespace {namespace!r}")
        deployment: Deployment = _asked(cluster, COORDINATOR, "deployment")
        known = [instance.name for instance in deployment.instances]
        unknown = [name for name in only if name not in known]
        if unknown:
            raise LaunchError(f"no engine {unknown[0]!r}; there are {', '.join(known)}")
        for name in only or known:
            _restart(cluster, name, drain_seconds)


def _restart(cluster: RayCluster, name: str, drain_seconds: float) -> None:
    def is_empty() -> bool:
        return not _listed(cluster, name).requests

    def is_back() -> bool:
        state: ServerState = _asked(cluster, name, "state")
        if state.failures:
            raise LaunchError(f"{state.why}\n(on node {state.server.address}; it stays drained)")
        return state.starts > before and state.stage == "ready"

    def is_in_service() -> bool:
        return _listed(cluster, name).state == "closed"

    _say(f"{name} drains")
    _asked(cluster, COORDINATOR, "drain", name)
    _wait_until(is_empty, drain_seconds, f"{name} is not empty, and stays drained")
    before: int = _asked(cluster, name, "restart")
    _say(f"{name} restarts")
    _wait_until(is_back, _READY_SECONDS, f"{name} is not ready, and stays drained")
    _wait_until(is_in_service, _READY_SECONDS, f"{name} does not come into service")
    _asked(cluster, COORDINATOR, "undrain", name)
    _say(f"{name} is in service again")


def _listed(cluster: RayCluster, name: str) -> Listed:
    """How the coordinator sees an engine."""
    listed: list[Listed] = _asked(cluster, COORDINATOR, "instances")
    return next(one for one in listed if one.name == name)


def _asked(cluster: RayCluster, name: str, method: str, *arguments: str) -> Any:
    """Call a method of an actor that may be restarting.

    Raises:
        LaunchError: it does not answer for long.
    """
    deadline = time.monotonic() + _AWAY_SECONDS
    while True:
        try:
            return cluster.ask_one(name, method, *arguments, seconds=_ANSWER_SECONDS)
        except NoAnswerError as error:
            if time.monotonic() > deadline:
                raise LaunchError(f"{error}, after {_AWAY_SECONDS:g} s") from error
        time.sleep(_POLL_SECONDS)


def _wait_until(holds: Callable[[], bool], seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise LaunchError(f"{complaint}, after {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def stop(config: RayDeployment | None = None) -> None:
    """Stop a deployment that runs on a Ray cluster, and give back what it has reserved.

    The proxies go first: running requests have `proxy.shutdown_seconds` to finish.

    Args:
        config: the deployment, for the address of its cluster and its namespace; without it, the
            cluster that this machine belongs to, and ``headway``.

    Raises:
        LaunchError: there is no such cluster, or no such deployment in it.
    """
    address, namespace = cluster_of(config)
    with connected(address, namespace) as cluster:
        if not cluster.names() and not cluster.reserved():
            raise LaunchError(f"no deployment runs in namespace {namespace!r}")
        with LaunchProgress(Path()) as progress, ending_signals_held():
            take_down(cluster, progress.report)
