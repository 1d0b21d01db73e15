"""`headway launch`: start a deployment's engines on this machine, and stop them cleanly."""

import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from predictor.live.zmq_sockets import is_loopback, tcp_endpoint
from rescheduler.commands.event_loop import ending_signals_held, ending_signals_raised
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance
from rescheduler.engines.emulated_deployment import emulated, in_real_time, model_to_load
from rescheduler.engines.engine_command import (
    EngineCommand,
    LaunchError,
    check_emulation,
    check_ports,
    check_versions,
    cpu_interpreter,
    engine_command,
)
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import (
    GRACE_SECONDS,
    ServerGroup,
    ServerProcess,
    Stage,
    end_of_log,
)

__all__ = [
    "PROXY",
    "LaunchProgress",
    "Launched",
    "bound_address",
    "chosen",
    "launch",
    "launched",
    "with_bound_addresses",
]


_NAMED = re.compile(r"((?:https?|tcp)://)(?!(?:\d+\.){3}\d+(?![^:/]))([^/:\[\]]+)(.*)")
"""An endpoint with the name of a host, in place of an address."""


def with_bound_addresses(deployment: Deployment, instances: Sequence[Instance]) -> Deployment:
    """Return a deployment in which the instances that start here have addresses, and no host names.

    An engine binds an address: ZMQ sockets do not bind names, and whoever pulls a KV cache
    connects to what the engine says of itself. The proxy and the other engines keep the names,
    behind which an address may change. Names of other instances are not looked up.

    Raises:
        DeploymentError: a name has no address here, or one that other machines cannot reach.
    """
    return replace(
        deployment,
        instances=[
            _bound(instance, f"instances[{i}]") if instance in instances else instance
            for i, instance in enumerate(deployment.instances)
        ],
    )


def _bound(instance: Instance, where: str) -> Instance:
    endpoints = {field: getattr(instance, field) for field in ("url", "control", "telemetry")}
    return replace(
        instance,
        **{
            field: bound_address(endpoint, f"{where}.{field}")
            for field, endpoint in endpoints.items()
            if endpoint is not None
        },
    )


def bound_address(endpoint: str, where: str) -> str:
    """Return an endpoint with the address of its host; one without a host name as it is.

    An IPv4 address goes before an IPv6 one, as for whoever connects.
    Raises as `with_bound_addresses` does; ``where`` is the deployment's field.
    """
    named = _NAMED.fullmatch(endpoint)
    if named is None:
        return endpoint
    scheme, host, rest = named.groups()
    try:
        addresses = _addresses(host)
    except (OSError, UnicodeError) as error:
        raise DeploymentError(
            f"{where}: {host} has no address on this machine ({error}): is the name right? "
            "Of instances, start only this machine's, with --only NAME"
        ) from error
    reached = [one for one in addresses if not is_loopback(tcp_endpoint(one, 1))]
    if is_loopback(tcp_endpoint(host, 1)):
        reached = addresses
    if not reached:
        raise DeploymentError(
            f"{where}: {host} is {addresses[0]} on this machine, which no other one reaches: "
            "change its line in /etc/hosts, give an address, or use localhost if only this machine "
            "is to reach it"
        )
    address = f"[{reached[0]}]" if ":" in reached[0] else reached[0]
    return f"{scheme}{address}{rest}"


def _addresses(host: str) -> list[str]:
    """Return the IPv4 addresses of a host, or if it has none, its IPv6 addresses."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        found = socket.getaddrinfo(host, None, socket.AF_INET6, socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


PROXY = "proxy"
_FILE = "deployment.yaml"


class Launched(ServerGroup):
    """Engines and perhaps the server ``proxy``, started here, with their logs in ``logs``."""

    def __init__(
        self,
        deployment: Deployment,
        logs: Path,
        servers: Sequence[ServerProcess],
        report: Callable[[str, Stage], None],
    ) -> None:
        super().__init__(servers, report)
        self.deployment = deployment
        self._proxy_seconds = in_real_time(deployment).proxy.shutdown_seconds
        self.logs = logs

    def close(self) -> None:
        """Stop all servers, the proxy before the engines, and wait until they are gone."""
        self._wanted.clear()
        with ending_signals_held():  # an impatient Ctrl-C would leave engines behind
            if PROXY in self.servers:  # it still needs the engines for what runs
                self.stop([PROXY], self._proxy_seconds + GRACE_SECONDS)
            self.stop([name for name in self.servers if name != PROXY])


@contextmanager
def launched(
    deployment: Deployment,
    logs: Path,
    only: Sequence[str] = (),
    serve: bool = False,
    report: Callable[[str, Stage], None] = lambda name, stage: None,
    at_once: int | None = None,
    tethered: bool = False,
) -> Iterator[Launched]:
    """Start a deployment's engines on this machine; they are ready in the body, gone after it.

    Args:
        deployment: what to start.
        logs: folder of the logs and of ``deployment.yaml``; created if missing.
        only: names of the instances to start; all when empty.
        serve: start the deployment's proxy too.
        report: called with a server's name at each of its stages.
        at_once: how many engines load at the same time; None: all.
        tethered: end all servers with this process, however it ends.

    Raises:
        DeploymentError: a host name does not lead to this machine.
        LaunchError: an engine cannot be started, or ended while it loaded.
        ValueError: the model is unknown, see `data_collection.models.resolve_model`.
    """
    here = with_bound_addresses(deployment, chosen(deployment, only))
    instances = chosen(here, only)
    check_versions()
    check_emulation(deployment)
    check_ports(here, instances, serve)
    model, python = model_to_load(deployment), cpu_interpreter()
    logs.mkdir(parents=True, exist_ok=True)
    write_deployment(deployment, logs / _FILE)
    servers = [
        ServerProcess(
            instance.name,
            engine_command(here, instance, model, python),
            instance.url,
            logs / f"{instance.name}.log",
            tethered,
        )
        for instance in instances
    ]
    if serve:
        file = str(logs / _FILE)
        command = [sys.executable, "-m", "rescheduler", "serve", "--config", file]
        log, url = logs / "proxy.log", deployment.proxy_url
        servers.append(ServerProcess(PROXY, EngineCommand(command, {}), url, log, tethered))
    running = Launched(deployment, logs, servers, report)
    with ending_signals_raised(), closing(running):
        running.start([instance.name for instance in instances], at_once)
        if serve:
            running.start([PROXY])
        yield running


def chosen(deployment: Deployment, only: Sequence[str]) -> list[Instance]:
    """Return the instances with these names, in the file's order; all when none is named."""
    known = [instance.name for instance in deployment.instances]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise LaunchError(f"no instance {unknown[0]!r}; there are {', '.join(known)}")
    return [instance for instance in deployment.instances if not only or instance.name in only]


