"""What the engines' telemetry forecasts of the proxy's requests, aged to now."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from math import expm1, sqrt

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.openai.openai_request import MOST_TOKENS
from rescheduler.placement.placeable import Placeable
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import SURVIVAL_SCALE, ForecastBatch

_FIRST_ROWS = 256


class ForecastTable:
    """Forecasts whose curves share a grid, as arrays with a row per request.

    Attributes:
        edges: [n_edges] the grid, in tokens.
        context: [n_rows] tokens of prompt and output when each forecast was made.
        tokens_left: [n_rows] tokens to ``max_tokens`` from there.
    """

    def __init__(self, edges: tuple[int, ...]) -> None:
        self.edges = np.array(edges, dtype=np.float64)
        self.context = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self.tokens_left = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._survival = np.zeros((_FIRST_ROWS, len(edges)), dtype=np.uint16)
        self._rows: dict[str, int] = {}
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the row of each request, [n], -1 for one that has none."""
        find = self._rows.get
        return np.fromiter((find(name, -1) for name in names), np.int64, len(names))

    def put(self, batch: ForecastBatch, chosen: npt.NDArray[np.int64]) -> None:
        """Keep some forecasts of a batch, in place of older ones of the same requests."""
        names = [batch.names[i] for i in chosen]
        rows = self.rows(names)
        for i in np.flatnonzero(rows < 0).tolist():
            row = self._rows.get(names[i])
            rows[i] = self._rows[names[i]] = self._new_row() if row is None else row
        self.context[rows] = batch.context[chosen]
        self.tokens_left[rows] = batch.tokens_left[chosen]
        self._survival[rows] = batch.survival[chosen]

    def drop(self, name: str) -> None:
        """Forget a request, if it is known."""
        row = self._rows.pop(name, None)
        if row is not None:
            self._free.append(row)

    def survival(
        self, rows: npt.NDArray[np.int64], edges: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return curves on another grid that has all edges of this one, [n, n_edges].

        Exact, since the curves are linear between their edges; constant after the last one.
        """
        curves = self._survival[rows].astype(np.float64) / SURVIVAL_SCALE
        if len(edges) == len(self.edges):
            return curves
        right = np.clip(np.searchsorted(self.edges, edges, "right"), 1, len(self.edges) - 1)
        left = self.edges[right - 1]
        part = np.clip((edges - left) / (self.edges[right] - left), 0.0, 1.0)
        before = curves[:, right - 1]
        return np.asarray(before + part * (curves[:, right] - before))

    def _new_row(self) -> int:
        if not self._free:
            n = len(self.context)
            self.context = np.resize(self.context, 2 * n)
            self.tokens_left = np.resize(self.tokens_left, 2 * n)
            self._survival = np.resize(self._survival, (2 * n, len(self.edges)))
            self._free = list(range(2 * n - 1, n - 1, -1))
        return self._free.pop()


logger = logging.getLogger("headway.serve")

_FIRST_MEAN = 256.0
_WEIGHT = 0.02  # of a newly finished request in the mean length
_KEPT = 50_000
_MOST_FAILED = 100
_GRID = (0, *(2**i for i in range(17)))  # until an engine has published its own


class LiveForecasts:
    """The newest forecast of every request, wherever it was made.

    A forecast is aged by the tokens its request has got since, also on another instance, until
    one comes from there. Until its first one S(h) = exp(-h / m), with m the mean length of recently
    finished requests; or such that the mean, cut at ``max_tokens``, is what its prompt suggests.

    Engines may have predictors with different grids, as during a rolling change: forecasts are
    kept by grid, and read on the union of the grids, on which each curve is the same function. A
    grid that no engine has any more is dropped, so that there are no more grids than engines. Of
    too many forecasts, the oldest of the engine that has made most are dropped.

    Without telemetry all requests are like those that ended lately.

    Of a request that stays where it is placed, whose tokens may not be seen one by one, an engine
    also says here how many it has.
    """

    def __init__(self, telemetry: TelemetrySubscriber | None) -> None:
        self._telemetry = telemetry
        self._tables: dict[tuple[int, ...], ForecastTable] = {}
        self._mean_length = _FIRST_MEAN
        self._running: dict[str, dict[Placeable, None]] = {}
        self._shared: set[str] = set()  # names that two requests have: nobody knows whose it is
        self._ended: OrderedDict[str, None] = OrderedDict()  # what is on its way is not for others
        self._grids: dict[str, tuple[int, ...]] = {}
        self._made_by: dict[str, str] = {}
        self._of: dict[str, OrderedDict[str, None]] = {}
        self._failed: set[str] = set()

    def refresh(self) -> None:
        """Take over what the engines have published since the last call."""
        if self._telemetry is None:
            return
        for batch in self._telemetry.take_forecasts():
            try:
                self._take(batch)
            except Exception:
                self._note_failed(batch.instance, "its forecasts cannot be used")
        tables, grids = self._tables, set(self._grids.values())
        for edges in [edges for edges, table in tables.items() if not table or edges not in grids]:
            del tables[edges]  # of a replaced predictor
        while (surplus := len(self._made_by) - _KEPT) > 0:
            most = max(self._of.values(), key=len)
            for name in list(islice(most, min(surplus, 1 + len(most) // 8))):
                self._drop(name)

    def began(self, request: Placeable) -> None:
        """Expect forecasts of a request, which may have the id of an earlier one."""
        name = request.external_id
        self._ended.pop(name, None)
        running = self._running.setdefault(name, {})
        running[request] = None
        if len(running) > 1 and name not in self._shared:
            self._shared.add(name)
            self._drop(name)

    def handed_over(self, request: Placeable, other: Placeable) -> None:
        """Have another take a request's place: what is forecast is of it, too."""
        running = self._running.setdefault(request.external_id, {})
        running.pop(request, None)
        running[other] = None

    def ended(self, request: Placeable, by_itself: bool) -> None:
        """Forget a request, and learn its length if it ended by itself.

        One that its ``max_tokens`` cut only says that answers are at least as long.
        """
        name = request.external_id
        running = self._running.get(name, {})
        running.pop(request, None)
        if not running:
            self._running.pop(name, None)
            self._shared.discard(name)
        if not running and self._telemetry is not None:  # else no forecast is on its way
            self._ended[name] = None
            if len(self._ended) > _KEPT:
                self._ended.popitem(last=False)
            self._drop(name)
        if by_itself and request.generated_tokens and not request.several:
            more = request.generated_tokens - self._mean_length
            self._mean_length += _WEIGHT * (max(0.0, more) if request.was_cut else more)

    def has(self, name: str) -> bool:
        """Return whether an engine has made a forecast of the request that it calls so."""
        return name in self._made_by

    def forecast(self, requests: Sequence[Placeable]) -> SurvivalForecast:
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
        means = np.full(n, max(1.0, self._mean_length))
        for i in np.flatnonzero(unknown).tolist():
            try:
                left[i], means[i] = self._before_any(requests[i], means[i])
            except Exception:  # no request may end the forecasts of all
                self._note_failed(names[i], "its length cannot be forecast")
        survival[unknown] = np.exp(-edges / means[unknown, None])
        fewest = np.fromiter((r.fewest_tokens - r.generated_tokens for r in requests), float, n)
        return SurvivalForecast(edges, survival, age, left).at_least(fewest)

    def _before_any(self, request: Placeable, mean: float) -> tuple[float, float]:
        """Return the tokens left and the mean of a request that no engine has forecast."""
        most, left = request.max_tokens, np.inf
        if most is not None:
            left = max(1, min(most, MOST_TOKENS) - request.generated_tokens)
        if request.expected_tokens is not None:
            mean = _uncut(request.expected_tokens, most)
        return left, mean

    def _note_failed(self, name: str, what: str) -> None:
        if name not in self._failed:
            logger.exception("%s: %s", name, what)
            if len(self._failed) >= _MOST_FAILED:
                self._failed.clear()
            self._failed.add(name)

    def _take(self, batch: ForecastBatch) -> None:
        """Keep the forecasts of a batch that are newer than what is known of their requests.

        The engine that has a request knows best, whatever another one says of it.
        """
        newest = np.array([self._is_one(name) for name in batch.names], dtype=bool)
        for table in self._tables.values():
            rows = table.rows(batch.names)
            newest &= (rows < 0) | (batch.context >= table.context[rows])
        own = np.zeros(len(newest), dtype=bool)
        for i, name in enumerate(batch.names):
            request = next(iter(self._running.get(name, ())), None)
            if request is not None and self._is_one(name):
                at = {one.name for one in (request.instance, request.destination) if one}
                own[i] = batch.instance in at
                newest[i] = own[i] or (newest[i] and self._made_by.get(name) not in at)
        chosen = np.flatnonzero(newest)
        for i in chosen.tolist():
            request = next(iter(self._running.get(batch.names[i], ())), None)
            if request is not None and own[i] and not request.movable:
                prompt = int(batch.prompt_tokens[i])
                generated = int(batch.context[i]) - prompt
                request.reported(min(prompt, MOST_TOKENS), min(generated, MOST_TOKENS))
            self._made(batch.names[i], batch.instance)
        self._grids[batch.instance] = batch.edges
        if batch.edges not in self._tables:
            self._tables[batch.edges] = ForecastTable(batch.edges)
        for edges, table in self._tables.items():
            if edges == batch.edges:
                table.put(batch, chosen)
            elif len(table):
                for i in chosen.tolist():
                    table.drop(batch.names[i])

    def _is_one(self, name: str) -> bool:
        """Return whether a name may be of a request, and not of two."""
        return name not in self._ended and name not in self._shared

    def _made(self, name: str, instance: str) -> None:
        """Note which engine has made the forecast of a request."""
        before = self._made_by.get(name)
        if before != instance:
            if before is not None:
                del self._of[before][name]
            self._made_by[name] = instance
            self._of.setdefault(instance, OrderedDict())[name] = None

    def _drop(self, name: str) -> None:
        instance = self._made_by.pop(name, None)
        if instance is not None:
            del self._of[instance][name]
            for table in self._tables.values():
                table.drop(name)


def _uncut(expected: int, most: int | None) -> float:
    r"""Return m of an exponential length whose mean is as expected once it is cut.

    .. math:: m \,(1 - e^{-L / m}) = \bar r
    """
    low, high = float(max(1, min(expected, MOST_TOKENS))), float(MOST_TOKENS)
    if most is None:
        return low
    most = max(1, most)
    while high / low > 1.01:
        m = sqrt(low * high)
        low, high = (low, m) if -m * expm1(-most / m) > expected else (m, high)
    return low
