"""The addresses that host names of a deployment mean on the machine that starts its engines."""

import ipaddress
import re
import socket
from collections.abc import Sequence

from msgspec.structs import replace

from predictor.live.zmq_sockets import is_loopback
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance

__all__ = ["bound_address", "with_bound_addresses"]

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
