"""What traces cost the proxy.

    python -m benchmarks.tracing [--quick] --json OUT

Four proxies serve the same three engines, which play streams as fast as they can: without traces,
with 1% and with 100% of the requests traced, and with 100% and a collector that is not there. In
every round each has the same requests, in an order that changes from round to round: prefilled on
one engine, decoded on another one, a few tokens long, so that what is done once a request weighs
most. Reported are the CPU time of the proxy's process a request, its exporter's thread included,
and the ratio to the proxy without traces in the same round: means over the rounds, with half the
width of their 95% confidence intervals; and the share of the spans that reached the collector,
whose own work is in another process.
"""

import asyncio
import os
import socket
from contextlib import ExitStack

import aiohttp

from benchmarks.support.paired_rounds import mean_of
from benchmarks.support.report import arguments, report
from benchmarks.support.server_process import ServerProcess, headway, stream_player
from benchmarks.support.span_counter import SpanCounter, span_counter

_AT_ONCE = 16
_WARM_UP = 100
_TOKENS = 8
_SPANS = 6  # request, wait, prefill, wait, place, decode
_SETTLE_SECONDS = 1.0
_EXPORT_MILLISECONDS = 100
"""Between two batches, so that they are sent while their requests are measured."""


def main() -> None:
    """Measure and print."""
    options = arguments("what traces cost the proxy").parse_args()
    rounds, requests = (2, 100) if options.quick else (20, 400)
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(_EXPORT_MILLISECONDS)
    with ExitStack() as stack:
        collector = stack.enter_context(span_counter())
        nobody = stack.enter_context(socket.socket())
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        players = [stack.enter_context(stream_player(0.0)) for _ in range(3)]
        arms = {
            "off": _proxy(stack, players, None, 0.0),
            "1_percent": _proxy(stack, players, collector.endpoint, 0.01),
            "100_percent": _proxy(stack, players, collector.endpoint, 1.0),
            "100_percent_no_collector": _proxy(stack, players, dead, 1.0),
        }
        figures = asyncio.run(_measure(arms, collector, rounds, requests))
    report("tracing", figures, options.json)


def _proxy(
    stack: ExitStack, players: list[ServerProcess], endpoint: str | None, sample: float
) -> ServerProcess:
    """Run a proxy before the players until the stack ends."""
    names = ("prefill-0", "decode-0", "decode-1")
    instances = [
        {"name": name, "role": name.partition("-")[0], "url": f"http://127.0.0.1:{player.port}"}
        for name, player in zip(names, players, strict=True)
    ]
    traces = {"endpoint": endpoint, "sample": sample} if endpoint else None
    proxy = {"port": 0, "admin_port": 0, "traces": traces}
    values = {"model": "smollm2", "instances": instances, "proxy": proxy}
    return stack.enter_context(headway("serve", values))


async def _measure(
    arms: dict[str, ServerProcess], collector: SpanCounter, rounds: int, requests: int
) -> dict[str, float]:
    seconds: dict[str, dict[int, float]] = {name: {} for name in arms}
    sent: dict[str, int] = dict.fromkeys(arms, 0)
    names = list(arms)
    for name in names:
        await _serve(arms[name], _WARM_UP)
    for i in range(rounds):
        first = i % len(names)
        for name in [*names[first:], *names[:first]]:
            before, spans = arms[name].cpu_seconds(), collector.spans
            await _serve(arms[name], requests)
            await asyncio.sleep(_SETTLE_SECONDS)  # until its spans have been sent, too
            seconds[name][i] = (arms[name].cpu_seconds() - before) / requests
            sent[name] += collector.spans - spans
    figures: dict[str, float] = {"rounds": rounds, "requests_per_round": requests}
    for name, took in seconds.items():
        mean = mean_of(took)
        figures[f"cpu_ms_per_request_{name}"] = 1e3 * mean.mean
        figures[f"cpu_ms_per_request_{name}_half_interval"] = 1e3 * mean.half
    for name in names[1:]:
        ratio = mean_of({i: seconds[name][i] / seconds["off"][i] for i in range(rounds)})
        figures[f"cpu_ratio_{name}"] = ratio.mean
        figures[f"cpu_ratio_{name}_half_interval"] = ratio.half
    figures["spans_received_100_percent"] = sent["100_percent"] / (_SPANS * requests * rounds)
    return figures


async def _serve(proxy: ServerProcess, requests: int) -> None:
    """Have a proxy serve requests, some at a time."""
    left = iter(range(requests))
    body = {
        "model": "smollm2",
        "prompt": "Tell me of a river that runs to the sea",
        "max_tokens": _TOKENS,
        "temperature": 0,  # the players write as fast as they can
        "stream": True,
    }
    async with aiohttp.ClientSession(f"http://127.0.0.1:{proxy.port}") as session:

        async def client() -> None:
            for _ in left:
                async with session.post("/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    await response.read()

        await asyncio.gather(*(client() for _ in range(_AT_ONCE)))


if __name__ == "__main__":
    main()
