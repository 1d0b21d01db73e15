"""A deployment on this machine alone, on ports that are free now."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from data_collection.files import write_text_atomically
from rescheduler.engines.deployment import Deployment, EngineOptions, Instance
from rescheduler.engines.engine_command import LaunchError, why_port_is_not_free
from rescheduler.engines.proxy_options import ProxyOptions

_HOST = "127.0.0.1"
_FIRST, _END = 20_000, 32_000  # below those that the system gives to outgoing connections
_APART = 40


def local_deployment(
    model: str,
    engine: EngineOptions,
    decode: int = 2,
    prefill: int = 1,
    routing: dict[str, Any] | None = None,
    migration: dict[str, Any] | None = None,
) -> Deployment:
    """Return prefill and decode instances, all with telemetry; the rest is as of `Deployment`."""
    ports = iter(free_ports(2 + 4 * (prefill + decode)))
    url, endpoint = f"http://{_HOST}:{{}}".format, f"tcp://{_HOST}:{{}}".format
    proxy = ProxyOptions(port=next(ports), admin_port=next(ports))
    counts: dict[Literal["prefill", "decode"], int] = {"prefill": prefill, "decode": decode}
    instances = [
        Instance(
            f"{role}-{number}",
            role,
            url(next(ports)),
            control=endpoint(next(ports)),
            telemetry=endpoint(next(ports)),
        )
        for role, count in counts.items()
        for number in range(count)
    ]
    deployment = Deployment(
        model=model,
        served_model_name=model,
        instances=instances,
        migration=migration,
        proxy=proxy,
        engine=msgspec.structs.replace(engine, side_channel_port=next(ports)),
    )
    return deployment if routing is None else msgspec.structs.replace(deployment, routing=routing)


def write_deployment(deployment: Deployment, path: Path) -> None:
    """Write a deployment as the YAML file that `read_deployment` reads."""
    values = msgspec.to_builtins(deployment)
    write_text_atomically(path, yaml.safe_dump(values, sort_keys=False))


def free_ports(count: int) -> list[int]:
    """Return as many adjacent ports of the loopback that nothing listens on now.

    Raises:
        LaunchError: none are free.
    """
    first = next(free_blocks(_HOST, count), None)
    if first is None:
        raise LaunchError(f"no {count} adjacent ports between {_FIRST} and {_END} are free")
    return list(range(first, first + count))


def free_blocks(host: str, count: int) -> Iterator[int]:
    """Yield where as many adjacent ports of an address begin that nothing listens on now."""
    places = (_END - _FIRST) // _APART
    for place in range(places):
        first = _FIRST + _APART * ((os.getpid() + place) % places)
        if not any(why_port_is_not_free(host, port) for port in range(first, first + count)):
            yield first
