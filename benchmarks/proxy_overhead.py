"""What the proxy adds to a request's latency, and how many tokens it relays.

    python -m benchmarks.proxy_overhead [--quick] [--against CHECKOUT [--rounds N]] --json OUT

Each request is sent in turn through `headway serve`, and directly: the client then asks the
prefill and the decode instance itself. The upstream plays streams at a steady pace and says in
every chunk when it was written, so that the difference is the proxy's. Reported are the time to
the first token (two upstream requests either way), the time between two tokens at the client, and
the time of a token from the upstream's write to the client's read. Tokens a second of one core are
tokens over the CPU time of the proxy's process, while 64 streams come as fast as they can.

With ``--against`` a proxy of another checkout stands before the same engines, and only the two are
compared: both are flooded in turn, and then asked for 80 short answers. Each round pairs them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from benchmarks.support.report import arguments, mean_of, percent_change, report, rotated
from benchmarks.support.server_process import ServerProcess, headway, stream_players
from benchmarks.support.stream_client import (
    PATH,
    TOKEN_SECONDS,
    Body,
    flood,
    session,
    stream_body,
)
from rescheduler.openai.openai_stream import read_events

_PHASE = 5  # requests of a client before the next way has its turn
FLOODS = (("token", 64, 600, 1), ("request", 8, 2, 10))
"""What is paid for, streams at a time, tokens of each, and how often."""


Way = Callable[[int, Body], Awaitable[tuple[str, Body]]]
"""Returns the server and the body of a request, by its number."""


@dataclass
class Times:
    """Seconds to first tokens, between two at the client, and from engine's write to its read."""

    first: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)


def compared(times: Mapping[str, Times], concurrency: int) -> dict[str, float]:
    """Return medians and P99 of each way in ms, and what ways after the first add to its own."""
    figures: dict[str, float] = {}
    direct, *others = times
    for name, key in (("first", "first_token"), ("gap", "gap"), ("token", "token")):
        for share in (50, 99):
            prefix = f"{key}_ms_p{share}_c{concurrency}"
            for way, one in times.items():
                figures[f"{prefix}_{way}"] = 1e3 * float(np.percentile(getattr(one, name), share))
            for way in others:
                added = figures[f"{prefix}_{way}"] - figures[f"{prefix}_{direct}"]
                figures[f"{prefix}_{way}_added"] = added
    return figures


def main() -> None:
    parser = arguments("what the proxy adds")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="of an earlier commit")
    parser.add_argument("--rounds", type=int, help="against that (default: 24)")
    options = parser.parse_args()
    rounds = options.rounds or (4 if options.quick else 24)
    if rounds < 2:
        parser.error("--rounds: an interval needs two")
    with ExitStack() as stack:
        names = "prefill-0", "decode-0", "decode-1"
        engines = stack.enter_context(stream_players(TOKEN_SECONDS, *names))
        limits = {"pool": 4096, "prefill_concurrency": 256, "ahead": 1024}
        listens = {"port": 0, "admin_port": 0}
        config = {"model": "smollm2", "instances": engines, "proxy": limits | listens}
        proxy = stack.enter_context(headway("serve", config))
        if options.against is not None:
            other = headway("serve", config, checkout=options.against.resolve())
            figures = asyncio.run(_paired(proxy, stack.enter_context(other), rounds))
        else:
            figures = asyncio.run(_measure([one["url"] for one in engines], proxy, options.quick))
    name = "proxy_overhead" if options.against is None else "proxy_cost"
    report(name, figures, options.json)


async def _paired(proxy: ServerProcess, other: ServerProcess, rounds: int) -> dict[str, float]:
    """Return what a token and a request cost both, relative to the other, with half intervals."""
    cost: dict[str, dict[str, dict[int, float]]] = {}
    async with session() as http:
        both = {"here": proxy, "there": other}
        for one in both.values():
            await flood(http, one.url, 8, 50)  # connections, compiled policies
        for number in range(rounds):
            for name in rotated(list(both), number):
                one = both[name]
                for what, requests, tokens, repeats in FLOODS:
                    busy = one.cpu_seconds()
                    for _ in range(repeats):
                        await flood(http, one.url, requests, tokens)
                    counted = requests * repeats * (tokens if what == "token" else 1)
                    by_round = cost.setdefault(what, {}).setdefault(name, {})
                    by_round[number] = 1e6 * (one.cpu_seconds() - busy) / counted
    figures: dict[str, float] = {}
    for what, of in cost.items():
        for name, values in of.items():
            figures[f"cpu_us_a_{what}_{name}"] = mean_of(values).mean
        changed = percent_change(of["here"], of["there"])
        figures[f"cpu_a_{what}_change_percent"] = changed.mean
        figures[f"cpu_a_{what}_change_half"] = changed.half
    return figures


async def _measure(urls: list[str], proxy: ServerProcess, quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    prefill, *decodes = urls
    async with session() as http:

        async def direct(number: int, body: Body) -> tuple[str, Body]:
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": asked}
            async with http.post(prefill + PATH, json=first) as response:
                params = msgspec.json.decode(await response.read())["kv_transfer_params"]
            return decodes[number % len(decodes)], {**body, "kv_transfer_params": params}

        async def proxied(number: int, body: Body) -> tuple[str, Body]:
            return proxy.url, body

        ways = {"direct": direct, "proxy": proxied}
        await alternate(http, ways, 1, 1, 5)  # connections, compiled policies
        for concurrency, rounds in ((1, 4 if quick else 20), (64, 1 if quick else 5)):
            times = await alternate(http, ways, concurrency, rounds, 20)
            figures |= compared(times, concurrency)
        tokens = 200 if quick else 1000
        busy, started = proxy.cpu_seconds(), time.monotonic()
        await flood(http, proxy.url, 64, tokens)
        cpu, wall = proxy.cpu_seconds() - busy, time.monotonic() - started
        figures["relayed_tokens_per_cpu_second"] = 64 * tokens / cpu
        figures["relayed_tokens_per_second"] = 64 * tokens / wall
    return figures


async def alternate(
    client: aiohttp.ClientSession,
    ways: Mapping[str, Way],
    concurrency: int,
    rounds: int,
    tokens: int,
) -> dict[str, Times]:
    """Keep so many requests under way, by each way in turn."""
    times = {way: Times() for way in ways}

    async def worker(number: int, way: str) -> None:
        # Spread, since a crowd that comes at once measures its own queue.
        await asyncio.sleep(TOKEN_SECONDS * tokens * number / concurrency)
        for turn in range(_PHASE):
            started = time.monotonic()
            url, body = await ways[way](number + turn, stream_body(tokens))
            await _read(client, url, body, times[way], started)

    for _ in range(rounds):
        for way in ways:
            await asyncio.gather(*(worker(number, way) for number in range(concurrency)))
    return times


async def _read(
    client: aiohttp.ClientSession, url: str, body: Body, times: Times, last: float
) -> None:
    first = True
    async with client.post(url + PATH, json=body) as response:
        assert response.status == 200, await response.text()
        async for chunk in read_events(response.content):
            now = time.monotonic()
            (times.first if first else times.gap).append(now - last)
            last, first = now, False
            times.token.append(now - float(chunk["choices"][0]["text"]))


if __name__ == "__main__":
    main()
