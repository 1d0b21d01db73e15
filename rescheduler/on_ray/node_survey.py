"""What a node has to say before servers are started there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_collection.models import resolve_model
from data_collection.versions import installed_version, vllm_version
from rescheduler.engines.engine_command import LaunchError, check_versions, why_port_is_not_free
from rescheduler.engines.launch_local import free_blocks
from rescheduler.on_ray.composition import Place, fixed_proxy_ports, ports_needed
from rescheduler.on_ray.ray_deployment import RayDeployment

__all__ = ["Questions", "Survey", "questions", "survey", "versions_differ"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Questions:
    """What is to be looked at on a node.

    Attributes:
        address: of the node.
        count: how many adjacent free ports are looked for.
        ports: key of the deployment, host and port of what must be free.
        paths: key of the deployment -> what must exist.
        model: of the deployment, where it is loaded; an embedded one is prepared.
        engines: whether vLLM will run there.
    """

    address: str
    count: int
    ports: list[tuple[str, str, int]]
    paths: dict[str, str]
    model: str | None
    engines: bool


@dataclass(frozen=True)
class Survey:
    """What was found on a node.

    Attributes:
        versions: of what has to be the same everywhere.
        free: where adjacent free ports begin.
        problems: what prevents a start, in words.
    """

    versions: dict[str, str | None]
    free: set[int]
    problems: list[str]


def questions(
    deployment: RayDeployment, where: Sequence[Place], addresses: Sequence[str], here: str
) -> dict[str, Questions]:
    """Return what each node is asked, by its address.

    Args:
        deployment: that is to run there.
        where: its engines and proxies.
        addresses: of their nodes.
        here: address of the coordinator's node.
    """
    proxy, count = deployment.proxy, ports_needed(where)
    first = sum(place.role != "proxy" for place in where)
    wanted: dict[str, list[tuple[str, str, int]]] = {one: [] for one in [*addresses, here]}
    if proxy.port:
        fixed = fixed_proxy_ports(proxy.port, addresses[first:])
        for place, address, port in zip(where[first:], addresses[first:], fixed, strict=True):
            wanted[address].append((f"{place.name} (proxy.port)", address, port))
    if proxy.admin_port:
        wanted[here].append(("proxy.admin_port", _LOOPBACK, proxy.admin_port))
    paths = {"keys": deployment.keys, "proxy.engine_key_file": proxy.engine_key_file}
    found = {}
    for address, ports in wanted.items():
        engines = address in addresses[:first]
        needed = paths | ({"engine.checkpoint": deployment.engine.checkpoint} if engines else {})
        found[address] = Questions(
            address,
            count,
            ports,
            {key: path for key, path in needed.items() if path is not None},
            deployment.model if address in addresses else None,
            engines,
        )
    return found


def survey(asked: Questions) -> Survey:
    """Look at this node."""
    problems = []
    versions = {"Headway": installed_version("headway")}
    if asked.engines:
        versions |= {
            "vLLM": vllm_version(),
            "NIXL": installed_version("nixl") or installed_version("nixl-cu12"),
        }
        try:
            check_versions()
        except LaunchError as error:
            problems.append(str(error))
    for key, host, port in asked.ports:
        taken = why_port_is_not_free(host, port)
        if taken:
            problems.append(f"{key}: {host}:{port} {taken}")
    for key, path in asked.paths.items():
        if not Path(path).exists():
            problems.append(f"{key}: {path} does not exist")
    try:
        if asked.model is not None:
            resolve_model(asked.model)
    except (ValueError, OSError, RuntimeError) as error:
        problems.append(f"model: {error}")
    free = set(free_blocks(asked.address, asked.count))
    free &= set(free_blocks(_LOOPBACK, asked.count))  # where the coordinator is operated
    return Survey(versions, free, problems)


def versions_differ(surveys: Mapping[str, Survey]) -> list[str]:
    """Return which versions are not the same on all nodes, in words.

    Args:
        surveys: by the node's address.
    """
    differing = []
    for what in ("Headway", "vLLM", "NIXL"):
        found: dict[str | None, list[str]] = {}
        for address, one in surveys.items():
            if what in one.versions:
                found.setdefault(one.versions[what], []).append(address)
        if len(found) > 1:
            said = ", ".join(f"{version or 'none'} on {at[0]}" for version, at in found.items())
            differing.append(f"{what} must be the same on all nodes: {said}")
    return differing
