"""How long an event loop computes without looking at what else there is to do."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["Stalls", "watched_loop"]

_TICK = 0.005


@dataclass
class Stalls:
    """The longest stall so far, in seconds that the loop's thread computed.

    Not in those that passed: other processes may take the processor away.
    """

    longest: float = 0.0


@asynccontextmanager
async def watched_loop() -> AsyncIterator[Stalls]:
    """Watch the running event loop."""
    stalls = Stalls()

    async def tick() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(_TICK)
            stalls.longest = max(stalls.longest, time.thread_time() - before)

    ticking = asyncio.create_task(tick())
    try:
        yield stalls
    finally:
        ticking.cancel()
