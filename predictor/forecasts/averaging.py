"""A request's forecast, averaged with those made of it before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast

__all__ = ["RunningAverages", "average_requests", "averaged"]

FloatArray = npt.NDArray[np.float64]


def averaged(
    edges: npt.NDArray[Any],
    earlier: FloatArray,
    since: npt.NDArray[Any],
    current: FloatArray,
    half_life: float,
) -> FloatArray:
    r"""Average curves with the averages that were made of the same requests Δ tokens before.

    .. math:: \bar S_n(h) = a\, \frac{\bar S_{n-\Delta}(h + \Delta)}{\bar S_{n-\Delta}(\Delta)}
        + (1 - a)\, S_n(h), \qquad a = 2^{-\Delta / \text{half-life}}

    One state says only in part what a request will do. The states of a request at different
    tokens err differently, so that the average of what they say, each aged to now, errs less.

    Args:
        edges: [n_edges] tokens from 0.
        earlier: [n, n_edges] the earlier averages.
        since: [n] Δ, tokens generated since.
        current: [n, n_edges] what the state now says.
        half_life: tokens after which an earlier forecast counts half as much.

    Returns:
        [n, n_edges] survival curves, which start at 1 and never rise.
    """
    since = np.asarray(since, dtype=np.float64)
    aged = np.empty_like(current)
    for tokens in np.unique(since):  # k, for all but the newest
        rows = since == tokens
        fresh = SurvivalForecast.new(edges, earlier[rows])
        aged[rows] = fresh.aged(tokens).at(edges)
    share = 0.5 ** (since / half_life)[:, None]
    curves: FloatArray = share * aged + (1 - share) * current
    curves[:, 0] = 1.0  # the shares need not sum to 1 exactly
    return curves


def average_requests(
    edges: npt.NDArray[Any],
    curves: FloatArray,
    request: npt.NDArray[Any],
    generated: npt.NDArray[Any],
    half_life: float,
) -> FloatArray:
    """Average the curve of each row with those of the rows of its request before it.

    See `averaged`. Row i of ``curves`` [n_rows, n_edges] is what it says by itself, of request
    ``request[i]`` when it had generated ``generated[i]`` tokens; rows may come in any order.
    """
    order = np.lexsort((generated, request))
    first = np.append(True, np.diff(request[order]) != 0)
    place = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    found = curves.copy()
    for i in range(1, place.max(initial=0) + 1):
        at = np.flatnonzero(place == i)
        now, before = order[at], order[at - 1]
        since = generated[now] - generated[before]
        found[now] = averaged(edges, found[before], since, curves[now], half_life)
    return found


class RunningAverages:
    """The same while requests run: keeps the latest average of each."""

    def __init__(self, edges: npt.NDArray[Any], half_life: float) -> None:
        self._edges = edges
        self._half_life = half_life
        self._row: dict[str, int] = {}
        self._free: list[int] = []
        self._curves = np.empty((0, len(edges)))
        self._generated = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of requests that are kept."""
        return len(self._row)

    def take(
        self, request_ids: Sequence[str], generated: Sequence[int], curves: FloatArray
    ) -> FloatArray:
        """Return the averages [n, n_edges] with new curves of some requests, and keep them.

        A request that is new here, also one that has moved from another engine, starts with
        what its state says.
        """
        known = np.array([name in self._row for name in request_ids], dtype=bool)
        rows = np.array([self._row_of(name) for name in request_ids], dtype=np.int64)
        now, found = np.asarray(generated, dtype=np.int64), curves.copy()
        if known.any():
            before = rows[known]
            since = np.maximum(now[known] - self._generated[before], 0)
            found[known] = averaged(
                self._edges, self._curves[before], since, curves[known], self._half_life
            )
        self._curves[rows], self._generated[rows] = found, now
        return found

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop requests that ended, known or not."""
        for name in request_ids:
            row = self._row.pop(name, None)
            if row is not None:
                self._free.append(row)

    def _row_of(self, name: str) -> int:
        """Return a request's row; a new one's is free, or the first of as many again."""
        row = self._row.get(name)
        if row is None:
            if not self._free:
                taken = len(self._curves)
                more = max(16, taken)
                self._curves = np.concatenate([self._curves, np.empty((more, len(self._edges)))])
                self._generated = np.append(self._generated, np.zeros(more, dtype=np.int64))
                self._free = list(range(taken, taken + more))
            row = self._row[name] = self._free.pop()
        return row
