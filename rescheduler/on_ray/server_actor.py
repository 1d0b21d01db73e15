"""The actor that keeps an engine, a proxy or the coordinator running on its node."""

import importlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_collection.models import resolve_model
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.engine_command import (
    EngineCommand,
    LaunchError,
    check_ports,
    cpu_interpreter,
    engine_command,
)
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import GRACE_SECONDS, ServerProcess
from rescheduler.on_ray.composition import Server
from rescheduler.on_ray.kept_server import KeptServer, KeptStage
from rescheduler.serving.admin_client import (
    Listed,
    drain_instance,
    listed_instances,
    undrain_instance,
)

__all__ = ["ServerActor", "ServerState"]


@dataclass(frozen=True)
class ServerState:
    """How a server is.

    Attributes:
        server: which one.
        stage: what it does.
        starts: how often it was started, also by actors before this one.
        failures: starts in a row after which it was not ready.
        why: how it last ended by itself, or cannot be started; empty: it never did.
        log: file of its output, on its node.
    """

    server: Server
    stage: KeptStage
    starts: int
    failures: int
    why: str
    log: str


class ServerActor:
    """Runs one server's command as a process that ends with this one, however this one ends.

    Ray starts the actor again where it dies, with the same arguments: the server comes back at
    the same address.

    Args:
        server: which one.
        deployment: of all servers.
        logs: folder on this node, for the log and the deployment's file.
    """

    def __init__(self, server: Server, deployment: Deployment, logs: str) -> None:
        self._server, self._deployment = server, deployment
        folder = Path(logs)
        self._log = folder / f"{server.name}.log"
        self._file = folder / f"{server.name}.yaml"
        command = _command(server, deployment, self._file)
        process = ServerProcess(server.name, command, server.url, self._log, tethered=True)
        grace = GRACE_SECONDS
        if server.role == "proxy":
            grace += deployment.proxy.shutdown_seconds
        ray = importlib.import_module("ray")
        self._address = ray.util.get_node_ip_address()
        starts = folder / f"{server.name}.starts"
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            with suppress(OSError):  # what prevents it prevents the start, too, which says so
                starts.unlink()  # of an earlier deployment
        self._kept = KeptServer(process, self._prepare, grace, starts)
        self._kept.begin()

    def state(self) -> ServerState:
        """Return how its server is."""
        kept = self._kept
        return ServerState(
            self._server, kept.stage, kept.starts, kept.failures, kept.why, str(self._log)
        )

    def deployment(self) -> Deployment:
        """Return the deployment."""
        return self._deployment

    def restart(self) -> int:
        """Stop the server and start it again; return how often it was started before."""
        return self._kept.restart()

    def stop(self) -> None:
        """Stop the server; its processes are gone afterwards."""
        self._kept.stop()

    def instances(self) -> list[Listed]:
        """Return the engines as the coordinator sees them; of its actor only."""
        return listed_instances(self._deployment.admin_url)

    def drain(self, name: str) -> None:
        """Have the coordinator drain an engine; of its actor only."""
        drain_instance(self._deployment.admin_url, name)

    def undrain(self, name: str) -> None:
        """Have the coordinator let requests come to an engine again; of its actor only."""
        undrain_instance(self._deployment.admin_url, name)

    def _prepare(self) -> None:
        """Refuse a start that cannot succeed, and write the file that the server reads."""
        if self._address != self._server.address:
            raise LaunchError(
                f"{self._server.name} was on {self._server.address}, which the cluster has lost, "
                f"and cannot be reached on {self._address}: `headway stop`, and launch again"
            )
        instances = [i for i in self._deployment.instances if i.name == self._server.name]
        check_ports(self._deployment, instances, serve=False)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_deployment(self._deployment, self._file)


def _command(server: Server, deployment: Deployment, file: Path) -> EngineCommand:
    if server.role in ("prefill", "decode"):
        (instance,) = (one for one in deployment.instances if one.name == server.name)
        model = resolve_model(deployment.model)
        return engine_command(deployment, instance, model, cpu_interpreter())
    verb = "coordinator" if server.role == "coordinator" else "serve"
    arguments = [sys.executable, "-m", "rescheduler", verb, "--config", str(file)]
    if server.role == "proxy":
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        arguments += ["--proxy.host", host, "--proxy.port", port]
    return EngineCommand(arguments, {})
