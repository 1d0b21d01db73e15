"""Whether the event loop keeps up: while it computes, every stream waits."""

import asyncio
import time

from rescheduler.proxy.proxy_metrics import ProxyMetrics

__all__ = ["watch_loop"]

_SECONDS = 0.02


async def watch_loop(metrics: ProxyMetrics) -> None:
    """Measure, forever, how late the loop runs what is due, and how long it computes at a stretch.

    The first also counts other programs on the same cores, the second the loop's thread alone.
    """
    loop = asyncio.get_running_loop()
    while True:
        due, computed = loop.time() + _SECONDS, time.thread_time()
        await asyncio.sleep(_SECONDS)
        metrics.loop_late(loop.time() - due, time.thread_time() - computed)
