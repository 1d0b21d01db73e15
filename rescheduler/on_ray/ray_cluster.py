"""A Ray cluster, as far as a deployment uses it."""

import importlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rescheduler.engines.deployment import Deployment
from rescheduler.engines.engine_command import LaunchError
from rescheduler.on_ray.ray_deployment import RayOptions, Server
from rescheduler.on_ray.server_actor import ServerActor

_PLACES = "headway"
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.25
_GONE_SECONDS = 60.0


class NoAnswerError(RuntimeError):
    """An actor that did not answer, or failed to."""


class Node(NamedTuple):
    """The address on which others reach a node, and all that it has."""

    address: str
    resources: dict[str, float]


@contextmanager
def connected(address: str, namespace: str) -> Iterator["RayCluster"]:
    """Connect to a cluster, HOST:PORT or ``auto``, and leave it; detached actors stay.

    Raises:
        LaunchError: Ray is not installed, or there is no such cluster.
    """
    try:
        ray = importlib.import_module("ray")
        for module in ("util", "util.placement_group", "util.scheduling_strategies"):
            importlib.import_module(f"ray.{module}")
    except ImportError as error:
        raise LaunchError(
            f"Ray cannot be imported ({error}): pip install -e '.[ray]', on every node"
        ) from error
    _refuse_silent(ray, address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address, namespace=namespace, **quiet)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray puts its own there
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise LaunchError(f"the Ray cluster at {address!r}: {_last_line(error)}") from error
    try:
        yield RayCluster(ray, namespace)
    finally:
        ray.shutdown()


def _refuse_silent(ray: Any, address: str) -> None:
    """Refuse an address at which nothing listens, for which Ray would wait for minutes."""
    try:  # as Ray understands it: auto, and the loopback, mean something else
        found = ray._private.services.canonicalize_bootstrap_address(address)
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, AttributeError) as error:
        raise LaunchError(
            f"no Ray cluster at {address!r}: {error}; `ray start --head` starts one: run this on "
            "one of its machines"
        ) from error


