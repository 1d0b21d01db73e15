"""How long one prediction takes, on one core."""

import time
from collections.abc import Callable

import numpy as np
import torch

__all__ = ["median_latency_ms"]


def median_latency_ms(
    call: Callable[[], object], seconds: float = 2.0, calls: tuple[int, int] = (5, 1000)
) -> float:
    """Return the median time of a call in milliseconds, on one thread, after a warm-up.

    Args:
        call: one prediction of one batch.
        seconds: keep calling for so long,
        calls: but at least and at most so many times.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call()
        times: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(times) < calls[0] or (len(times) < calls[1] and time.perf_counter() < deadline):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return float(np.median(times)) * 1e3
