"""`headway launch`: start a deployment's engines here, and stop them cleanly, or all on Ray."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from data_collection.models import resolve_model
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.engine_command import LaunchError, cpu_interpreter, engine_command
from rescheduler.engines.launch_engines import (
    Launched,
    LaunchProgress,
    chosen,
    launched,
    with_bound_addresses,
)
from rescheduler.on_ray.launch_on_ray import launch_on_ray
from rescheduler.on_ray.ray_deployment import RayDeployment

__all__ = ["launch"]

_WATCH_SECONDS = 0.5


def launch(
    config: RayDeployment,
    on: Literal["local", "ray"] = "local",
    print: bool = False,
    logs: Path = Path("runs/launch"),
    serve: bool = False,
    only: Sequence[str] = (),
    at_once: int | None = None,
) -> int:
    """Start the engines of a deployment on this machine and stay in the foreground, or use Ray.

    Each engine runs in a process group of its own and writes a log. Ctrl-C, SIGTERM and a closed
    terminal stop them all. An engine that exits on its own is reported, and the others keep
    running. Exit status: 0 stopped as asked, 130 the same while engines still load, 1 an engine
    exited.

    With --on ray it starts everything on a running Ray cluster, engines, proxies and their
    coordinator, by the counts in the section ``ray`` of the deployment. It ends once all are ready
    and leaves them running: see `headway status`, `headway restart` and `headway stop`.

    Args:
        config: the deployment.
        on: where to start it: ``local`` or ``ray``.
        print: print the engines' commands, start nothing.
        logs: folder of the logs and of ``deployment.yaml``, the deployment with all its defaults;
            with Ray, of this path on every node.
        serve: start the proxy too.
        only: names of the instances to start; all when not given.
        at_once: engines that load at the same time; all when not given.

    Returns:
        The exit status.

    Raises:
        ValueError: an option is out of its range.
        DeploymentError: a host name does not lead to this machine, or the deployment is for the
            other kind of start.
        LaunchError: an engine cannot be started, or all have exited.
    """
    if on == "ray":
        if print or serve or only or at_once is not None:
            raise ValueError("--print, --serve, --only and --at-once are not for --on ray")
        return _launch_on_ray(config, logs)
    if config.ray is not None:
        raise DeploymentError("ray: this deployment has counts, not addresses: use --on ray")
    if at_once is not None and at_once < 1:
        raise ValueError(f"--at-once must be a positive number, not {at_once}")
    if print:
        sys.stdout.write(_commands(config, only) + "\n")
        return 0
    with ExitStack() as stack:
        progress = stack.enter_context(LaunchProgress(logs))
        running = stack.enter_context(launched(config, logs, only, serve, progress.report, at_once))
        progress.finish()
        sys.stdout.write(_summary(running, serve) + "\n")
        sys.stdout.flush()
        return _watch(running)


def _launch_on_ray(deployment: RayDeployment, logs: Path) -> int:
    with LaunchProgress(logs) as progress:
        composed = launch_on_ray(deployment, logs, progress.report)
    servers = [*composed.servers, composed.coordinator]
    width = max(len(server.name) for server in servers)
    for server in servers:
        sys.stdout.write(f"{server.name:<{width}}  {server.url}\n")
    proxy = next(server.url for server in servers if server.role == "proxy")
    sys.stdout.write(
        f"clients use {proxy}/v1 or another proxy; logs in {logs.absolute()} on each node\n"
        "it runs until `headway stop`; `headway status` shows how it is\n"
    )
    return 0


def _commands(deployment: Deployment, only: Sequence[str]) -> str:
    """Return what would be started, for a shell."""
    model, python = resolve_model(deployment.model), cpu_interpreter()
    here = with_bound_addresses(deployment, chosen(deployment, only))
    return "\n\n".join(
        f"# {instance.name}, {instance.role}\n"
        + engine_command(here, instance, model, python).shell()
        for instance in chosen(here, only)
    )


def _summary(running: Launched, serve: bool) -> str:
    deployment = running.deployment
    if serve:
        body = f'{{"model": "{deployment.served_name}", "prompt": "Once", "max_tokens": 32}}'
        how = (
            f"clients use {deployment.proxy_url}/v1, for example:\n"
            f"  curl {deployment.proxy_url}/v1/completions \\\n"
            f"    -H 'Content-Type: application/json' -d '{body}'\n"
            f"see it live: {deployment.admin_url}/ui (its token: see {running.logs}/proxy.log)"
        )
    else:
        how = f"start the proxy with: headway serve --config {running.file}"
    return f"{', '.join(running.servers)}: ready, logs in {running.logs}\n{how}\nCtrl-C stops them"


def _watch(running: Launched) -> int:
    """Report what ends until all has, or until asked to stop; return the exit status.

    Raises:
        LaunchError: the proxy or the last engine ended.
    """
    status = 0
    try:
        while True:
            for server in running.take_ended():
                status = 1
                if server.name == "proxy" or not running.is_running:
                    raise LaunchError(server.why_it_ended())
                print(f"headway launch: {server.why_it_ended()}", file=sys.stderr, flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return status
