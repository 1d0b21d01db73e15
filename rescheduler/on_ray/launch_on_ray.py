"""`headway ray`: launch, see, restart and stop a deployment on a Ray cluster."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from data_collection.files import find_shipped
from data_collection.versions import installed_version, vllm_version
from rescheduler.commands.event_loop import ending_signals_held, ending_signals_raised
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.engine_command import (
    LaunchError,
    check_emulation,
    check_versions,
    why_port_is_not_free,
)
from rescheduler.engines.launch_local import free_blocks, write_deployment
from rescheduler.engines.launch_process import GRACE_SECONDS, START_SECONDS, Stage
from rescheduler.engines.launch_progress import LaunchProgress
from rescheduler.on_ray.ray_cluster import NoAnswerError, RayCluster, connected, wait_until
from rescheduler.on_ray.ray_deployment import (
    COORDINATOR,
    Place,
    RayDeployment,
    Server,
    cluster_of,
    compose,
    fixed_proxy_ports,
    places,
    ports_needed,
)
from rescheduler.on_ray.server_actor import ServerState
from rescheduler.serving.admin_client import Listed

_ACTOR_SECONDS = 120.0
"""Time that a new actor has to begin, and to answer."""
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 10.0
SHUTDOWN_SECONDS = 3600.0
"""Time that a proxy has to end, more than its own `proxy.shutdown_seconds`."""
_LOOPBACK = "127.0.0.1"

Report = Callable[[str, Stage], None]


def launch(config: RayDeployment, logs: Path = Path("runs/launch")) -> None:
    """Start a deployment's engines, coordinator and proxies on a running Ray cluster.

    It ends once all are ready and leaves them running: see `headway ray status`, `headway ray
    restart` and `headway ray stop`. If anything fails, or at a Ctrl-C, nothing stays behind.

    Args:
        config: the deployment, with a section ``ray``.
        logs: folder of the logs on every node; here also of ``deployment.yaml``, the deployment
            with its addresses and all its defaults.

    Raises:
        DeploymentError: there is no section ``ray``.
        LaunchError: there is no cluster, not enough of it, or a server that cannot start.
    """
    logs = logs.expanduser().absolute()
    with LaunchProgress(logs) as progress:
        servers = _launched(config, logs, progress.report)
    width = max(len(server.name) for server in servers)
    for server in servers:
        print(f"{server.name:<{width}}  {server.url}")
    proxy = next(server.url for server in servers if server.role == "proxy")
    print(f"clients use {proxy}/v1 or another proxy; logs in {logs} on each node")
    print("it runs until `headway ray stop`; `headway ray status` shows how it is")


def _launched(deployment: RayDeployment, logs: Path, report: Report) -> list[Server]:
    options = deployment.ray
    if options is None:
        raise DeploymentError(
            "ray: a Ray cluster needs this section, with the counts of instances: see "
            "docs/deploy-ray.md"
        )
    deployment = _with_absolute_paths(deployment)
    with connected(options.address, options.namespace) as cluster, ending_signals_raised():
        where = places(options)
        bundles = [place.bundle for place in where]
        ours = False
        try:
            with ending_signals_held():
                cluster.reserve(bundles)
                ours = True  # before, there may be another's
            nodes = cluster.where_reserved(options, bundles)
            composed, servers = _composed(cluster, deployment, where, nodes)
            logs.mkdir(parents=True, exist_ok=True)
            write_deployment(composed, logs / "deployment.yaml")
            for roles in (("prefill", "decode"), ("coordinator",), ("proxy",)):
                started = {n: one for n, one in enumerate(servers) if one.role in roles}
                for n, server in started.items():
                    report(server.name, "starting")
                    place = n if n < len(where) else None
                    cluster.start(server, composed, str(logs), place)
                _until_ready(cluster, list(started.values()), report)
        except BaseException:
            if ours:
                with ending_signals_held():  # an impatient Ctrl-C would leave engines behind
                    take_down(cluster, report)
            raise
    return servers


def take_down(cluster: RayCluster, report: Report) -> None:
    """Stop what runs, the proxies first, and give back its resources.

    Raises:
        LaunchError: something does not end.
    """
    names = cluster.names()
    answering = cluster.ask(names, "state", seconds=_ANSWER_SECONDS)
    proxies = [name for name in names if name.startswith("proxy-")]
    others = [name for name in names if name not in proxies]
    for group, seconds in ((proxies, SHUTDOWN_SECONDS), (others, 4 * GRACE_SECONDS)):
        for name in group:
            report(name, "stopping")
        asked = [name for name in group if name in answering]  # others end with their actors
        cluster.ask(asked, "stop", seconds=seconds)
        cluster.kill(group)
        for name in group:
            report(name, "stopped")
    cluster.release()


def _with_absolute_paths(deployment: RayDeployment) -> RayDeployment:
    """Let relative paths mean the same on every node: they are of this process's folder."""

    def absolute(path: str | None) -> str | None:
        if path is None or find_shipped(path) != Path(path):  # which every node has
            return path
        return str(Path(path).expanduser().absolute())

    replace = msgspec.structs.replace
    engine, proxy, model = deployment.engine, deployment.proxy, deployment.model
    emulate = engine.emulate
    if emulate is not None:
        profile = emulate.profile
        is_file = profile is not None and Path(profile).expanduser().is_file()
        emulate = replace(
            emulate,
            profile=absolute(profile) if is_file else profile,
            logs=absolute(emulate.logs),
        )
    is_folder = Path(model).expanduser().is_dir()
    return replace(
        deployment,
        model=str(absolute(model)) if is_folder else model,
        served_model_name=deployment.served_name,
        keys=absolute(deployment.keys),
        engine=replace(engine, checkpoint=absolute(engine.checkpoint), emulate=emulate),
        proxy=replace(proxy, engine_key_file=absolute(proxy.engine_key_file)),
    )


