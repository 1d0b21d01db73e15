"""The engines of a deployment as processes on this machine: start, watch, stop."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from data_collection.models import resolve_model
from rescheduler.commands.interrupts import ending_signals_held, ending_signals_raised
from rescheduler.engines.bound_addresses import with_bound_addresses
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.engine_command import EngineCommand, engine_command
from rescheduler.engines.launch_checks import (
    LaunchError,
    check_ports,
    check_versions,
    cpu_interpreter,
)
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.server_group import GRACE_SECONDS, ServerGroup, Stage

__all__ = ["Launched", "chosen", "launched"]

_PROXY = "proxy"
_FILE = "deployment.yaml"


class Launched(ServerGroup):
    """Engines, and perhaps a proxy, that were started here; the proxy is called ``proxy``.

    Attributes:
        deployment: what they are.
        logs: folder of their logs, one per server, and of ``deployment.yaml``.
    """

    def __init__(
        self,
        deployment: Deployment,
        logs: Path,
        servers: Sequence[ServerProcess],
        report: Callable[[str, Stage], None],
    ) -> None:
        super().__init__(servers, report)
        self.deployment = deployment
        self.logs = logs

    @property
    def file(self) -> Path:
        """The deployment with all its defaults, for `headway serve`."""
        return self.logs / _FILE

    def close(self) -> None:
        """Stop all servers, the proxy before the engines, and wait until they are gone."""
        self._wanted.clear()
        with ending_signals_held():  # an impatient Ctrl-C would leave engines behind
            if _PROXY in self.servers:  # it still needs the engines for what runs
                self.stop([_PROXY], self.deployment.proxy.shutdown_seconds + GRACE_SECONDS)
            self.stop([name for name in self.servers if name != _PROXY])


@contextmanager
def launched(
    deployment: Deployment,
    logs: Path,
    only: Sequence[str] = (),
    serve: bool = False,
    report: Callable[[str, Stage], None] = lambda name, stage: None,
    at_once: int | None = None,
) -> Iterator[Launched]:
    """Start a deployment's engines on this machine; they are ready in the body, gone after it.

    Args:
        deployment: what to start.
        logs: folder of the logs and of ``deployment.yaml``; created if missing.
        only: names of the instances to start; all when empty.
        serve: start the deployment's proxy too.
        report: called with a server's name at each of its stages.
        at_once: how many engines load at the same time; None: all.

    Raises:
        DeploymentError: a host name does not lead to this machine.
        LaunchError: an engine cannot be started, or ended while it loaded.
        ValueError: the model is unknown, see `data_collection.models.resolve_model`.
    """
    here = with_bound_addresses(deployment, chosen(deployment, only))
    instances = chosen(here, only)
    check_versions()
    check_ports(here, instances, serve)
    model, python = resolve_model(deployment.model), cpu_interpreter()
    logs.mkdir(parents=True, exist_ok=True)
    write_deployment(deployment, logs / _FILE)
    servers = [
        ServerProcess(
            instance.name,
            engine_command(here, instance, model, python),
            instance.url,
            logs / f"{instance.name}.log",
        )
        for instance in instances
    ]
    if serve:
        file = str(logs / _FILE)
        command = [sys.executable, "-m", "rescheduler", "serve", "--config", file]
        log = logs / "proxy.log"
        servers.append(ServerProcess(_PROXY, EngineCommand(command, {}), deployment.proxy_url, log))
    running = Launched(deployment, logs, servers, report)
    with ending_signals_raised(), closing(running):
        running.start([instance.name for instance in instances], at_once)
        if serve:
            running.start([_PROXY])
        yield running


def chosen(deployment: Deployment, only: Sequence[str]) -> list[Instance]:
    """Return the instances with these names, in the file's order; all when none is named.

    Raises:
        LaunchError: an unknown name.
    """
    known = [instance.name for instance in deployment.instances]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise LaunchError(f"no instance {unknown[0]!r}; there are {', '.join(known)}")
    return [instance for instance in deployment.instances if not only or instance.name in only]
