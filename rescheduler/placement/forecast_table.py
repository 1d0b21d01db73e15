"""The newest forecast of each request, a row each, on one grid."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rescheduler.telemetry.forecast_batch import SURVIVAL_SCALE, ForecastBatch

__all__ = ["ForecastTable"]

_FIRST_ROWS = 256


class ForecastTable:
    """Forecasts whose curves share a grid, as arrays with a row per request.

    Args:
        edges: [n_edges] the grid, in tokens.

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
        """Return the number of requests that have a forecast here."""
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
