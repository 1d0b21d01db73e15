"""`headway status`: how a deployment on a Ray cluster is."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from rescheduler.engines.launch_checks import LaunchError
from rescheduler.on_ray.composition import COORDINATOR
from rescheduler.on_ray.ray_cluster import NoAnswerError, RayCluster, connected
from rescheduler.on_ray.ray_deployment import RayDeployment, cluster_of
from rescheduler.on_ray.server_actor import ServerState
from rescheduler.serving.admin_client import Listed

__all__ = ["status"]

_ANSWER_SECONDS = 10.0


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
        states: dict[str, ServerState] = cluster.ask(names, "state", seconds=_ANSWER_SECONDS)
        listed = {one.name: one for one in _listed(cluster)}
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


def _listed(cluster: RayCluster) -> Sequence[Listed]:
    try:
        found: Sequence[Listed] = cluster.ask_one(COORDINATOR, "instances", seconds=_ANSWER_SECONDS)
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
