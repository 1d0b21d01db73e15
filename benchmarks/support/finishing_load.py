"""A load whose streams ask when they will finish: what was told, and what came."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import aiohttp

from rescheduler.demo.demo_load import load_session

COMMENT = b": headway "


class Told(NamedTuple):
    """A comment of a stream: when it came, and what it said."""

    at: float
    told: dict[str, Any]


@dataclass
class Asked:
    """A request, and what its client saw; times are real seconds on the monotonic clock."""

    body: dict[str, Any]
    arrives: float
    finish_in: float | None = None
    sent: float = 0.0
    first: float = inf
    last: float = inf
    probability: float | None = None
    told: list[Told] = field(default_factory=list)
    status: int = 0
    error: str = ""

    @property
    def complete(self) -> bool:
        return self.status == 200 and not self.error and self.last < inf


async def serve_asking(url: str, load: Sequence[Asked], level: float | None = None) -> None:
    """Send requests when their time comes, and wait for all answers.

    With a ``level``, those with a deadline ask for a promise of that probability; at 0 all get one.
    """
    started = time.monotonic()
    async with load_session() as session:

        async def serve(one: Asked) -> None:
            await asyncio.sleep(max(0.0, started + one.arrives - time.monotonic()))
            try:
                await _serve(session, url, one, level)
            except (TimeoutError, aiohttp.ClientError) as error:
                one.error = f"{type(error).__name__}: {error}"

        await asyncio.gather(*(serve(one) for one in load))


async def _serve(session: aiohttp.ClientSession, url: str, one: Asked, level: float | None) -> None:
    body = {**one.body, "stream": True, "stream_options": {"headway": True}}
    if level is not None and one.finish_in is not None:
        body |= {"finish_in_s": one.finish_in, "finish_level": level}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    one.sent = time.monotonic()
    async with session.post(url + path, json=body) as response:
        one.status = response.status
        if response.status != 200:
            return
        given = response.headers.get("X-Headway-Finish-Probability")
        one.probability = float(given) if given is not None else None
        async for line in response.content:
            now = time.monotonic()
            if line.startswith(COMMENT):
                one.told.append(Told(now, json.loads(line[len(COMMENT) :])))
            elif line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    one.error = str(chunk["error"])
                elif chunk.get("choices"):
                    one.first, one.last = min(one.first, now), now