def _composed(
    cluster: RayCluster, deployment: RayDeployment, where: Sequence[Place], at: Sequence[str]
) -> tuple[Deployment, list[Server]]:
    """Ask the nodes of the places what is there, and make one deployment of it."""
    nodes, here = cluster.nodes(), cluster.here
    gone = {*at, here} - set(nodes)
    if gone:
        raise LaunchError(f"the cluster has just lost the node {gone.pop()}: launch again")
    addresses, at_here = [nodes[node].address for node in at], nodes[here].address
    ids = {at_here: here, **dict(zip(addresses, at, strict=True))}
    surveys: dict[str, Survey] = cluster.on_nodes(
        ids, survey, deployment, where, addresses, at_here
    )
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
    return compose(deployment, where, addresses, at_here, ports)


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
            if state.past.failures:
                raise LaunchError(f"{state.past.why}\n(on node {state.server.address})")
            if state.stage == "ready":
                del waiting[name]
                report(name, "ready")
        silent = [name for name in waiting if now - heard[name] > _ACTOR_SECONDS]
        if silent:
            raise LaunchError(_why_silent(cluster, silent[0], waiting[silent[0]].address))
        time.sleep(_POLL_SECONDS)


def _why_silent(cluster: RayCluster, name: str, address: str) -> str:
    try:
        cluster.ask_one(name, "state", seconds=_ANSWER_SECONDS)
    except NoAnswerError as error:
        return f"the actor on node {address} does not answer: {error}"
    return f"{name} on node {address} answers too slowly, after {_ACTOR_SECONDS:g} s: launch again"


class Survey(NamedTuple):
    """What was found on a node.

    Attributes:
        versions: of what has to be the same everywhere.
        free: where adjacent free ports begin.
        problems: what prevents a start, in words.
    """

    versions: dict[str, str | None]
    free: set[int]
    problems: list[str]


def survey(
    address: str,
    deployment: RayDeployment,
    where: Sequence[Place],
    addresses: Sequence[str],
    here: str,
) -> Survey:
    """Look at this node for what is to run there, and for the coordinator if it is ``here``."""
    proxy, first = deployment.proxy, sum(place.role != "proxy" for place in where)
    engines = address in addresses[:first]
    needed = {"keys": deployment.keys, "proxy.engine_key_file": proxy.engine_key_file}
    versions, problems = {"Headway": installed_version("headway")}, []
    if engines:
        needed["engine.checkpoint"] = deployment.engine.checkpoint
        nixl = installed_version("nixl") or installed_version("nixl-cu12")
        versions |= {"vLLM": vllm_version(), "NIXL": nixl}
        try:
            check_versions()
            check_emulation(deployment)
        except LaunchError as error:
            problems.append(str(error))
    wanted: list[tuple[str, str, int]] = []
    if proxy.port:
        fixed = fixed_proxy_ports(proxy.port, addresses[first:])
        proxies = zip(where[first:], addresses[first:], fixed, strict=True)
        wanted += [
            (f"{one.name} (proxy.port)", at, port) for one, at, port in proxies if at == address
        ]
    if proxy.admin_port and address == here:
        wanted.append(("proxy.admin_port", _LOOPBACK, proxy.admin_port))
    for key, host, port in wanted:
        taken = why_port_is_not_free(host, port)
        if taken:
            problems.append(f"{key}: {host}:{port} {taken}")
    for key, path in needed.items():
        if path is not None and not find_shipped(path).exists():
            problems.append(f"{key}: {path} does not exist")
    try:
        if address in addresses:
            model_to_load(deployment)
    except (ValueError, OSError, RuntimeError) as error:
        problems.append(f"model: {error}")
    count = ports_needed(where)
    free = set(free_blocks(address, count))
    free &= set(free_blocks(_LOOPBACK, count))  # where the coordinator is operated
    return Survey(versions, free, problems)


def versions_differ(surveys: Mapping[str, Survey]) -> list[str]:
    """Return which versions are not the same on all nodes, which are given by their addresses."""
    differing = []
    for what in ("Headway", "vLLM", "NIXL"):
        found: dict[str | None, list[str]] = {}
        for address, one in surveys.items():
            if what in one.versions:
                found.setdefault(one.versions[what], []).append(address)
        if len(found) > 1:
            said = ", ".join(f"{version or 'none'} on {at[0]}" for version, at in found.items())
            differing.append(f"{what} must be the same on all nodes: {said}")
    return differing


_STATUS_SECONDS = 10.0
_STOP_SECONDS = 30.0
_AWAY_SECONDS = 300.0
_STATUS_POLL_SECONDS = 0.5
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
        only: Restart only these engines and proxies. If not set, all.
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
            return cluster.ask_one(name, method, *arguments, seconds=_STOP_SECONDS)
        except NoAnswerError as error:
            if time.monotonic() > deadline:
                raise LaunchError(f"{error}, after {_AWAY_SECONDS:g} s") from error
        time.sleep(_STATUS_POLL_SECONDS)


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
