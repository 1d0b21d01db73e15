"""Requests that wait, in the order of service."""

from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np
import numpy.typing as npt

from rescheduler.ordering import ServiceOrder
from rescheduler.ordering.line import Line, Room
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import R
from rescheduler.step_time.mean_step_time import MeanStepTime

__all__ = ["WaitingLine", "promised_first"]

_FRESH_SECONDS = 0.1
"""Until what is expected of a waiting request is asked anew: many decisions are made meanwhile."""


def promised_first(requests: list[R], now: float, longest: float) -> list[R]:
    """Return requests with those first that must start now to finish as promised.

    Of these the one with the earliest promise leads; one that is late already does not. The others
    keep their order; once the first of them has waited ``longest`` seconds, every second place is
    theirs, so that promises keep nobody out.
    """
    urgent = [one for one in requests if one.start_by <= now < one.finish_by]
    if not urgent:
        return requests
    urgent.sort(key=lambda request: request.finish_by)
    chosen = set(urgent)
    others = [request for request in requests if request not in chosen]
    if not others or now - others[0].arrived < longest:
        return [*urgent, *others]
    mixed = [one for pair in zip(others, urgent, strict=False) for one in pair]
    n = min(len(others), len(urgent))
    return [*mixed, *urgent[n:], *others[n:]]


class WaitingLine(Generic[R]):
    """Says which of the waiting requests goes first.

    Args:
        order: of service, not that of arrival.
        decodes: that serve.
        forecasts: of remaining lengths; None if no engine publishes them, so that all requests
            are expected to be like those that ended lately.
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
        self._line, self._decodes = Line(order), decodes
        self._step, self._clock = step, clock
        self._learns = forecasts is None
        self._forecasts = forecasts or LiveForecasts(None)
        self._latest = longest / 3
        self._left: dict[R, float] = {}
        self._left_at = clock()

    def ended(self, request: R) -> None:
        """Learn from a request that has ended by itself."""
        if self._learns:
            self._forecasts.ended(request, by_itself=True)
        self._line.ended(self._clock() - request.arrived)

    def in_order(self, requests: Sequence[R]) -> tuple[list[R], bool]:
        """Return requests, given as they came, in the order of service.

        Returns:
            Those, and whether the first holds back the others.
        """
        n = len(requests)
        if n == 0:
            self._left.clear()
            return [], False
        order, alone = self._line.put_in_order(
            waited=self._clock() - np.fromiter((one.arrived for one in requests), np.float64, n),
            left=self._expected_left(requests),
            context=np.fromiter((one.context_tokens for one in requests), np.float64, n),
            latest=self._latest,
            room=Room(
                slots=float(min(one.slots for one in self._decodes)),
                capacity=float(min(one.kv_capacity for one in self._decodes)),
                step_seconds=self._step.seconds,
            ),
        )
        return [requests[i] for i in order], alone

    def compile(self) -> None:
        """Order once, so that no request waits for a compiler."""
        self._line.compile()

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
