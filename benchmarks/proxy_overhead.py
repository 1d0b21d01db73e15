"""What the proxy adds to a request's latency, and how many tokens it relays.

    python -m benchmarks.proxy_overhead [--quick] --json OUT

Each request is sent in turn through `headway serve`, and directly: the client then asks the
prefill and the decode instance itself. The upstream plays streams at a steady pace and says in
every chunk when it was written, so that the difference is the proxy's. Reported are the time to
the first token (two upstream requests either way) and the time of a token from the upstream's
write to the client's read. Tokens a second of one core are tokens over the CPU time of the
proxy's process, while 64 streams come as fast as they can.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import numpy as np

from benchmarks.support.report import arguments, report
from benchmarks.support.server_process import ServerProcess, headway, stream_player
from rescheduler.openai.openai_stream import read_events

_PATH = "/v1/completions"
_PROMPT = "Tell me of a river that runs to the sea"
_TOKEN_SECONDS = 0.02
_PHASE = 5  # requests of a client before the other way has its turn


def main() -> None:
    """Measure and print."""
    options = arguments("what the proxy adds").parse_args()
    with ExitStack() as stack:
        players = [stack.enter_context(stream_player(_TOKEN_SECONDS)) for _ in range(3)]
        prefill, *decodes = (f"http://127.0.0.1:{player.port}" for player in players)
        proxy = stack.enter_context(_proxy(prefill, decodes))
        figures = asyncio.run(_measure(prefill, decodes, proxy, options.quick))
    report("proxy_overhead", figures, options.json)


@dataclass
class _Times:
    """Seconds of the requests of one kind."""

    first: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)


@contextmanager
def _proxy(prefill: str, decodes: list[str]) -> Iterator[ServerProcess]:
    """Run `headway serve` before the players; it says where it listens."""
    instances = [{"name": "prefill-0", "role": "prefill", "url": prefill}]
    for i, decode in enumerate(decodes):
        instances.append({"name": f"decode-{i}", "role": "decode", "url": decode})
    options = {"port": 0, "pool": 4096, "prefill_concurrency": 256, "ahead": 1024}
    config = {"model": "smollm2", "instances": instances, "proxy": options}
    with headway("serve", config) as process:
        yield process


async def _measure(
    prefill: str, decodes: list[str], proxy: ServerProcess, quick: bool
) -> dict[str, float]:
    figures: dict[str, float] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        client = _Client(session, prefill, decodes, proxy.said.split()[-1])
        await client.alternate(1, 1, 5)  # connections, compiled policies
        for concurrency, rounds in ((1, 4 if quick else 20), (64, 1 if quick else 5)):
            direct, through = await client.alternate(concurrency, rounds, 20)
            for name, a, b in (
                ("first_token", direct.first, through.first),
                ("token", direct.token, through.token),
            ):
                for share in (50, 99):
                    before, after = (1e3 * float(np.percentile(x, share)) for x in (a, b))
                    key = f"{name}_ms_p{share}_c{concurrency}"
                    figures[f"{key}_direct"], figures[f"{key}_proxy"] = before, after
                    figures[f"{key}_added"] = after - before
        tokens = 200 if quick else 1000
        before, started = proxy.cpu_seconds(), time.monotonic()
        await client.flood(64, tokens)
        cpu, wall = proxy.cpu_seconds() - before, time.monotonic() - started
        figures["relayed_tokens_per_cpu_second"] = 64 * tokens / cpu
        figures["relayed_tokens_per_second"] = 64 * tokens / wall
    return figures


class _Client:
    def __init__(
        self, session: aiohttp.ClientSession, prefill: str, decodes: list[str], proxy: str
    ) -> None:
        self._session, self._prefill, self._decodes, self._proxy = session, prefill, decodes, proxy
        self._turn = 0

    async def alternate(self, concurrency: int, rounds: int, tokens: int) -> tuple[_Times, _Times]:
        """Keep so many requests under way, in turns directly and through the proxy."""
        direct, through = _Times(), _Times()
        body = {"model": "smollm2", "prompt": _PROMPT, "max_tokens": tokens, "stream": True}

        async def worker(number: int, straight: bool) -> None:
            # Spread, since a crowd that comes at once measures its own queue.
            await asyncio.sleep(_TOKEN_SECONDS * tokens * number / concurrency)
            for _ in range(_PHASE):
                if straight:
                    await self._direct(body, direct)
                else:
                    await self._read(self._proxy, body, through, time.monotonic())

        for turn in range(2 * rounds):
            workers = (worker(number, turn % 2 == 0) for number in range(concurrency))
            await asyncio.gather(*workers)
        return direct, through

    async def flood(self, streams: int, tokens: int) -> None:
        """Read streams through the proxy as fast as they come."""
        body = {"model": "smollm2", "prompt": _PROMPT, "max_tokens": tokens, "stream": True}
        body["temperature"] = 0

        async def drain() -> None:
            async with self._session.post(self._proxy + _PATH, json=body) as response:
                count = 0
                async for data in response.content.iter_any():
                    count += data.count(b'"index"')
                assert count == tokens, count

        await asyncio.gather(*(drain() for _ in range(streams)))

    async def _direct(self, body: dict[str, object], times: _Times) -> None:
        started = time.monotonic()
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        prefill = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": asked}
        async with self._session.post(self._prefill + _PATH, json=prefill) as response:
            params = msgspec.json.decode(await response.read())["kv_transfer_params"]
        self._turn += 1
        url = self._decodes[self._turn % len(self._decodes)]
        decode = {**body, "kv_transfer_params": params}
        await self._read(url, decode, times, started)

    async def _read(self, url: str, body: dict[str, object], times: _Times, started: float) -> None:
        first = True
        async with self._session.post(url + _PATH, json=body) as response:
            assert response.status == 200, await response.text()
            async for chunk in read_events(response.content):
                now = time.monotonic()
                if first:
                    times.first.append(now - started)
                    first = False
                written = float(chunk["choices"][0]["text"])
                times.token.append(now - written)


if __name__ == "__main__":
    main()
