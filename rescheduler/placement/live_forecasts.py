"""What the engines' telemetry forecasts of the proxy's requests, aged to now."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_collection.capture.request_ids import parse_request_id
from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.telemetry_messages import decode_survival
from rescheduler.placement.live_request import LiveRequest
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import KeptForecast

__all__ = ["LiveForecasts"]

_FIRST_MEAN = 256.0
_WEIGHT = 0.02  # of a newly finished request in the mean length
_KEPT = 50_000
_GRID = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)  # until an engine has told its own


class _Known(NamedTuple):
    """A forecast, and the request's context when it was made."""

    context: int
    tokens_left: int
    survival: bytes


class LiveForecasts:
    """The newest forecast of every request, wherever it was made.

    A forecast is aged by the tokens its request has got since, also on another instance, until
    one comes from there. Until its first one a request is expected to be like those that ended
    lately: S(h) = exp(-h / mean length).

    Args:
        telemetry: of the engines.
    """

    def __init__(self, telemetry: TelemetrySubscriber) -> None:
        self._telemetry = telemetry
        self._known: dict[str, _Known] = {}
        self._edges: tuple[int, ...] = ()
        self._mean_length = _FIRST_MEAN

    def refresh(self) -> None:
        """Take over what the engines have told."""
        for finished in self._telemetry.take_finished():
            if finished.event.finish_reason == "moved" and finished.forecasts:
                event, newest = finished.event, finished.forecasts[-1]
                self._take(event.request_id, event.prompt_tokens, newest, finished.edges)
        with self._telemetry.lock:
            for instance in self._telemetry.view.instances.values():
                for request_id, running in instance.requests.items():
                    latest = running.latest
                    kept = KeptForecast(latest.forecast_at, latest.tokens_left, latest.survival)
                    self._take(request_id, latest.prompt_tokens, kept, instance.edges)
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    def ended(self, request: LiveRequest, by_itself: bool) -> None:
        """Forget a request, and learn its length if it ended by itself."""
        self._known.pop(request.external_id, None)
        if by_itself:
            self._mean_length += _WEIGHT * (request.generated_tokens - self._mean_length)

    def forecast(self, requests: Sequence[LiveRequest]) -> SurvivalForecast:
        """Return the forecasts of some requests, [n_requests]."""
        edges = np.array(self._edges or _GRID, dtype=np.float64)
        survival = np.empty((len(requests), len(edges)))
        age = np.zeros(len(requests))
        left = np.full(len(requests), np.inf)
        prior = np.exp(-edges / max(1.0, self._mean_length))
        for i, request in enumerate(requests):
            known = self._known.get(request.external_id)
            if known is None:
                survival[i] = prior
                if request.client.max_tokens is not None:
                    left[i] = max(1, request.client.max_tokens - request.generated_tokens)
            else:
                survival[i] = decode_survival([known.survival], len(edges))[0]
                context = request.prompt_tokens + request.generated_tokens
                age[i] = max(0, context - known.context)
                left[i] = known.tokens_left
        return SurvivalForecast.new(edges, survival, left).aged(age)

    def _take(
        self, request_id: str, prompt_tokens: int, told: KeptForecast, edges: tuple[int, ...]
    ) -> None:
        if edges != self._edges:  # another predictor: what it says replaces all
            self._edges = edges
            self._known.clear()
        name = parse_request_id(request_id).external_id
        known = self._known.get(name)
        context = prompt_tokens + told.forecast_at
        if known is None or context >= known.context:
            self._known[name] = _Known(context, told.tokens_left, told.survival)
