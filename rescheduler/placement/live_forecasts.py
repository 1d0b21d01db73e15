"""What the engines' telemetry forecasts of the proxy's requests, aged to now."""

from collections.abc import Sequence

import numpy as np

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.placement.forecast_table import ForecastTable
from rescheduler.placement.placeable import Counted, Placeable
from rescheduler.telemetry.forecast_batch import ForecastBatch
from rescheduler.telemetry.subscriber import TelemetrySubscriber

__all__ = ["LiveForecasts"]

_FIRST_MEAN = 256.0
_WEIGHT = 0.02  # of a newly finished request in the mean length
_KEPT = 50_000
_MOST_TOKENS = 2**40  # a client may ask for a number that no float holds
_GRID = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)  # until an engine has published its own


class LiveForecasts:
    """The newest forecast of every request, wherever it was made.

    A forecast is aged by the tokens its request has got since, also on another instance, until
    one comes from there. Until its first one a request is expected to be like those that ended
    lately: S(h) = exp(-h / mean length).

    Engines may have predictors with different grids, as during a rolling change: forecasts are
    kept by grid, and read on the union of the grids, on which each curve is the same function.

    Of a request that stays where it is placed, whose tokens may not be seen one by one, an engine
    also says here how many it has.

    Args:
        telemetry: of the engines.
    """

    def __init__(self, telemetry: TelemetrySubscriber) -> None:
        self._telemetry = telemetry
        self._tables: dict[tuple[int, ...], ForecastTable] = {}
        self._mean_length = _FIRST_MEAN
        self._staying: dict[str, Placeable] = {}
        self._ended: dict[str, None] = {}  # the latest; what is on its way is not for the next

    def refresh(self) -> None:
        """Take over what the engines have published since the last call."""
        for batch in self._telemetry.take_forecasts():
            self._take(batch)
        tables = self._tables
        for edges in [edges for edges, table in tables.items() if not table]:
            del tables[edges]  # the last request of a replaced predictor has ended
        while sum(map(len, tables.values())) > _KEPT:
            max(tables.values(), key=len).drop_oldest()

    def began(self, request: Placeable) -> None:
        """Expect forecasts of a request, which may have the id of an earlier one."""
        self._ended.pop(request.external_id, None)
        if not request.movable:
            self._staying[request.external_id] = request

    def ended(self, request: Placeable, by_itself: bool) -> None:
        """Forget a request, and learn its length if it ended by itself."""
        if self._staying.get(request.external_id) is request:
            del self._staying[request.external_id]
        self._ended[request.external_id] = None
        if len(self._ended) > _KEPT:
            del self._ended[next(iter(self._ended))]
        for table in self._tables.values():
            table.drop(request.external_id)
        if by_itself and request.generated_tokens:  # else it had none to generate, or none counts
            self._mean_length += _WEIGHT * (request.generated_tokens - self._mean_length)

    def forecast(self, requests: Sequence[Counted]) -> SurvivalForecast:
        """Return the forecasts of some requests, [n_requests]."""
        n, names = len(requests), [request.external_id for request in requests]
        tables = list(self._tables.values())
        edges = np.array(_GRID, dtype=np.float64)
        if tables:
            edges = np.unique(np.concatenate([table.edges for table in tables]))
        survival, age, left = np.empty((n, len(edges))), np.zeros(n), np.full(n, np.inf)
        unknown = np.ones(n, dtype=bool)
        context = np.fromiter((r.context_tokens for r in requests), float, n)
        for table in tables:
            rows = table.rows(names)
            known = rows >= 0
            rows = rows[known]
            survival[known] = table.survival(rows, edges)
            age[known] = np.maximum(0.0, context[known] - table.context[rows])
            left[known] = table.tokens_left[rows]
            if len(tables) > 1:  # no request passes the last edge of its own grid
                left[known] = np.minimum(left[known], table.edges[-1])
            unknown &= ~known
        survival[unknown] = np.exp(-edges / max(1.0, self._mean_length))
        for i in np.flatnonzero(unknown).tolist():
            most = requests[i].max_tokens
            if most is not None:
                left[i] = max(1, min(most, _MOST_TOKENS) - requests[i].generated_tokens)
        return SurvivalForecast(edges, survival, age, left)  # checked when it was received

    def _take(self, batch: ForecastBatch) -> None:
        """Keep the forecasts of a batch that are newer than what is known of their requests."""
        newest = np.array([name not in self._ended for name in batch.names], dtype=bool)
        for table in self._tables.values():
            rows = table.rows(batch.names)
            newest &= (rows < 0) | (batch.context >= table.context[rows])
        chosen = np.flatnonzero(newest)
        for i in chosen.tolist():
            request = self._staying.get(batch.names[i])
            if request is not None:
                prompt = int(batch.prompt_tokens[i])
                request.reported(prompt, int(batch.context[i]) - prompt)
        if batch.edges not in self._tables:
            self._tables[batch.edges] = ForecastTable(batch.edges)
        for edges, table in self._tables.items():
            if edges == batch.edges:
                table.put(batch, chosen)
            elif len(table):
                for i in chosen.tolist():
                    table.drop(batch.names[i])
