"""`headway ray status`, `restart` and `stop`: a deployment that runs on a Ray cluster."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rescheduler.commands.event_loop import ending_signals_held
from rescheduler.engines.engine_command import LaunchError
from rescheduler.engines.launch_engines import LaunchProgress
from rescheduler.engines.launch_process import START_SECONDS
from rescheduler.on_ray.launch_on_ray import SHUTDOWN_SECONDS, take_down
from rescheduler.on_ray.ray_cluster import NoAnswerError, RayCluster, connected, wait_until
from rescheduler.on_ray.ray_deployment import COORDINATOR, RayDeployment, cluster_of
from rescheduler.on_ray.server_actor import ServerState
from rescheduler.serving.admin_client import Listed

__all__ = ["restart", "status", "stop"]

_STATUS_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
_AWAY_SECONDS = 300.0
_POLL_SECONDS = 0.5
_READY_SECONDS = START_SECONDS + _AWAY_SECONDS + SHUTDOWN_SECONDS


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
        names = _running(cluster, namespace)
        states: dict[str, ServerState] = cluster.ask(names, "state", _STATUS_SECONDS)
        instances: list[Listed] = []
        if COORDINATOR in states:
            asked = cluster.ask([COORDINATOR], "coordinate", _STATUS_SECONDS)
            instances = asked.get(COORDINATOR, [])
    listed = {one.name: one for one in instances}
    rows = [_row(name, states.get(name), listed.get(name)) for name in names]
    table = Table("name", "state", "address", "restarts", "requests", box=box.SIMPLE)
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for name, state in states.items():
        if state.past.why and state.stage != "ready":
            print(f"{name}, on {state.server.address}: {state.past.why}")
    return 0 if all(row[1] == "ready" for row in rows) else 1


def _row(name: str, state: ServerState | None, listed: Listed | None) -> tuple[str, ...]:
    if state is None:
        return name, "no answer", "", "", ""
    stage: str = state.stage
    if stage == "ready" and listed is not None:
        if listed.draining:
            stage = "draining"
        elif listed.state != "closed":
            stage = "out of service"
    requests = str(listed.requests) if listed is not None else ""
    return name, stage, state.server.url, str(max(0, state.past.starts - 1)), requests


def restart(
    config: RayDeployment | None = None, only: Sequence[str] = (), drain_seconds: float = 600.0
) -> None:
    """Restart the engines and proxies of a deployment on a Ray cluster, one after another.

    Each engine is drained first: its requests move to others, and those that cannot move finish.
    Once it is empty it is restarted, receives requests again, and the next one follows. Then each
    proxy takes no more requests, ends those that run, and starts again. Ctrl-C leaves the engine
    that is being restarted drained: `headway ray restart --only` that one goes on.

    Args:
        config: the deployment, as of `headway ray status`.
        only: names of engines and proxies; all when not given.
        drain_seconds: longest time for an engine to become empty; then what runs there is computed
            again elsewhere, or ends with an error if it cannot be.

    Raises:
        LaunchError: no such cluster, deployment or server; a server that does not come back: the
            others go on as they are.
    """
    address, namespace = cluster_of(config)
    with connected(address, namespace) as cluster:
        names = _running(cluster, namespace)
        engines = [one.name for one in _asked(cluster, COORDINATOR, "coordinate")]
        known = [*engines, *(name for name in names if name.startswith("proxy-"))]
        unknown = [name for name in only if name not in known]
        if unknown:
            raise LaunchError(f"no engine or proxy {unknown[0]!r}; there are {', '.join(known)}")
        for name in only or known:
            if name in engines:
                _restart(cluster, name, drain_seconds)
            else:
                _restart_proxy(cluster, name)


def _restart(cluster: RayCluster, name: str, drain_seconds: float) -> None:
    coordinate = partial(_asked, cluster, COORDINATOR, "coordinate")

    def listed() -> Listed:
        found: list[Listed] = coordinate()
        return next(one for one in found if one.name == name)

    _say(name, "drains")
    coordinate("drain", name)
    try:
        wait_until(lambda: not listed().requests, drain_seconds, f"{name} is not empty")
    except LaunchError as error:
        _say(name, f"is restarted with {listed().requests} requests: {error}")
    _start_again(cluster, name, "; it stays drained")
    unready = f"{name} does not come into service"
    wait_until(lambda: listed().state == "closed", _READY_SECONDS, unready)
    coordinate("undrain", name)
    _say(name, "is in service again")


def _restart_proxy(cluster: RayCluster, name: str) -> None:
    """Restart a proxy, which first ends what runs; a load balancer sends clients to the others."""
    _say(name, "takes no more requests, and ends those that run")
    _start_again(cluster, name, "")
    _say(name, "serves again")


def _start_again(cluster: RayCluster, name: str, more: str) -> None:
    """Have a server stopped and started, and wait until it is ready."""

    def is_back() -> bool:
        state: ServerState = _asked(cluster, name, "state")
        if state.past.failures:
            raise LaunchError(f"{state.past.why}\n(on node {state.server.address}{more})")
        return state.past.starts > before and state.stage == "ready"

    before: int = _asked(cluster, name, "restart")
    _say(name, "restarts")
    wait_until(is_back, _READY_SECONDS, f"{name} is not ready{more}")


def _say(name: str, what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {name} {what}", flush=True)


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


def _running(cluster: RayCluster, namespace: str) -> list[str]:
    names = cluster.names()
    if not names:
        raise LaunchError(f"no deployment runs in namespace {namespace!r}: `headway ray launch`")
    return names


def stop(config: RayDeployment | None = None) -> None:
    """Stop a deployment that runs on a Ray cluster, and give back what it has reserved.

    The proxies go first: running requests have `proxy.shutdown_seconds` to finish.

    Args:
        config: the deployment, as of `headway ray status`.

    Raises:
        LaunchError: there is no such cluster, or no such deployment in it.
    """
    address, namespace = cluster_of(config)
    with connected(address, namespace) as cluster:
        if not cluster.reserved():
            _running(cluster, namespace)
        with LaunchProgress(Path()) as progress, ending_signals_held():
            take_down(cluster, progress.report)
