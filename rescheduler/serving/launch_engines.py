"""The engines of a deployment as processes of this machine: started, watched, stopped."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from data_collection.models import resolve_model
from rescheduler.interrupts import ending_signals_held, ending_signals_raised
from rescheduler.serving.deployment import Deployment, Instance
from rescheduler.serving.engine_command import EngineCommand, engine_command
from rescheduler.serving.launch_checks import (
    LaunchError,
    check_ports,
    check_versions,
    cpu_interpreter,
)
from rescheduler.serving.launch_process import ServerProcess

__all__ = ["Launched", "Stage", "launched"]

Stage = Literal["starting", "ready", "stopping", "stopped"]

_PROXY = "proxy"
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 15.0
_START_SECONDS = 1800.0  # large models take that long to load


class Launched:
    """Engines, and perhaps a proxy, that were started here.

    Attributes:
        deployment: what they are.
        logs: folder of their logs, one a server.
        servers: by name, in the order they were started; the proxy is called ``proxy``.
    """

    def __init__(
        self,
        deployment: Deployment,
        logs: Path,
        servers: Sequence[ServerProcess],
        tell: Callable[[str, Stage], None],
    ) -> None:
        self.deployment = deployment
        self.logs = logs
        self.servers = {server.name: server for server in servers}
        self._tell = tell
        self._wanted: set[str] = set()

    def start(self, names: Sequence[str], at_once: int | None = None) -> None:
        """Start servers and wait until all are ready.

        Args:
            names: of them, in order.
            at_once: how many load at the same time; None: all.

        Raises:
            LaunchError: one ended, or was not ready in time; shows the end of its log.
        """
        waiting, loading = list(names), dict[str, float]()
        while waiting or loading:
            while waiting and len(loading) < (at_once or len(names)):
                name = waiting.pop(0)
                self._tell(name, "starting")
                self._wanted.add(name)
                with ending_signals_held():  # what runs is known, so that it can be stopped
                    self.servers[name].start()
                loading[name] = time.monotonic()
            for name, began in list(loading.items()):
                server = self.servers[name]
                if not server.is_running:
                    self._wanted.discard(name)
                    raise LaunchError(server.why_it_ended())
                if server.is_healthy():
                    del loading[name]
                    self._tell(name, "ready")
                elif time.monotonic() - began > _START_SECONDS:
                    raise LaunchError(
                        f"not ready after {_START_SECONDS:.0f} s: {server.why_it_ended()}"
                    )
            if loading:
                time.sleep(_POLL_SECONDS)

    def kill(self, name: str) -> None:
        """End a server's processes at once, as a crash would."""
        self._wanted.discard(name)
        self.servers[name].kill()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a server's processes: SIGSTOP makes it hang, SIGCONT go on."""
        self.servers[name].signal(number)

    def restart(self, name: str) -> None:
        """Stop a server if it runs, start it, and wait until it is ready."""
        self._wanted.discard(name)
        self._stop([name], _GRACE_SECONDS)
        self.start([name])

    def take_ended(self) -> list[ServerProcess]:
        """Return the servers that ended by themselves since the last call."""
        ended = [name for name in self._wanted if not self.servers[name].is_running]
        self._wanted.difference_update(ended)
        return [self.servers[name] for name in ended]

    @property
    def is_running(self) -> bool:
        """Whether any server runs."""
        return any(server.is_running for server in self.servers.values())

    def close(self) -> None:
        """Stop all servers, the proxy before the engines, and wait until they are gone."""
        self._wanted.clear()
        with ending_signals_held():  # an impatient Ctrl-C would leave engines behind
            if _PROXY in self.servers:  # it still needs the engines for what runs
                self._stop([_PROXY], self.deployment.proxy.shutdown_seconds + _GRACE_SECONDS)
            self._stop([name for name in self.servers if name != _PROXY], _GRACE_SECONDS)

    def _stop(self, names: Sequence[str], grace_seconds: float) -> None:
        """Ask all to end, then wait for them."""
        started = [self.servers[name] for name in names if self.servers[name].pid is not None]
        for server in started:
            self._tell(server.name, "stopping")
            server.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        for server in started:
            server.end_by(deadline)
            self._tell(server.name, "stopped")


@contextmanager
def launched(
    deployment: Deployment,
    logs: Path,
    only: Sequence[str] = (),
    serve: Path | None = None,
    tell: Callable[[str, Stage], None] = lambda name, stage: None,
    at_once: int | None = None,
) -> Iterator[Launched]:
    """Start a deployment's engines on this machine; they are ready in the body, gone after it.

    Args:
        deployment: what to start.
        logs: folder of the logs; made if need be.
        only: names of the instances to start; all when empty.
        serve: the deployment's file, to start its proxy too.
        tell: is told a server's name at each of its stages.
        at_once: how many engines load at the same time; None: all.

    Raises:
        LaunchError: an engine cannot be started, or ended while it loaded.
        ValueError: the model is unknown, see `data_collection.models.resolve_model`.
    """
    instances = chosen(deployment, only)
    check_versions()
    check_ports(deployment, instances, serve is not None)
    model, python = resolve_model(deployment.model), cpu_interpreter()
    logs.mkdir(parents=True, exist_ok=True)
    servers = [
        ServerProcess(
            instance.name,
            engine_command(deployment, instance, model, python),
            instance.url,
            logs / f"{instance.name}.log",
        )
        for instance in instances
    ]
    if serve is not None:
        command = [sys.executable, "-m", "rescheduler", "serve", "--config", str(serve)]
        log = logs / "proxy.log"
        servers.append(ServerProcess(_PROXY, EngineCommand(command, {}), deployment.proxy_url, log))
    running = Launched(deployment, logs, servers, tell)
    with ending_signals_raised(), closing(running):
        running.start([instance.name for instance in instances], at_once)
        if serve is not None:
            running.start([_PROXY])
        yield running


def chosen(deployment: Deployment, only: Sequence[str]) -> list[Instance]:
    """Return the instances with these names, in the file's order; all when none is named.

    Raises:
        LaunchError: there is no instance of such a name.
    """
    known = [instance.name for instance in deployment.instances]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise LaunchError(f"no instance {unknown[0]!r}; there are {', '.join(known)}")
    return [instance for instance in deployment.instances if not only or instance.name in only]
