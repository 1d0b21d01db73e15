"""The addresses at which a gateway reaches the engines."""

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from rescheduler.engines.deployment import DeploymentError, Instance
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState

__all__ = ["Endpoints", "nowhere_to_go"]

_PORTS = {"http": 80, "https": 443}


class Endpoints:
    """The ``ip:port`` of each engine, and which engines a gateway allows for a request.

    Args:
        instances: that requests may go to.

    Raises:
        DeploymentError: an engine's url has a name in place of an address.
    """

    def __init__(self, instances: Iterable[InstanceState]) -> None:
        self._of: Mapping[InstanceState, str] = {one: _endpoint(one.instance) for one in instances}

    def of(self, instance: InstanceState) -> str:
        """Return the ``ip:port`` of an engine, an IPv6 address in brackets."""
        return self._of[instance]

    def outside(self, subset: frozenset[str] | None) -> frozenset[InstanceState]:
        """Return the engines that a request must not go to.

        Args:
            subset: endpoints that its gateway allows; None: all.
        """
        if subset is None:
            return frozenset()
        return frozenset(one for one, endpoint in self._of.items() if endpoint not in subset)


def nowhere_to_go() -> RequestRefusedError:
    """Return the refusal of a request that no engine in service may serve."""
    return RequestRefusedError(503, "no engine in service may serve this request", retry_after=1)


def _endpoint(instance: Instance) -> str:
    parts = urlsplit(instance.url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError as error:
        raise DeploymentError(
            f"{instance.name}: url: {instance.url}: a gateway is told addresses, not names; "
            "write the engine's IP address"
        ) from error
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"
