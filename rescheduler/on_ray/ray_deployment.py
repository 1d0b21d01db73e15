"""A deployment for Ray: counts and resources, and the addresses that a cluster makes of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from predictor.live.zmq_sockets import tcp_endpoint
from rescheduler.emulation.emulate_options import Positive
from rescheduler.engines.deployment import (
    CoordinatorOptions,
    Deployment,
    DeploymentError,
    check_policies,
)
from rescheduler.engines.proxy_options import Seconds
from rescheduler.serving.connection import url_of

COORDINATOR = "coordinator"
_ADDRESS, _NAMESPACE = "auto", "headway"
_PROXY_STEP = 10
_ENGINE_PORTS = 4  # HTTP, control, telemetry, NIXL's side channel
_COORDINATOR_PORTS = 3

Amount = Annotated[float, msgspec.Meta(ge=0)]
Resource = Annotated[str, msgspec.Meta(min_length=1)]


class RayInstances(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Instances that are alike; they are named by their role, as ``decode-0`` and ``decode-1``.

    Attributes:
        role: ``prefill`` or ``decode``.
        replicas: how many there are.
        num_cpus: CPUs that each reserves.
        num_gpus: GPUs that each reserves, all on one node.
        resources: that each reserves besides, by the names that the nodes give them.
        arguments: further flags for their vLLM, after those of ``engine``.
    """

    role: Literal["prefill", "decode"]
    replicas: Positive = 1
    num_cpus: Amount = 1.0
    num_gpus: Amount = 0.0
    resources: dict[Resource, Amount] = {}
    arguments: list[str] = []

    @property
    def bundle(self) -> dict[str, float]:
        """What each reserves."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which cluster a deployment runs on, and how much of it.

    Attributes:
        instances: what is started, in place of the deployment's own ``instances``.
        address: of the cluster, HOST:PORT; ``auto``: the one that this machine belongs to.
        namespace: of the actors; each deployment of a cluster needs one of its own.
        proxies: how many `headway serve`; each reserves a CPU.
        reserve_seconds: to wait for resources, as for nodes that an autoscaler adds.
    """

    instances: list[RayInstances]
    address: str = _ADDRESS
    namespace: str = _NAMESPACE
    proxies: Positive = 1
    reserve_seconds: Seconds = 60.0


