"""`headway launch`: start a deployment's engines on this machine, and stop them cleanly."""

import itertools
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from predictor.live.zmq_sockets import is_loopback, tcp_endpoint
from rescheduler.commands.event_loop import ending_signals_held, ending_signals_raised, listen
from rescheduler.engines.deployment import (
    Deployment,
    DeploymentError,
    Instance,
    read_deployment,
)
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
from rescheduler.engines.launch_process import ServerGroup, ServerProcess, Stage
from rescheduler.engines.launch_progress import LaunchProgress
from rescheduler.engines.launch_upgrade import (
    Drain,
    Load,
    Plan,
    PlannedServer,
    Requests,
    UpgradeRequest,
    ask_to_upgrade,
    refuse_other_addresses,
)

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
    here = list(deployment.instances)
    for i, instance in enumerate(deployment.instances):
        for field in ("url", "control", "telemetry") if instance in instances else ():
            endpoint = getattr(instance, field)
            if endpoint is not None:
                bound = bound_address(endpoint, f"instances[{i}].{field}")
                here[i] = replace(here[i], **{field: bound})
    return replace(deployment, instances=here)


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
_PROXIES = (PROXY, "old proxy")
_FILE = "deployment.yaml"


class Launched(ServerGroup):
    """Engines and perhaps the server ``proxy``, started here, with their logs in ``logs``."""

    def __init__(
        self,
        deployment: Deployment,
        logs: Path,
        servers: Sequence[ServerProcess],
        report: Callable[[str, Stage], None],
        tethered: bool = False,
    ) -> None:
        super().__init__(servers, report)
        self.deployment = deployment
        self.logs = logs
        self._tethered = tethered
        self._sockets: dict[str, list[socket.socket]] = {}

    def start_all(self, at_once: int | None) -> None:
        """Start the engines, so many at a time, then the proxy; raises as `start` does."""
        self.start([name for name in self.servers if name != PROXY], at_once)
        if PROXY in self.servers:
            self._listen()  # not before: clients would wait for the engines to load
            self.servers[PROXY].sockets = self._sockets
            self.start([PROXY])

    def _listen(self) -> None:
        """Open what proxies accept on, one after another."""
        options = self.deployment.proxy
        try:
            self._sockets["clients"] = listen(options.host, options.port)
            if self.deployment.coordinator is None and options.admin_port:
                self._sockets["operator"] = listen("127.0.0.1", options.admin_port)
        except OSError as error:
            where = f"{options.host}:{options.port}, or 127.0.0.1:{options.admin_port}"
            raise LaunchError(f"the proxy: cannot listen on {where}: {error}") from error

    def _stop_listening(self) -> None:
        for one in itertools.chain(*self._sockets.values()):
            one.close()
        self._sockets.clear()

    def upgrade(self, request: UpgradeRequest) -> str:
        """Start servers anew, one after the other, each once it is empty and the others serve.

        The first failure ends it, and so does whoever asked by leaving: the others go on as they
        are. A server that does not run is only started, before all others.

        Returns:
            What went wrong, in words.
        """
        planned = [one for one in request.plan.servers if one.name in self.servers]
        planned.sort(key=lambda one: (self.servers[one.name].is_running, one.name == PROXY))
        done: list[str] = []
        error = ""
        for one in planned:
            if not request.is_wanted:
                break
            try:
                self._refuse_two(one.name)
                renew = self._renew_proxy if one.name == PROXY else self._renew_engine
                renew(one, request.say)
            except (LaunchError, OSError) as failed:
                error = f"stopped at {one.name}, the others go on as they are: {failed}"
                break
            done.append(one.name)
        request.end(done, error)
        return error

    def _refuse_two(self, name: str) -> None:
        """Wait until all others serve, for as long as a busy one may take to answer."""
        deadline = time.monotonic() + _OTHERS_SECONDS
        for other, server in self.servers.items():
            while other != name and not server.is_healthy():
                if not server.is_running or time.monotonic() > deadline:
                    raise LaunchError(f"{other} does not serve, and two must not be away at once")
                time.sleep(_WATCH_SECONDS)

    def _renew_engine(self, planned: PlannedServer, say: Callable[[str], None]) -> None:
        name, before = planned.name, ""
        for left in self.drain([name]):
            line = f"{name} drains{_requests(left.get(name))}"
            if line != before:
                say(line)
                before = line
        self.servers[name] = self._server(planned)
        say(f"{name} starts")
        try:
            self.start([name])
        except LaunchError:
            self.kill(name)
            raise
        say(f"{name} is ready")
        proxy = in_real_time(self.deployment).proxy
        time.sleep(_LONGEST_BREAK * proxy.breaker_seconds + _PROBES * proxy.probe_seconds)
        say(f"{name} serves")

    def _renew_proxy(self, planned: PlannedServer, say: Callable[[str], None]) -> None:
        """Start a proxy that accepts beside the old one, then let the old one end its streams."""
        old, new = self.servers[PROXY], self._server(planned, _PROXY_SAYS)
        say("a new proxy starts")
        new.start()
        try:
            while not new.is_ready():
                time.sleep(_WATCH_SECONDS)
        except BaseException:
            new.kill()
            raise
        _, leaving = _PROXIES
        self.servers |= {PROXY: new, leaving: old}
        self._wanted.add(PROXY)
        say("the new proxy serves; the old one ends what runs there")
        old.signal(signal.SIGTERM)
        while old.is_running:
            time.sleep(_WATCH_SECONDS)
        old.kill()  # also what outlived its leader
        del self.servers[leaving]
        say("the old proxy has ended")

    def _server(self, planned: PlannedServer, ready_line: str | None = None) -> ServerProcess:
        return _process(planned, self.logs, self._tethered, self._sockets, ready_line)

    def finish(self) -> Iterator[dict[str, Load | None]]:
        """Let what runs end, and all servers with it; yield what is waited for until they are gone.

        The proxy first: it takes no more requests, and those that run need their engines. No other
        proxy uses these, unless there is a coordinator.
        """
        self._wanted.clear()
        self._stop_listening()
        if PROXY in self.servers:
            self._report(PROXY, "stopping")
            self.servers[PROXY].signal(signal.SIGTERM)
            while any(self.servers[name].is_running for name in _PROXIES if name in self.servers):
                yield {PROXY: None}
                time.sleep(_WATCH_SECONDS)
            self._report(PROXY, "stopped")
            if self.deployment.coordinator is None:
                return
        yield from self.drain([name for name in self.servers if name not in _PROXIES])

    def close(self) -> None:
        """Stop all servers at once, the proxy before the engines, and wait until they are gone."""
        self._wanted.clear()
        self._stop_listening()
        with ending_signals_held():  # an impatient Ctrl-C would leave engines behind
            self.stop([name for name in _PROXIES if name in self.servers])
            self.stop([name for name in self.servers if name not in _PROXIES])