def wait_until(holds: Callable[[], bool], seconds: float, complaint: str) -> None:
    """Wait until something holds.

    Raises:
        LaunchError: it does not, in time.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise LaunchError(f"{complaint}, after {seconds:g} s")
        time.sleep(_POLL_SECONDS)


class RayCluster:
    """A cluster that this process is connected to, and the deployment of one namespace in it."""

    def __init__(self, ray: Any, namespace: str) -> None:
        self._ray, self._namespace = ray, namespace

    @property
    def here(self) -> str:
        """Id of the node that this process is on."""
        return str(self._ray.get_runtime_context().get_node_id())

    def nodes(self) -> dict[str, Node]:
        """Return the nodes that are alive, by id."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        return {one["NodeID"]: Node(one["NodeManagerAddress"], one["Resources"]) for one in alive}

    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ask for bundles of resources, each of one node; `where_reserved` waits for them.

        Raises:
            LaunchError: a deployment of this namespace runs, or something is left of one.
        """
        if self.reserved() or self.names():
            raise LaunchError(self._taken())
        wanted = [dict(bundle) for bundle in bundles]
        kept = {"name": _PLACES, "lifetime": "detached"}
        try:
            self._ray.util.placement_group(wanted, strategy="SPREAD", **kept)
        except (ValueError, self._ray.exceptions.RayError) as error:
            raise LaunchError(self._taken()) from error

    def where_reserved(
        self, options: RayOptions, bundles: Sequence[Mapping[str, float]]
    ) -> list[str]:
        """Wait until what was asked for is reserved; return the bundles' nodes, by id.

        Raises:
            LaunchError: there is not enough of something.
        """
        group = self._places()
        if not group.wait(timeout_seconds=options.reserve_seconds):
            raise LaunchError(self._missing(bundles, options.reserve_seconds))
        found = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        return [found[n] for n in range(len(bundles))]

    def reserved(self) -> bool:
        """Return whether this deployment has reserved anything."""
        return self._places() is not None

    def on_nodes(
        self, nodes: Mapping[str, str], work: Callable[..., Any], *arguments: Any
    ) -> dict[str, Any]:
        """Call a function with the address of each node, and these arguments, on that node.

        ``nodes`` are ids by address, and so are the results.

        Raises:
            LaunchError: it failed, as where Headway is not installed.
        """
        task = self._ray.remote(num_cpus=0, max_retries=0)(work)
        begun = {
            address: task.options(scheduling_strategy=self._on(node)).remote(address, *arguments)
            for address, node in nodes.items()
        }
        found = {}
        for address, reference in begun.items():
            try:
                found[address] = self._ray.get(reference, timeout=_GONE_SECONDS)
            except self._ray.exceptions.RayError as error:
                raise LaunchError(
                    f"node {address}: {_last_line(error)}: is Headway installed there, the same "
                    "version as here?"
                ) from error
        return found

    def start(self, server: Server, deployment: Deployment, logs: str, place: int | None) -> None:
        """Start a server's actor, which outlives this process, on the bundle of its place.

        Without a place, it takes nothing that was reserved, and runs on this node.

        Raises:
            LaunchError: an actor of this name is there.
        """
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": self._on(self.here)}
        if place is not None:
            group = self._places()
            bundle = dict(group.bundle_specs[place])
            strategies = self._ray.util.scheduling_strategies
            options = {
                "num_cpus": bundle.pop("CPU", 0),
                "num_gpus": bundle.pop("GPU", 0),
                "resources": bundle,
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=place
                ),
            }
        options |= {"name": server.name, "namespace": self._namespace, "lifetime": "detached"}
        actor = self._ray.remote(ServerActor)
        try:
            actor.options(max_restarts=-1, max_concurrency=8, **options).remote(
                server, deployment, logs
            )
        except ValueError as error:
            raise LaunchError(
                f"another actor in namespace {self._namespace!r} is called {server.name}: give "
                "this deployment another ray.namespace"
            ) from error

    def names(self) -> list[str]:
        """Return the names of the deployment's actors; others of its namespace are not its."""
        return sorted(filter(self._is_ours, self._ray.util.list_named_actors()))

    def ask(self, names: Sequence[str], method: str, seconds: float) -> dict[str, Any]:
        """Call a method of several actors; return what those that answer in time return."""
        asked = {}
        for name in names:
            try:
                asked[getattr(self._ray.get_actor(name), method).remote()] = name
            except ValueError:  # it is gone
                continue
        done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        found = {}
        for reference in done:
            try:
                found[asked[reference]] = self._ray.get(reference)
            except self._ray.exceptions.RayError:
                continue
        return found

    def ask_one(self, name: str, method: str, *arguments: Any, seconds: float) -> Any:
        """Call a method of an actor, and return what it returns.

        Raises:
            NoAnswerError: it is gone, did not answer in time, or failed.
        """
        try:
            actor = self._ray.get_actor(name)
            return self._ray.get(getattr(actor, method).remote(*arguments), timeout=seconds)
        except ValueError as error:
            raise NoAnswerError(f"there is no {name}") from error
        except self._ray.exceptions.RayError as error:
            raise NoAnswerError(f"{name}: {_last_line(error)}") from error

    def kill(self, names: Sequence[str]) -> None:
        """End actors at once, and wait until they are gone.

        Raises:
            LaunchError: they are not.
        """
        for name in names:
            try:
                self._ray.kill(self._ray.get_actor(name), no_restart=True)
            except ValueError:  # it is gone
                continue
        gone = f"{', '.join(names)} do not end"
        wait_until(lambda: not set(names) & set(self.names()), _GONE_SECONDS, gone)

    def release(self) -> None:
        """Give back what was reserved, if anything was.

        Raises:
            LaunchError: Ray keeps it.
        """
        group = self._places()
        if group is not None:
            self._ray.util.remove_placement_group(group)
            kept = "what was reserved is not given back"
            wait_until(lambda: not self.reserved(), _GONE_SECONDS, kept)

    def _is_ours(self, name: str) -> bool:
        try:
            actor = self._ray.get_actor(name)
        except ValueError:  # it is gone
            return False
        return all(hasattr(actor, method) for method in ("state", "restart", "coordinate"))

    def _on(self, node: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    def _places(self) -> Any:
        try:
            return self._ray.util.get_placement_group(_PLACES)
        except ValueError:
            return None

    def _taken(self) -> str:
        return (
            f"a deployment runs in namespace {self._namespace!r} already: see `headway ray "
            "status`, stop it with `headway ray stop`, or give this one another ray.namespace"
        )

    def _missing(self, bundles: Sequence[Mapping[str, float]], seconds: float) -> str:
        free = self._ray.available_resources()
        names = dict.fromkeys(name for bundle in bundles for name in bundle)
        wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}
        short = [
            f"{amount:g} {name} are needed, {free.get(name, 0):g} are free"
            for name, amount in wanted.items()
            if amount > free.get(name, 0)
        ]
        if not short:
            largest = max(bundles, key=lambda bundle: sum(bundle.values()))
            short = [f"no node has enough at once, of which one takes {_amounts(largest)}"]
        nodes = [f"\n  {at} has {_amounts(resources)}" for at, resources in self.nodes().values()]
        return (
            f"the cluster has not enough resources, after {seconds:g} s (ray.reserve_seconds): "
            f"{'; '.join(short)}{''.join(nodes)}"
        )


def _amounts(resources: Mapping[str, float]) -> str:
    hidden = ("memory", "object_store_memory", "node:", "accelerator_type:")
    return (
        ", ".join(f"{n:g} {name}" for name, n in resources.items() if not name.startswith(hidden))
        or "nothing"
    )


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
