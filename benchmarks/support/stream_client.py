"""Streams as clients read them, and how long a token takes by different ways to its engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from rescheduler.openai.openai_stream import read_events

TOKEN_SECONDS = 0.02
PATH = "/v1/completions"
_PHASE = 5  # requests of a client before the next way has its turn

Body = dict[str, Any]
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


def in_turns(urls: Sequence[str]) -> Way:
    """Return the way to some servers, a request each in turn."""

    async def way(number: int, body: Body) -> tuple[str, Body]:
        return urls[number % len(urls)], body

    return way


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


@dataclass
class Stream:
    """An answer as it came: the monotonic seconds of each token, and its ids if asked for."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


async def read_stream(
    client: aiohttp.ClientSession,
    url: str,
    fields: Body,
    stream: Stream,
    headers: Mapping[str, str] = {},
) -> None:
    """Have an answer generated to its full length, greedily, and keep it as it comes.

    Raises:
        RuntimeError: the server refuses it, or ends it before its last token.
    """
    body = {"ignore_eos": True, "temperature": 0, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    stream.sent = time.monotonic()
    try:
        async with client.post(url + PATH, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise RuntimeError(f"{url}: HTTP {response.status}: {text}")
            async for chunk in read_events(response.content):
                if "error" in chunk:
                    raise RuntimeError(f"{url}: {chunk['error']}")
                tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
                stream.times += [time.monotonic()] * (tokens - len(stream.times))
                for choice in chunk.get("choices", ()):
                    stream.ids += choice.get("token_ids") or ()
    except aiohttp.ClientError as error:
        raise RuntimeError(f"{url}: {type(error).__name__}: {error}; see its log") from error
    if len(stream.times) < fields["max_tokens"]:
        raise RuntimeError(f"{url}: an answer ended after {len(stream.times)} tokens")


class StreamClient:
    def __init__(self, client: aiohttp.ClientSession, ways: Mapping[str, Way]) -> None:
        self._session, self._ways = client, ways

    async def alternate(self, concurrency: int, rounds: int, tokens: int) -> dict[str, Times]:
        """Keep so many requests under way, by each way in turn."""
        times = {way: Times() for way in self._ways}

        async def worker(number: int, way: str) -> None:
            # Spread, since a crowd that comes at once measures its own queue.
            await asyncio.sleep(TOKEN_SECONDS * tokens * number / concurrency)
            for turn in range(_PHASE):
                started = time.monotonic()
                url, body = await self._ways[way](number + turn, stream_body(tokens))
                await self._read(url, body, times[way], started)

        for _ in range(rounds):
            for way in self._ways:
                await asyncio.gather(*(worker(number, way) for number in range(concurrency)))
        return times

    async def flood(self, url: str, streams: int, tokens: int) -> None:
        async def drain() -> None:
            body = stream_body(tokens, temperature=0)
            async with self._session.post(url + PATH, json=body) as response:
                count = 0
                async for data in response.content.iter_any():
                    count += data.count(b'"index"')
                assert count == tokens, count

        await asyncio.gather(*(drain() for _ in range(streams)))

    @asynccontextmanager
    async def held(self, url: str, streams: int, tokens: int) -> AsyncIterator[Callable[[], int]]:
        """Hold paced streams, each of which has its first token; yield what counts their tokens."""
        counts = [0] * streams

        async def hold(i: int) -> None:
            async with self._session.post(url + PATH, json=stream_body(tokens)) as response:
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

    async def _read(self, url: str, body: Body, times: Times, last: float) -> None:
        first = True
        async with self._session.post(url + PATH, json=body) as response:
            assert response.status == 200, await response.text()
            async for chunk in read_events(response.content):
                now = time.monotonic()
                (times.first if first else times.gap).append(now - last)
                last, first = now, False
                times.token.append(now - float(chunk["choices"][0]["text"]))