_READ_AT_END = 2_000
_WATCH_SECONDS = 0.5


class _Row(NamedTuple):
    stage: Stage
    since: float
    seconds: float


class LaunchProgress:
    """Shows on standard error the stage of each server, and the end of its log while it loads."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._rows: dict[str, _Row] = {}
        console = Console(stderr=True)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, get_renderable=self._table, refresh_per_second=2)

    def __enter__(self) -> Self:
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
        now = time.monotonic()
        took = now - self._rows[name].since if name in self._rows else 0.0
        self._rows[name] = _Row(stage, now, took)
        if self._live is None:
            after = f" after {took:.0f} s" if stage in ("ready", "stopped") else ""
            where = f", log {self._logs / name}.log" if stage == "starting" else ""
            print(f"{time.strftime('%H:%M:%S')} {name} {stage}{after}{where}", file=sys.stderr)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for width in (max(map(len, self._rows), default=0), len("starting"), len("9999 s")):
            table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
        for name, (stage, since, seconds) in self._rows.items():
            style, last = ("green" if stage == "ready" else ""), ""
            if stage == "starting":
                seconds, last = time.monotonic() - since, self._last_line(name)
            table.add_row(name, Text(stage, style=style), f"{seconds:.0f} s", Text(last))
        return table

    def _last_line(self, name: str) -> str:
        lines = end_of_log(self._logs / f"{name}.log", _READ_AT_END).split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return "".join(letter for letter in last if letter.isprintable())


def launch(
    config: Deployment,
    print: bool = False,
    logs: Path = Path("runs/launch"),
    serve: bool = False,
    only: Sequence[str] = (),
    at_once: int | None = None,
    emulate: str | None = None,
) -> int:
    """Start the engines of a deployment on this machine and stay in the foreground.

    Each engine runs in a process group of its own and writes a log. Ctrl-C, SIGTERM and a closed
    terminal stop them all. An engine that exits on its own is reported, and the others keep
    running. Exit status: 0 stopped as asked, 130 the same while engines still load, 1 an engine
    exited. On a Ray cluster, `headway ray launch` starts them.

    Args:
        config: the deployment.
        print: print the engines' commands, start nothing.
        logs: folder of the logs and of ``deployment.yaml``, the deployment with all its defaults.
        serve: start the proxy too.
        only: names of the instances to start; all when not given.
        at_once: engines that load at the same time; all when not given.
        emulate: a GPU to emulate, in place of computing anything: the name of a shipped machine,
            such as h100-llama-8b, or a profile's file. Answers are scripted, see docs/rehearse.md.

    Returns:
        The exit status.

    Raises:
        ValueError: an option is out of its range.
        DeploymentError: a host name does not lead to this machine.
        LaunchError: an engine cannot be started, or all have exited.
    """
    if at_once is not None and at_once < 1:
        raise ValueError(f"--at-once must be a positive number, not {at_once}")
    if emulate is not None:
        config = emulated(config, emulate)
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


def _commands(deployment: Deployment, only: Sequence[str]) -> str:
    model, python = model_to_load(deployment), cpu_interpreter()
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
        how = f"start the proxy with: headway serve --config {running.logs / _FILE}"
    return f"{', '.join(running.servers)}: ready, logs in {running.logs}\n{how}\nCtrl-C stops them"


def _watch(running: Launched) -> int:
    """Report what ends until the proxy or all has, or until asked to stop; return the status."""
    status = 0
    try:
        while True:
            for server in running.take_ended():
                status = 1
                if server.name == PROXY or not running.is_running:
                    raise LaunchError(server.why_it_ended())
                print(f"headway launch: {server.why_it_ended()}", file=sys.stderr, flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return status
