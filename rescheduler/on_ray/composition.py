"""The deployment with addresses that a cluster's nodes and ports make of counts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rescheduler.engines.deployment import CoordinatorOptions, Deployment
from rescheduler.on_ray.ray_deployment import RayDeployment, RayOptions
from rescheduler.serving.connection import url_of

__all__ = [
    "COORDINATOR",
    "Composition",
    "Place",
    "Server",
    "compose",
    "fixed_proxy_ports",
    "places",
    "ports_needed",
]

COORDINATOR = "coordinator"
_PROXY_STEP = 10
_ENGINE_PORTS = 4  # HTTP, control, telemetry, NIXL's side channel
_COORDINATOR_PORTS = 3


@dataclass(frozen=True)
class Place:
    """What an engine or a proxy reserves.

    Attributes:
        name: of the engine or proxy.
        role: what it is.
        bundle: amounts of the node's resources.
        arguments: further flags for an engine's vLLM.
    """

    name: str
    role: Literal["prefill", "decode", "proxy"]
    bundle: dict[str, float]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """A process that an actor keeps running.

    Attributes:
        name: also of the actor.
        role: what it is.
        address: of its node, which it listens on.
        url: of its HTTP server.
    """

    name: str
    role: Literal["prefill", "decode", "proxy", "coordinator"]
    address: str
    url: str


@dataclass(frozen=True)
class Composition:
    """What is to run where.

    Attributes:
        deployment: with addresses; all servers read it.
        servers: engines and proxies, in the order of their places.
        coordinator: the last server.
    """

    deployment: Deployment
    servers: list[Server]
    coordinator: Server


def places(options: RayOptions) -> list[Place]:
    """Return what is reserved: for the engines, then for the proxies."""
    found, numbers = [], Counter[str]()
    for group in options.instances:
        for _ in range(group.replicas):
            name = f"{group.role}-{numbers[group.role]}"
            found.append(Place(name, group.role, group.bundle, tuple(group.arguments)))
            numbers[group.role] += 1
    cpus = {"CPU": options.proxy_cpus}
    return found + [Place(f"proxy-{i}", "proxy", cpus) for i in range(options.proxies)]


def ports_needed(where: Sequence[Place]) -> int:
    """Return how many free ports `compose` takes, at most."""
    engines = sum(place.role != "proxy" for place in where)
    return _COORDINATOR_PORTS + _ENGINE_PORTS * engines + (len(where) - engines)


def fixed_proxy_ports(first: int, addresses: Sequence[str]) -> list[int]:
    """Return the proxies' ports where the file gives the first: 8000, then 8010 on the same node.

    Args:
        first: ``proxy.port`` of the file.
        addresses: of the proxies' nodes.
    """
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
) -> Composition:
    """Return the deployment with addresses, and its servers.

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
        given, endpoint=f"tcp://{here}:{next(ports)}", host=here, port=next(ports)
    )
    admin_port = deployment.proxy.admin_port or next(ports)
    servers = []
    instances = []
    engines = [n for n, place in enumerate(where) if place.role != "proxy"]
    forecasts = deployment.engine.checkpoint is not None
    for n in engines:
        instances.append(_instance(where[n], addresses[n], ports, forecasts))
        servers.append(Server(where[n].name, where[n].role, addresses[n], instances[-1]["url"]))
    side_channels = [next(ports) for _ in engines]
    at = addresses[len(engines) :]
    fixed = fixed_proxy_ports(deployment.proxy.port, at)
    for place, address, port in zip(where[len(engines) :], at, fixed, strict=True):
        url = url_of(address, port if deployment.proxy.port else next(ports))
        servers.append(Server(place.name, "proxy", address, url))
    values = msgspec.to_builtins(deployment)
    del values["ray"]
    values["instances"] = instances
    values["coordinator"] = msgspec.to_builtins(coordinator)
    values["proxy"]["admin_port"] = admin_port
    values["engine"]["side_channel_port"] = side_channels[0]
    return Composition(
        Deployment.from_values(values),
        servers,
        Server(COORDINATOR, "coordinator", here, url_of(here, coordinator.port)),
    )


def _instance(place: Place, address: str, ports: Iterator[int], forecasts: bool) -> dict[str, Any]:
    return {
        "name": place.name,
        "role": place.role,
        "url": url_of(address, next(ports)),
        "control": f"tcp://{address}:{next(ports)}",
        "telemetry": f"tcp://{address}:{next(ports)}" if forecasts else None,
        "arguments": list(place.arguments),
    }
