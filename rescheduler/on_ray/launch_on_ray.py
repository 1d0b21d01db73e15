"""Bring a deployment up on a Ray cluster, and take it down."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rescheduler.commands.event_loop import ending_signals_held, ending_signals_raised
from rescheduler.engines.deployment import DeploymentError
from rescheduler.engines.engine_command import LaunchError
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import GRACE_SECONDS, Stage
from rescheduler.on_ray.composition import (
    COORDINATOR,
    Composition,
    Place,
    Server,
    compose,
    places,
    ports_needed,
)
from rescheduler.on_ray.node_survey import Survey, questions, survey, versions_differ
from rescheduler.on_ray.ray_cluster import NoAnswerError, RayCluster, connected
from rescheduler.on_ray.ray_deployment import RayDeployment
from rescheduler.on_ray.server_actor import ServerState

__all__ = ["ACTOR_SECONDS", "launch_on_ray", "take_down"]

ACTOR_SECONDS = 120.0
"""Time that a new actor has to begin, and to answer."""
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 10.0
_SHUTDOWN_SECONDS = 600.0

Report = Callable[[str, Stage], None]


def launch_on_ray(deployment: RayDeployment, logs: Path, report: Report) -> Composition:
    """Start a deployment's engines, coordinator and proxies; return once all are ready.

    They go on when this process ends. If anything fails, or at a Ctrl-C, nothing stays behind.

    Args:
        deployment: with a section ``ray``.
        logs: folder on every node for its logs; here also for ``deployment.yaml``.
        report: called with a server's name at each of its stages.

    Raises:
        DeploymentError: there is no section ``ray``.
        LaunchError: there is no cluster, not enough of it, or a server that cannot start.
    """
    options = deployment.ray
    if options is None:
        raise DeploymentError(
            "ray: --on ray needs this section, with the counts of instances: see docs/deploy-ray.md"
        )
    logs = logs.expanduser().absolute()
    deployment = _with_absolute_paths(deployment)
    with connected(options.address, options.namespace) as cluster, ending_signals_raised():
        where = places(options)
        bundles = [place.bundle for place in where]
        cluster.refuse_running()
        ours = False
        try:
            with ending_signals_held():
                cluster.reserve(options, bundles)
                ours = True  # before, there may be another's
            nodes = cluster.where_reserved(options, bundles)
            composed = _composed(cluster, deployment, where, nodes)
            logs.mkdir(parents=True, exist_ok=True)
            write_deployment(composed.deployment, logs / "deployment.yaml")
            _start(cluster, composed, str(logs), report)
        except BaseException:
            if ours:
                with ending_signals_held():  # an impatient Ctrl-C would leave engines behind
                    take_down(cluster, report)
            raise
    return composed


def take_down(cluster: RayCluster, report: Report) -> list[str]:
    """Stop what runs, the proxies first, and give back its resources; return whom it was.

    Raises:
        LaunchError: something does not end.
    """
    names = cluster.names()
    answering = cluster.ask(names, "state", seconds=_ANSWER_SECONDS)
    proxies = [name for name in names if name.startswith("proxy-")]
    others = [name for name in names if name not in proxies]
    for group, seconds in ((proxies, _SHUTDOWN_SECONDS), (others, 4 * GRACE_SECONDS)):
        for name in group:
            report(name, "stopping")
        asked = [name for name in group if name in answering]  # others end with their actors
        cluster.ask(asked, "stop", seconds=seconds)
        cluster.kill(group)
        for name in group:
            report(name, "stopped")
    cluster.release()
    return names


def _with_absolute_paths(deployment: RayDeployment) -> RayDeployment:
    """Let relative paths mean the same on every node: they are of this process's folder."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    replace = msgspec.structs.replace
    engine, proxy, model = deployment.engine, deployment.proxy, deployment.model
    is_folder = Path(model).expanduser().is_dir()
    return replace(
        deployment,
        model=str(absolute(model)) if is_folder else model,
        served_model_name=deployment.served_name,
        keys=absolute(deployment.keys),
        engine=replace(engine, checkpoint=absolute(engine.checkpoint)),
        proxy=replace(proxy, engine_key_file=absolute(proxy.engine_key_file)),
    )


def _composed(
    cluster: RayCluster, deployment: RayDeployment, where: Sequence[Place], at: Sequence[str]
) -> Composition:
    """Ask the nodes of the places what is there, and make one deployment of it."""
    nodes, here = cluster.nodes(), cluster.here
    gone = {*at, here} - set(nodes)
    if gone:
        raise LaunchError(f"the cluster has just lost the node {gone.pop()}: launch again")
    addresses = [nodes[node].address for node in at]
    ids = {nodes[here].address: here, **dict(zip(addresses, at, strict=True))}
    asked = questions(deployment, where, addresses, nodes[here].address)
    begun = {node: cluster.on_node(ids[node], survey, one) for node, one in asked.items()}
    surveys: dict[str, Survey] = cluster.answers(begun)
    problems = [
        f"node {address}: {problem}" for address, one in surveys.items() for problem in one.problems
    ] + versions_differ(surveys)
    if problems:
        raise LaunchError("\n  ".join(["the nodes cannot run this:", *problems]))
    free = set.intersection(*(one.free for one in surveys.values()))
    count = ports_needed(where)
    if not free:
        raise LaunchError(f"no {count} adjacent ports are free on all nodes")
    ports = range(min(free), min(free) + count)
    return compose(deployment, where, addresses, nodes[here].address, ports)


def _start(cluster: RayCluster, composed: Composition, logs: str, report: Report) -> None:
    """Start all servers: the engines first, which the others need."""
    engines = [n for n, server in enumerate(composed.servers) if server.role != "proxy"]
    for n in engines:
        report(composed.servers[n].name, "starting")
        cluster.start(composed.servers[n], composed.deployment, logs, place=n)
    _until_ready(cluster, [composed.servers[n] for n in engines], report)
    report(COORDINATOR, "starting")
    cluster.start(composed.coordinator, composed.deployment, logs)
    _until_ready(cluster, [composed.coordinator], report)
    proxies = range(len(engines), len(composed.servers))
    for n in proxies:
        report(composed.servers[n].name, "starting")
        cluster.start(composed.servers[n], composed.deployment, logs, place=n)
    _until_ready(cluster, [composed.servers[n] for n in proxies], report)


def _until_ready(cluster: RayCluster, servers: Sequence[Server], report: Report) -> None:
    """Wait until all are ready.

    Raises:
        LaunchError: one cannot start; shows the end of its log.
    """
    waiting = {server.name: server for server in servers}
    heard = dict.fromkeys(waiting, time.monotonic())
    while waiting:
        states: dict[str, ServerState] = cluster.ask(
            list(waiting), "state", seconds=_ANSWER_SECONDS
        )
        now = time.monotonic()
        for name, state in states.items():
            heard[name] = now
            if state.failures:
                raise LaunchError(f"{state.why}\n(on node {state.server.address})")
            if state.stage == "ready":
                del waiting[name]
                report(name, "ready")
        silent = [name for name in waiting if now - heard[name] > ACTOR_SECONDS]
        if silent:
            raise LaunchError(_why_silent(cluster, silent[0], waiting[silent[0]].address))
        time.sleep(_POLL_SECONDS)


def _why_silent(cluster: RayCluster, name: str, address: str) -> str:
    try:
        cluster.ask_one(name, "state", seconds=_ANSWER_SECONDS)
    except NoAnswerError as error:
        return f"the actor on node {address} does not answer: {error}"
    return f"{name} on node {address} answers too slowly, after {ACTOR_SECONDS:g} s: launch again"
