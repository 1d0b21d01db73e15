"""The actor that runs an engine, a proxy or the coordinator on its node, and ends with it.

Ray starts an actor again where it has ended, with the same arguments: the server comes back at the
same address.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec

from rescheduler.engines.deployment import Deployment
from rescheduler.engines.emulated_deployment import in_real_time, model_to_load
from rescheduler.engines.engine_command import (
    EngineCommand,
    LaunchError,
    check_ports,
    cpu_interpreter,
    engine_command,
)
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import GRACE_SECONDS, ServerProcess, Stage
from rescheduler.on_ray.ray_deployment import Server
from rescheduler.serving.admin_client import drain_instance, listed_instances, undrain_instance

_POLL_SECONDS = 0.1
_LONGEST_WAIT = 60.0


class Past(msgspec.Struct, frozen=True):
    """What a file keeps of a server, for the actors after this one.

    Attributes:
        starts: how often it was started.
        failures: starts in a row after which it was not ready.
        why: how it last ended by itself, or could not be started; empty: it never did.
    """

    starts: int = 0
    failures: int = 0
    why: str = ""


class KeptServer:
    """A server in a thread of its own, until it ends or is asked to.

    After a start that fails, it waits before it ends, each time twice as long, up to a minute.

    Args:
        prepare: called before the start; raises `LaunchError` or `OSError` when it cannot be
            started now.
        file: of its `Past`.
        ended: called when it has ended, unless it was stopped for good.
    """

    def __init__(
        self,
        server: ServerProcess,
        prepare: Callable[[], None],
        grace_seconds: float,
        file: Path,
        ended: Callable[[], None],
    ) -> None:
        self.stage: Stage = "starting"
        self.past = Past()
        with suppress(OSError, msgspec.DecodeError):
            self.past = msgspec.json.decode(file.read_bytes(), type=Past)
        self._server = server
        self._prepare = prepare
        self._grace = grace_seconds
        self._file, self._ended = file, ended
        self._asked, self._is_over = Event(), False
        self._thread = Thread(target=self._keep, daemon=True)
        self._thread.start()

    def restart(self) -> int:
        """Have it stopped, and so started again; return how often it was started before.

        Earlier failures no longer count: whoever asks wants to know how the next start goes.
        """
        self._note(failures=0)
        self._asked.set()
        return self.past.starts

    def stop(self) -> None:
        """Stop it for good; its processes are gone afterwards."""
        self._is_over = True
        self._asked.set()
        self._thread.join()

    def _keep(self) -> None:
        try:
            self._start()
            while not self._asked.wait(_POLL_SECONDS):
                if self.stage == "starting" and self._server.is_ready():
                    self.stage = "ready"
                    self._note(failures=0)
                elif not self._server.is_running:
                    raise LaunchError(self._server.why_it_ended())
        except LaunchError as error:
            failed, self.stage = self.stage == "starting", "starting"
            self._note(why=str(error), failures=self.past.failures + failed)
            self._server.kill()  # what outlived its leader
            self._asked.wait(min(2.0 ** (self.past.failures - 1), _LONGEST_WAIT) * failed)
        else:
            self.stage = "stopping"
            self._server.signal(signal.SIGTERM)
            self._server.end_by(time.monotonic() + self._grace)
        self.stage = "stopped"
        if not self._is_over:
            self._ended()

    def _start(self) -> None:
        try:
            self._prepare()
            self._note(starts=self.past.starts + 1)
            self._server.start()
        except OSError as error:
            raise LaunchError(f"{self._server.name} cannot be started: {error}") from error

    def _note(self, **changes: int | str) -> None:
        self.past = msgspec.structs.replace(self.past, **changes)
        with suppress(OSError):  # what prevents it prevents the start, too, which says so
            self._file.write_bytes(msgspec.json.encode(self.past))


@dataclass(frozen=True)
class ServerState:
    """How a server is."""

    server: Server
    stage: Stage
    past: Past


class ServerActor:
    """Runs one of a deployment's servers; its log and the deployment's file are in ``logs``."""

    def __init__(self, server: Server, deployment: Deployment, logs: str) -> None:
        self._server, self._deployment = server, deployment
        path = Path(logs) / server.name
        self._file, past = path.with_suffix(".yaml"), path.with_suffix(".past")
        command = _command(server, deployment, self._file)
        log = path.with_suffix(".log")
        process = ServerProcess(server.name, command, server.url, log, tethered=True)
        grace = GRACE_SECONDS
        if server.role == "proxy":
            grace += in_real_time(deployment).proxy.shutdown_seconds
        ray = importlib.import_module("ray")
        self._address = ray.util.get_node_ip_address()
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            with suppress(OSError):
                past.unlink()  # of an earlier deployment
        self._kept = KeptServer(process, self._prepare, grace, past, lambda: os._exit(1))

    def state(self) -> ServerState:
        """Return how its server is."""
        return ServerState(self._server, self._kept.stage, self._kept.past)

    def restart(self) -> int:
        """Stop the server and start it again; return how often it was started before."""
        return self._kept.restart()

    def stop(self) -> None:
        """Stop the server; its processes are gone afterwards."""
        self._kept.stop()

    def coordinate(self, what: str = "list", *names: str) -> Any:
        """Have the coordinator ``list``, ``drain`` or ``undrain`` engines; of its actor only."""
        asked = {"list": listed_instances, "drain": drain_instance, "undrain": undrain_instance}
        return asked[what](self._deployment.admin_url, *names)  # type: ignore[operator]

    def _prepare(self) -> None:
        """Refuse a start that cannot succeed, and write the file that the server reads."""
        if self._address != self._server.address:
            raise LaunchError(
                f"{self._server.name} was on {self._server.address}, which the cluster has lost, "
                f"and cannot be reached on {self._address}: `headway ray stop`, and launch again"
            )
        instances = [i for i in self._deployment.instances if i.name == self._server.name]
        check_ports(self._deployment, instances, serve=False)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_deployment(self._deployment, self._file)


def _command(server: Server, deployment: Deployment, file: Path) -> EngineCommand:
    if server.role in ("prefill", "decode"):
        (instance,) = (one for one in deployment.instances if one.name == server.name)
        model = model_to_load(deployment)
        return engine_command(deployment, instance, model, cpu_interpreter())
    verb = "coordinator" if server.role == "coordinator" else "serve"
    arguments = [sys.executable, "-m", "rescheduler", verb, "--config", str(file)]
    if server.role == "proxy":
        port = server.url.rpartition(":")[2]
        arguments += ["--proxy.host", server.address, "--proxy.port", port]
    return EngineCommand(arguments, {})