@contextmanager
def launched(
    deployment: Deployment,
    logs: Path,
    only: Sequence[str] = (),
    serve: bool = False,
    show: bool = False,
    at_once: int | None = None,
    tethered: bool = False,
) -> Iterator[Launched]:
    """Start a deployment's engines on this machine; they are ready in the body, gone after it.

    Args:
        deployment: what to start.
        logs: folder of the logs and of ``deployment.yaml``; created if missing.
        only: names of the instances to start; all when empty.
        serve: start the deployment's proxy too.
        show: on standard error, how far each server is.
        at_once: how many engines load at the same time; None: all.
        tethered: end all servers with this process, however it ends.

    Raises:
        DeploymentError: a host name does not lead to this machine.
        LaunchError: an engine cannot be started, or ended while it loaded.
        ValueError: the model is unknown, see `data_collection.models.resolve_model`.
    """
    here = with_bound_addresses(deployment, chosen(deployment, only))
    check_versions()
    check_emulation(deployment)
    check_ports(here, chosen(here, only), serve)
    logs.mkdir(parents=True, exist_ok=True)
    write_deployment(deployment, logs / _FILE)
    servers = [_process(one, logs, tethered) for one in _planned(deployment, logs, only, serve)]
    with ExitStack() as stack:
        progress = stack.enter_context(LaunchProgress(logs)) if show else None
        report = (lambda name, stage: None) if progress is None else progress.report
        stack.enter_context(ending_signals_raised())
        running = Launched(deployment, logs, servers, report, tethered)
        stack.enter_context(closing(running))
        running.start_all(at_once)
        if progress is not None:
            progress.finish()
        yield running


