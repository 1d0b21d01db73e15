"""Requests that wait, in the order of service."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np
import numpy.typing as npt

from rescheduler.ordering import ServiceOrder
from rescheduler.ordering.kernel import (
    LATENCIES,
    LATENCIES_A_RATE,
    Waiting,
    new_waiting,
    put_in_order,
    tail_rate,
)
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.mean_step_time import MeanStepTime
from rescheduler.placement.placeable import R

__all__ = ["WaitingLine"]

_FRESH_SECONDS = 0.1
"""Until what is expected of a waiting request is asked anew: many decisions are made meanwhile."""


class WaitingLine(Generic[R]):
    """Says which of the waiting requests goes first.

    Args:
        order: of service, not that of arrival.
        decodes: that serve.
        forecasts: of remaining lengths; None if no engine publishes them, so that all requests
            are expected to be like those that ended lately.
        step: how long a decode step takes.
        clock: seconds, of the event loop.
        longest: seconds for which a request may wait; well before, it is overdue.
    """

    def __init__(
        self,
        order: ServiceOrder,
        decodes: Sequence[InstanceState],
        forecasts: LiveForecasts | None,
        step: MeanStepTime,
        clock: Callable[[], float],
        longest: float,
    ) -> None:
        self._parameters, self._decodes = order.parameters(), decodes
        self._step, self._clock = step, clock
        self._learns = forecasts is None
        self._forecasts = forecasts or LiveForecasts(None)
        self._latest = longest / 3
        self._waiting = new_waiting(256)
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._gamma, self._unseen = 0.0, 0
        self._left: dict[R, float] = {}
        self._left_at = clock()
        self._scratch = np.zeros((2, LATENCIES), dtype=np.int64)

    def ended(self, request: R) -> None:
        """Learn from a request that has ended by itself."""
        if self._learns:
            self._forecasts.ended(request, by_itself=True)
        self._latencies.append(self._clock() - request.arrived)
        self._unseen += 1

    def in_order(self, requests: Sequence[R]) -> tuple[list[R], bool]:
        """Return requests in the order of service, and whether the first holds back the others.

        Args:
            requests: in order of arrival.
        """
        n = len(requests)
        if n == 0:
            self._left.clear()
            return [], False
        if self._unseen >= LATENCIES_A_RATE:
            seen = np.array(self._latencies)
            self._gamma, self._unseen = tail_rate(seen, len(seen), *self._scratch), 0
        waiting = self._foreseen(requests)
        alone = put_in_order(self._parameters, self._gamma, waiting, n)
        return [requests[i] for i in waiting.order[:n]], alone

    def compile(self) -> None:
        """Order once, so that no request waits for a compiler."""
        put_in_order(self._parameters, 0.0, self._waiting, 2)
        tail_rate(np.zeros(1), 1, *self._scratch)

    def _foreseen(self, requests: Sequence[R]) -> Waiting:
        r"""Write what is known of requests that wait.

        A request costs the larger of its shares of an instance's places and memory, times the
        seconds for which it holds them:

        .. math:: \max\Big(\frac{1}{S}, \frac{c + E[R]/2}{K}\Big) E[R]\,\tau
        """
        n, waiting = len(requests), self._waiting
        if n > len(waiting.key):
            self._waiting = waiting = new_waiting(2 * n)
        left = self._expected_left(requests)
        context = np.fromiter((one.context_tokens for one in requests), np.float64, n)
        arrived = np.fromiter((one.arrived for one in requests), np.float64, n)
        slots = max(float(min(one.slots for one in self._decodes)), 1.0)
        capacity = max(float(min(one.kv_capacity for one in self._decodes)), 1.0)
        waiting.waited[:n] = self._clock() - arrived
        waiting.alone[:n] = left * self._step.seconds
        if self._parameters.by_prompt:
            waiting.cost[:n] = context
        else:
            held = np.maximum(1.0 / slots, (context + left / 2) / capacity)
            waiting.cost[:n] = held * waiting.alone[:n]
        waiting.latest[:n] = self._latest
        return waiting

    def _expected_left(self, requests: Sequence[R]) -> npt.NDArray[np.float64]:
        """Return the tokens that requests are expected to generate, [n], at least 1."""
        if self._clock() - self._left_at >= _FRESH_SECONDS:
            self._left.clear()
            self._left_at = self._clock()
        known = self._left
        new = [one for one in requests if one not in known]
        if new:
            self._forecasts.refresh()
            means = np.maximum(self._forecasts.forecast(new).mean(), 1.0)
            known.update(zip(new, means.tolist(), strict=True))
        return np.fromiter((known[one] for one in requests), np.float64, len(requests))
