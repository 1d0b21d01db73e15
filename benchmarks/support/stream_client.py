"""Streams of `benchmarks.support.stream_player` as clients read them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

TOKEN_SECONDS = 0.02
PATH = "/v1/completions"

Body = dict[str, Any]


def stream_body(tokens: int, temperature: float = 1.0) -> Body:
    """Return a request; the player streams as fast as it can at temperature 0."""
    prompt = "Tell me of a river that runs to the sea"
    fields = {"max_tokens": tokens, "temperature": temperature, "stream": True}
    return {"model": "smollm2", "prompt": prompt, **fields}


def session(url: str | None = None, close: bool = False) -> aiohttp.ClientSession:
    """Return a session for as many streams as are asked for, however long they take."""
    connector = aiohttp.TCPConnector(limit=0, force_close=close)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(url, connector=connector, timeout=timeout, read_bufsize=1 << 20)


async def flood(client: aiohttp.ClientSession, url: str, streams: int, tokens: int) -> None:
    """Read so many streams that come as fast as they can, each to its end."""

    async def drain() -> None:
        body = stream_body(tokens, temperature=0)
        async with client.post(url + PATH, json=body) as response:
            count = 0
            async for data in response.content.iter_any():
                count += data.count(b'"index"')
            assert count == tokens, count

    await asyncio.gather(*(drain() for _ in range(streams)))


@asynccontextmanager
async def held(
    client: aiohttp.ClientSession, url: str, streams: int, tokens: int
) -> AsyncIterator[Callable[[], int]]:
    """Hold paced streams, each of which has its first token; yield what counts their tokens."""
    counts = [0] * streams

    async def hold(i: int) -> None:
        async with client.post(url + PATH, json=stream_body(tokens)) as response:
            assert response.status == 200, await response.text()
            async for data in response.content.iter_any():
                counts[i] += data.count(b'"index"')

    holding = [asyncio.create_task(hold(i)) for i in range(streams)]
    try:
        async with asyncio.timeout(120):
            while not all(counts):
                await asyncio.sleep(0.05)
        yield lambda: sum(counts)
    finally:
        for one in holding:
            one.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