def _planned(
    deployment: Deployment, logs: Path, only: Sequence[str], serve: bool
) -> list[PlannedServer]:
    """Return what starts the instances, and the proxy at last."""
    here = with_bound_addresses(deployment, chosen(deployment, only))
    model, python = model_to_load(deployment), cpu_interpreter()
    planned = []
    for instance in chosen(here, only):
        command = engine_command(here, instance, model, python)
        drain = _drain(deployment, instance, logs)
        start = (command.arguments, command.environment, instance.url, sys.executable, drain)
        planned.append(PlannedServer(instance.name, *start))
    if serve:
        file = str(logs.absolute() / _FILE)
        serving = [sys.executable, "-m", "rescheduler", "serve", "--config", file]
        planned.append(PlannedServer(PROXY, serving, {}, deployment.proxy_url, sys.executable))
    return planned


def _process(
    planned: PlannedServer,
    logs: Path,
    tethered: bool,
    sockets: Mapping[str, Sequence[socket.socket]] | None = None,
    ready_line: str | None = None,
) -> ServerProcess:
    return ServerProcess(
        planned.name,
        EngineCommand(planned.arguments, planned.environment),
        planned.url,
        logs / f"{planned.name}.log",
        tethered,
        planned.drain,
        sockets if planned.name == PROXY else None,
        ready_line,
        planned.interpreter,
    )


_PROBES = 2
"""After so many of its probes a proxy knows that an engine drains, or serves again."""
_LONGEST_BREAK = 16
"""Times `proxy.breaker_seconds`: longest time for which a proxy leaves an engine alone."""
_LEASE_SECONDS = 30.0
"""For which vLLM keeps what it has prefilled for another engine: longer than Headway's leases."""
_PROXY_SAYS = "serving on "
_OTHERS_SECONDS = 60.0


def _drain(deployment: Deployment, instance: Instance, logs: Path) -> Drain | None:
    """Return how an instance is drained; None: it is stopped at once."""
    if deployment.engine.drain_seconds == 0:
        return None
    real, emulate = in_real_time(deployment), deployment.engine.emulate
    tell = []
    if instance.control is None:
        tell = [sys.executable, "-m", "rescheduler", "drain", instance.name]
        tell += ["--url", deployment.admin_url]
    return Drain(
        seconds=real.engine.drain_seconds,
        idle_seconds=_PROBES * real.proxy.probe_seconds,
        kept_seconds=_LEASE_SECONDS * (1.0 if emulate is None else max(1.0, emulate.dilation)),
        url=instance.url,
        file=str(logs.absolute() / f"{instance.name}.draining"),
        tell=tell,
    )


def chosen(deployment: Deployment, only: Sequence[str]) -> list[Instance]:
    """Return the instances with these names, in the file's order; all when none is named."""
    known = [instance.name for instance in deployment.instances]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise LaunchError(f"no instance {unknown[0]!r}; there are {', '.join(known)}")
    return [instance for instance in deployment.instances if not only or instance.name in only]


_WATCH_SECONDS = 0.5


