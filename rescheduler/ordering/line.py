"""A line of waiting requests in the order of service, as long as it is, and what it learns."""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.ordering.kernel import (
    LATENCIES,
    LATENCIES_A_RATE,
    new_waiting,
    put_in_order,
    tail_rate,
)
from rescheduler.ordering.service_order import ServiceOrder

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Room(NamedTuple):
    """What requests share.

    Attributes:
        slots: requests that an instance runs at a time.
        capacity: tokens that its KV cache holds.
        step_seconds: that a decode step takes.
    """

    slots: float
    capacity: float
    step_seconds: float


class Line:
    """Puts waiting requests in the order of service, and estimates the rate of a boost."""

    def __init__(self, order: ServiceOrder) -> None:
        self._parameters = order.parameters()
        self._waiting = new_waiting(256)
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._gamma, self._unseen = 0.0, 0
        self._scratch = np.zeros((2, LATENCIES), dtype=np.int64)

    def ended(self, latency: float) -> None:
        """Learn from a request that has ended by itself, after so many seconds."""
        self._latencies.append(latency)
        self._unseen += 1

    def put_in_order(
        self, waited: FloatArray, left: FloatArray, context: FloatArray, latest: float, room: Room
    ) -> tuple[IntArray, bool]:
        r"""Return the order of n requests, and whether the first holds back the others.

        A request costs the larger of its shares of an instance's places and memory, times the
        seconds for which it holds them:

        .. math:: \max\Big(\frac{1}{S}, \frac{c + E[R]/2}{K}\Big) E[R]\,\tau

        Args:
            waited: [n] seconds, in order of arrival.
            left: [n] tokens that each is expected to generate, at least 1.
            context: [n] tokens that it has.
            latest: seconds of waiting after which any of them is overdue.
            room: that they share.
        """
        n = len(waited)
        if self._unseen >= LATENCIES_A_RATE:
            seen = np.array(self._latencies)
            self._gamma, self._unseen = tail_rate(seen, len(seen), *self._scratch), 0
        if n > len(self._waiting.key):
            self._waiting = new_waiting(2 * n)
        waiting = self._waiting
        waiting.waited[:n] = waited
        waiting.alone[:n] = left * room.step_seconds
        if self._parameters.by_prompt:
            waiting.cost[:n] = context
        else:
            slots, capacity = max(room.slots, 1.0), max(room.capacity, 1.0)
            held = np.maximum(1.0 / slots, (context + left / 2) / capacity)
            waiting.cost[:n] = held * waiting.alone[:n]
        waiting.latest[:n] = latest
        alone = put_in_order(self._parameters, self._gamma, waiting, n)
        return waiting.order[:n], alone

    def compile(self) -> None:
        """Order once, so that no request waits for a compiler."""
        put_in_order(self._parameters, 0.0, self._waiting, 2)
        tail_rate(np.zeros(1), 1, *self._scratch)
