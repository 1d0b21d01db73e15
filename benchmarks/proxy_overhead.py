"""What the proxy adds to a request's latency, and how many tokens it relays.

    python -m benchmarks.proxy_overhead [--quick] --json OUT

Each request is sent in turn through `headway serve`, and directly: the client then asks the
prefill and the decode instance itself. The upstream plays streams at a steady pace and says in
every chunk when it was written, so that the difference is the proxy's. Reported are the time to
the first token (two upstream requests either way), the time between two tokens at the client, and
the time of a token from the upstream's write to the client's read. Tokens a second of one core are
tokens over the CPU time of the proxy's process, while 64 streams come as fast as they can.
"""

import asyncio
import time
from contextlib import ExitStack

import msgspec

from benchmarks.support.report import arguments, report
from benchmarks.support.server_process import ServerProcess, headway, stream_players
from benchmarks.support.stream_client import (
    PATH,
    TOKEN_SECONDS,
    Body,
    StreamClient,
    compared,
    in_turns,
    session,
)


def main() -> None:
    options = arguments("what the proxy adds").parse_args()
    with ExitStack() as stack:
        names = "prefill-0", "decode-0", "decode-1"
        engines = stack.enter_context(stream_players(TOKEN_SECONDS, *names))
        limits = {"port": 0, "pool": 4096, "prefill_concurrency": 256, "ahead": 1024}
        config = {"model": "smollm2", "instances": engines, "proxy": limits}
        proxy = stack.enter_context(headway("serve", config))
        figures = asyncio.run(_measure([one["url"] for one in engines], proxy, options.quick))
    report("proxy_overhead", figures, options.json)


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

        client = StreamClient(http, {"direct": direct, "proxy": in_turns([proxy.url])})
        await client.alternate(1, 1, 5)  # connections, compiled policies
        for concurrency, rounds in ((1, 4 if quick else 20), (64, 1 if quick else 5)):
            times = await client.alternate(concurrency, rounds, 20)
            figures |= compared(times, concurrency)
        tokens = 200 if quick else 1000
        busy, started = proxy.cpu_seconds(), time.monotonic()
        await client.flood(proxy.url, 64, tokens)
        cpu, wall = proxy.cpu_seconds() - busy, time.monotonic() - started
        figures["relayed_tokens_per_cpu_second"] = 64 * tokens / cpu
        figures["relayed_tokens_per_second"] = 64 * tokens / wall
    return figures


if __name__ == "__main__":
    main()
