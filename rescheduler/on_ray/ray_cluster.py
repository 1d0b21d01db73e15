"""A Ray cluster, as far as a deployment uses it."""

import importlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rescheduler.engines.deployment import Deployment
from rescheduler.engines.engine_command import LaunchError
from rescheduler.on_ray.composition import Server
from rescheduler.on_ray.ray_deployment import RayOptions
from rescheduler.on_ray.server_actor import ServerActor

__all__ = ["NoAnswerError", "Node", "RayCluster", "connected"]

_PLACES = "headway"
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 60.0


class NoAnswerError(RuntimeError):
    """An actor that did not answer, or failed to."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        id: Ray's.
        address: on which others reach it.
        resources: all that it has.
    """

    id: str
    address: str
    resources: dict[str, float]


@contextmanager
def connected(address: str, namespace: str) -> Iterator["RayCluster"]:
    """Connect to a cluster, and leave it in the end; detached actors stay.

    Args:
        address: HOST:PORT, or ``auto``.
        namespace: of the deployment.

    Raises:
        LaunchError: Ray is not installed, or there is no such cluster.
    """
    try:
        ray = importlib.import_module("ray")
        for module in ("util", "util.placement_group", "util.scheduling_strategies"):
            importlib.import_module(f"ray.{module}")
    except ImportError as error:
        raise LaunchError(
            f"Ray cannot be imported ({error}): pip install 'headway[ray]', on every node"
        ) from error
    _refuse_silent(ray, address)
    ending = (signal.SIGTERM, signal.SIGHUP)
    try:
        handlers = {number: signal.getsignal(number) for number in ending}
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
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
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, AttributeError) as error:
        raise LaunchError(
            f"no Ray cluster at {address!r}: {error}; `ray start --head` starts one: run this on "
            "one of its machines"
        ) from error


class RayCluster:
    """A cluster that this process is connected to, and one deployment's actors in it.

    Args:
        ray: the module.
        namespace: of the deployment.
    """

    def __init__(self, ray: Any, namespace: str) -> None:
        self._ray, self._namespace = ray, namespace

    @property
    def here(self) -> str:
        """Id of the node that this process is on."""
        return str(self._ray.get_runtime_context().get_node_id())

    def nodes(self) -> dict[str, Node]:
        """Return the nodes that are alive, by id."""
        return {
            one["NodeID"]: Node(one["NodeID"], one["NodeManagerAddress"], one["Resources"])
            for one in self._ray.nodes()
            if one["Alive"]
        }

    def reserve(self, options: RayOptions, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ask for resources for as long as the deployment is there; `where_reserved` waits.

        Args:
            options: how they are to be spread.
            bundles: each of one node.

        Raises:
            LaunchError: a deployment of this namespace has some already.
        """
        try:
            self._ray.util.placement_group(
                [dict(bundle) for bundle in bundles],
                strategy=options.strategy,
                name=_PLACES,
                lifetime="detached",
            )
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

    def refuse_running(self) -> None:
        """Refuse to start a second deployment beside one.

        Raises:
            LaunchError: one runs, or what is left of one.
        """
        if self.reserved() or self.names():
            raise LaunchError(self._taken())

    def on_node(self, node: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Begin a function on a node; `answers` waits for what it returns."""
        task = self._ray.remote(num_cpus=0, max_retries=0)(work)
        return task.options(scheduling_strategy=self._on(node)).remote(*arguments)

    def answers(self, begun: Mapping[str, Any]) -> dict[str, Any]:
        """Return what functions on nodes return.

        Args:
            begun: by the node's address.

        Raises:
            LaunchError: one failed, as where Headway is not installed.
        """
        found = {}
        for address, reference in begun.items():
            try:
                found[address] = self._ray.get(reference, timeout=_ANSWER_SECONDS)
            except self._ray.exceptions.RayError as error:
                raise LaunchError(
                    f"node {address}: {_last_line(error)}: is Headway installed there, the same "
                    "version as here?"
                ) from error
        return found

    def start(
        self, server: Server, deployment: Deployment, logs: str, place: int | None = None
    ) -> None:
        """Start a server's actor, which outlives this process.

        Args:
            server: which one.
            deployment: of all servers.
            logs: folder on its node.
            place: number of the bundle that was reserved for it; None: on this node, with none.

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
        actor = self._ray.remote(ServerActor).options(
            name=server.name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            **options,
        )
        try:
            actor.remote(server, deployment, logs)
        except ValueError as error:
            raise LaunchError(
                f"another actor in namespace {self._namespace!r} is called {server.name}: give "
                "this deployment another ray.namespace"
            ) from error

    def names(self) -> list[str]:
        """Return the names of the deployment's actors; others of its namespace are not its."""
        return sorted(filter(self._is_ours, self._ray.util.list_named_actors()))

    def ask(self, names: Sequence[str], method: str, *arguments: Any, seconds: float) -> Any:
        """Call a method of several actors; return what those that answer in time return.

        Args:
            names: of the actors.
            method: of `ServerActor`.
            arguments: of the method.
            seconds: to wait.
        """
        asked = {}
        for name in names:
            try:
                actor = self._ray.get_actor(name)
            except ValueError:  # it is gone
                continue
            asked[getattr(actor, method).remote(*arguments)] = name
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
        self._wait_until(lambda: not set(names) & set(self.names()), f"{names} do not end")

    def release(self) -> None:
        """Give back what was reserved; nothing happens if nothing was.

        Raises:
            LaunchError: Ray keeps it.
        """
        group = self._places()
        if group is not None:
            self._ray.util.remove_placement_group(group)
            self._wait_until(lambda: not self.reserved(), "what was reserved is not given back")

    def _is_ours(self, name: str) -> bool:
        try:
            actor = self._ray.get_actor(name)
        except ValueError:  # it is gone
            return False
        return all(hasattr(actor, method) for method in ("state", "deployment", "undrain"))

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
            f"a deployment runs in namespace {self._namespace!r} already: see `headway status`, "
            "stop it with `headway stop`, or give this one another ray.namespace"
        )

    def _missing(self, bundles: Sequence[Mapping[str, float]], seconds: float) -> str:
        free, wanted = self._ray.available_resources(), dict[str, float]()
        for bundle in bundles:
            for name, amount in bundle.items():
                wanted[name] = wanted.get(name, 0) + amount
        short = [
            f"{amount:g} {name} are needed, {free.get(name, 0):g} are free"
            for name, amount in wanted.items()
            if amount > free.get(name, 0)
        ]
        if not short:
            largest = max(bundles, key=lambda bundle: sum(bundle.values()))
            short = [f"no node has enough at once, of which one takes {_amounts(largest)}"]
        nodes = "".join(
            f"\n  {node.address} has {_amounts(node.resources)}" for node in self.nodes().values()
        )
        return (
            f"the cluster has not enough resources, after {seconds:g} s (ray.reserve_seconds): "
            f"{'; '.join(short)}{nodes}"
        )

    def _wait_until(self, holds: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                raise LaunchError(f"{complaint}, after {_ANSWER_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)


def _amounts(resources: Mapping[str, float]) -> str:
    shown = (
        f"{amount:g} {name}"
        for name, amount in resources.items()
        if name not in ("memory", "object_store_memory")
        and not name.startswith(("node:", "accelerator_type:"))
    )
    return ", ".join(shown) or "nothing"


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