def launch(
    config: Deployment,
    print: bool = False,
    logs: Path = Path("runs/launch"),
    serve: bool = False,
    only: Sequence[str] = (),
    at_once: int | None = None,
    emulate: str | None = None,
    upgrade: bool = False,
) -> int:
    """Start the engines of a deployment on this machine and stay in the foreground.

    Each engine runs in a process group of its own and writes a log. Ctrl-C, SIGTERM and a closed
    terminal stop them all once what runs has ended, for up to `engine.drain_seconds` and
    `proxy.shutdown_seconds`; what can move moves to engines that go on. A second Ctrl-C stops them
    at once. An engine that exits on its own is reported, and the others keep running. Exit status:
    0 stopped as asked, 130 the same while engines still load, 1 an engine exited. On a Ray cluster,
    `headway ray launch` starts them.

    Args:
        config: the deployment.
        print: Print the engines' commands, and start nothing.
        logs: Folder of the logs. It also gets ``deployment.yaml``, the deployment with all its
            defaults.
        serve: Start the proxy too.
        only: Start only the instances with these names. If not set, all.
        at_once: Load at most so many engines at the same time. If not set, all.
        emulate: Emulate this GPU instead of computing anything: a shipped machine, such as
            h100-llama-8b, or a profile's file. Answers are scripted, see docs/rehearse.md.
        upgrade: Start nothing here. Ask the launcher that runs with these logs to restart its
            engines and its proxy, by this file and this installed version. It drains, stops and
            starts one at a time. Ctrl-C stops after the present one.

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
    if upgrade:
        _upgrade(config, logs, only, serve)
        return 0
    with launched(config, logs, only, serve, show=True, at_once=at_once) as running:
        sys.stdout.write(_summary(running, serve) + "\n")
        sys.stdout.flush()
        with Requests.heard(logs) as requests:
            return watch(running, requests)


def _commands(deployment: Deployment, only: Sequence[str]) -> str:
    model, python = model_to_load(deployment), cpu_interpreter()
    if python is not None and any(one.devices for one in chosen(deployment, only)):
        print(
            "headway launch: these commands are for the CPU build of vLLM that is installed here, "
            "without the devices of the deployment: print them on the machine with the GPUs",
            file=sys.stderr,
        )
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


def _upgrade(deployment: Deployment, logs: Path, only: Sequence[str], serve: bool) -> None:
    """Have the launcher that runs start servers anew; the proxy too, unless only some are meant."""
    check_versions()
    check_emulation(deployment)
    file = logs / _FILE
    if not file.exists():
        raise LaunchError(f"no `headway launch` has its logs in {logs}: there is no {file}")
    refuse_other_addresses(read_deployment(file), deployment)
    plan = Plan(_planned(deployment, logs, only, serve or not only))
    write_deployment(deployment, file)
    done = ask_to_upgrade(
        logs, plan, lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
    )
    missing = [one.name for one in plan.servers if one.name not in done and one.name != PROXY]
    if missing:
        raise LaunchError(f"{', '.join(missing)}: started by no launcher with logs in {logs}")
    print(f"{', '.join(sorted(done))}: started anew")


def watch(running: Launched, requests: Requests) -> int:
    """Report what ends until the proxy or all has, or until asked to stop; return the status.

    Raises:
        LaunchError: the proxy, or everything, has ended by itself.
    """
    status = 0
    try:
        while True:
            for server in running.take_ended():
                status = 1
                if server.name == PROXY or not running.is_running:
                    raise LaunchError(server.why_it_ended())
                print(f"headway launch: {server.why_it_ended()}", file=sys.stderr, flush=True)
            request = requests.wait(_WATCH_SECONDS)
            if request is not None and (error := running.upgrade(request)):
                status = 1
                print(f"headway launch: upgrade: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # in a hurry
            _finish(running)
        return status


def _finish(running: Launched) -> None:
    """Stop all once nothing runs, and say what is waited for whenever that changes."""
    said = ""
    for left in running.finish():
        waited = ", ".join(f"{name}{_requests(load)}" for name, load in left.items())
        if waited != said:
            said = waited
            line = f"headway launch: waiting for {waited} to finish; Ctrl-C again stops all at once"
            with suppress(OSError):  # its terminal is gone
                print(line, file=sys.stderr, flush=True)


def _requests(load: Load | None) -> str:
    return "" if load is None else f" ({load.requests} requests)"
