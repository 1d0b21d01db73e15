"""The engines of a deployment as processes on this machine: start, watch, stop."""

import ipaddress
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from data_collection.models import resolve_model
from predictor.live.zmq_sockets import is_loopback
from rescheduler.commands.event_loop import ending_signals_held, ending_signals_raised
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance
from rescheduler.engines.engine_command import (
    EngineCommand,
    LaunchError,
    check_ports,
    check_versions,
    cpu_interpreter,
    engine_command,
)
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import GRACE_SECONDS, ServerGroup, ServerProcess, Stage

__all__ = [
    "LaunchProgress",
    "Launched",
    "bound_address",
    "chosen",
    "launched",
    "with_bound_addresses",
]


_NAMED = re.compile(r"((?:https?|tcp)://)([^/:\[\]]+)(.*)")


def with_bound_addresses(deployment: Deployment, instances: Sequence[Instance]) -> Deployment:
    """Return a deployment in which these instances have addresses where they had host names.

    An engine binds an address: ZMQ sockets do not bind names, and whoever pulls a KV cache
    connects to what the engine says of itself. The proxy and the other engines keep the names,
    behind which an address may change. Names of other instances are not looked up.

    Args:
        deployment: that the instances belong to.
        instances: those that will be started here.

    Raises:
        DeploymentError: a name has no IPv4 address here, or one that other machines cannot reach.
    """
    return replace(
        deployment,
        instances=[
            _bound(instance, f"instances[{i}]") if instance in instances else instance
            for i, instance in enumerate(deployment.instances)
        ],
    )


def _bound(instance: Instance, where: str) -> Instance:
    found = {
        field: bound_address(endpoint, f"{where}.{field}")
        for field in ("url", "control", "telemetry")
        if (endpoint := getattr(instance, field)) is not None
    }
    return replace(instance, **found)


def bound_address(endpoint: str, where: str) -> str:
    """Return an endpoint with the address of its host; one without a host name as it is.

    Args:
        endpoint: to be bound on this machine.
        where: the deployment's field, for errors.

    Raises:
        DeploymentError: the name has no IPv4 address here, or one that others cannot reach.
    """
    named = _NAMED.fullmatch(endpoint)
    if named is None:
        return endpoint
    scheme, host, rest = named.groups()
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return f"{scheme}{_address(host, where)}{rest}"
    return endpoint


def _address(host: str, where: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DeploymentError(
            f"{where}: {host} has no IPv4 address on this machine ({error}): is the name right? "
            "Of instances, start only this machine's, with --only NAME"
        ) from error
    addresses = [str(address[0]) for *_, address in found]
    if is_loopback(f"tcp://{host}:1"):
        return addresses[0]
    for address in addresses:
        if not is_loopback(f"tcp://{address}:1"):
            return address
    raise DeploymentError(
        f"{where}: {host} is {addresses[0]} on this machine, which no other one reaches: change "
        "its line in /etc/hosts, give an address, or use localhost if only this machine is to "
        "reach it"
    )


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


_READ_AT_END = 2_000


@dataclass
class _Row:
    stage: Stage
    since: float
    seconds: float = 0.0


class LaunchProgress:
    """Shows the stage of each server on standard error.

    Args:
        logs: folder of the servers' logs; their last lines are shown while they load.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._rows: dict[str, _Row] = {}
        console = Console(stderr=True)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, get_renderable=self._table, refresh_per_second=2, transient=False
            )

    def __enter__(self) -> "LaunchProgress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop updating the table; later stages are printed as lines."""
        if self._live:
            self._live.stop()
            self._live = None

    def report(self, name: str, stage: Stage) -> None:
        """Record that a server has reached a stage."""
        row = self._rows.get(name)
        now = time.monotonic()
        took = now - row.since if row else 0.0
        self._rows[name] = _Row(stage, now, took)
        if self._live is None:
            after = f" after {took:.0f} s" if stage in ("ready", "stopped") else ""
            where = f", log {self._logs / name}.log" if stage == "starting" else ""
            print(f"{time.strftime('%H:%M:%S')} {name} {stage}{after}{where}", file=sys.stderr)

    def _table(self) -> Table:
        table = Table(
            box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True
        )
        for width in (max(map(len, self._rows), default=0), len("starting"), len("9999 s")):
            table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for name, row in self._rows.items():
            loading = row.stage == "starting"
            seconds = time.monotonic() - row.since if loading else row.seconds
            last = Text(self._last_line(name), style="dim") if loading else Text()
            style = "green" if row.stage == "ready" else ""
            table.add_row(name, Text(row.stage, style=style), f"{seconds:.0f} s", last)
        return table

    def _last_line(self, name: str) -> str:
        try:
            with (self._logs / f"{name}.log").open("rb") as log:
                log.seek(max(0, log.seek(0, 2) - _READ_AT_END))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        written = [line for line in lines if line.strip()]
        return "".join(letter for letter in written[-1] if letter.isprintable()) if written else ""