class RayDeployment(Deployment, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment that is to get its addresses on a Ray cluster.

    Attributes:
        instances: none: ``ray`` says how many to start.
        ray: how much to start on which Ray cluster.
    """

    ray: RayOptions | None = None

    def check(self) -> None:
        """Refuse what the types allow and no deployment can mean.

        Raises:
            DeploymentError: names the field, and what it should be.
        """
        if self.ray is None:
            super().check()
            return
        if self.instances:
            raise DeploymentError(
                "instances: give addresses there, or counts in ray.instances, not both"
            )
        if not any(group.role == "decode" for group in self.ray.instances):
            raise DeploymentError("ray.instances: at least one must have the role decode")
        for i, group in enumerate(self.ray.instances):
            if not group.bundle:
                raise DeploymentError(f"ray.instances[{i}]: must reserve something")
        if self.engine.emulate is not None and self.engine.emulate.barrier:
            raise DeploymentError(
                "engine.emulate.barrier: of engines on one machine, not of those that Ray places"
            )
        check_policies(self)


def cluster_of(deployment: RayDeployment | None) -> tuple[str, str]:
    """Return the address of a deployment's cluster and its namespace there.

    Raises:
        DeploymentError: it is not for Ray.
    """
    if deployment is None:
        return _ADDRESS, _NAMESPACE
    if deployment.ray is None:
        raise DeploymentError("ray: the deployment has no such section: see docs/deploy-ray.md")
    return deployment.ray.address, deployment.ray.namespace


@dataclass(frozen=True)
class Place:
    """What an engine or a proxy reserves of a node, and further flags for an engine's vLLM."""

    name: str
    role: Literal["prefill", "decode", "proxy"]
    bundle: dict[str, float]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """A process that an actor of its name runs; it listens on the address of its node."""

    name: str
    role: Literal["prefill", "decode", "proxy", "coordinator"]
    address: str
    url: str


def places(options: RayOptions) -> list[Place]:
    """Return what is reserved: for the engines, then for the proxies."""
    found, numbers = [], Counter[str]()
    for group in options.instances:
        for _ in range(group.replicas):
            name = f"{group.role}-{numbers[group.role]}"
            found.append(Place(name, group.role, group.bundle, tuple(group.arguments)))
            numbers[group.role] += 1
    return found + [Place(f"proxy-{i}", "proxy", {"CPU": 1.0}) for i in range(options.proxies)]


def ports_needed(where: Sequence[Place]) -> int:
    """Return how many free ports `compose` takes, at most."""
    engines = sum(place.role != "proxy" for place in where)
    return _COORDINATOR_PORTS + _ENGINE_PORTS * engines + (len(where) - engines)


def fixed_proxy_ports(first: int, addresses: Sequence[str]) -> list[int]:
    """Return the proxies' ports by their nodes' addresses: 8000, then 8010 on the same node."""
    seen = Counter[str]()
    ports = []
    for address in addresses:
        ports.append(first + _PROXY_STEP * seen[address])
        seen[address] += 1
    return ports


def compose(
    deployment: RayDeployment,
    where: Sequence[Place],
    addresses: Sequence[str],
    here: str,
    free: Sequence[int],
) -> tuple[Deployment, list[Server]]:
    """Return the deployment with addresses; and its servers, the coordinator last.

    Args:
        deployment: with counts.
        where: what was reserved, see `places`.
        addresses: of the places' nodes.
        here: address of the coordinator's node.
        free: `ports_needed` adjacent ports that are free on all of these nodes.

    Raises:
        DeploymentError: the addresses leave a machine and there are no keys, or engines that
            form batches of their own cannot be what they are to be.
    """
    ports = iter(free)
    given = deployment.coordinator or CoordinatorOptions(endpoint="")
    coordinator = msgspec.structs.replace(
        given, endpoint=tcp_endpoint(here, next(ports)), host=here, port=next(ports)
    )
    admin_port = deployment.proxy.admin_port or next(ports)
    engine = deployment.engine
    forecasts = engine.checkpoint is not None or engine.emulate is not None
    engines = sum(place.role != "proxy" for place in where)
    urls = []
    instances = []
    for place, address in zip(where[:engines], addresses[:engines], strict=True):
        instances.append(_instance(place, address, ports, forecasts))
        urls.append(instances[-1]["url"])
    side_channels = [next(ports) for _ in range(engines)]
    fixed = fixed_proxy_ports(deployment.proxy.port, addresses[engines:])
    for address, port in zip(addresses[engines:], fixed, strict=True):
        urls.append(url_of(address, port if deployment.proxy.port else next(ports)))
    values = msgspec.to_builtins(deployment)
    del values["ray"]
    values["instances"] = instances
    values["coordinator"] = msgspec.to_builtins(coordinator)
    values["proxy"]["admin_port"] = admin_port
    values["engine"]["side_channel_port"] = side_channels[0]
    servers = [
        Server(place.name, place.role, address, url)
        for place, address, url in zip(where, addresses, urls, strict=True)
    ]
    last = Server(COORDINATOR, "coordinator", here, url_of(here, coordinator.port))
    return Deployment.from_values(values), [*servers, last]


def _instance(place: Place, address: str, ports: Iterator[int], forecasts: bool) -> dict[str, Any]:
    return {
        "name": place.name,
        "role": place.role,
        "url": url_of(address, next(ports)),
        "control": tcp_endpoint(address, next(ports)),
        "telemetry": tcp_endpoint(address, next(ports)) if forecasts else None,
        "arguments": list(place.arguments),
    }
