"""A request's forecast, averaged with those made of it before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast

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
        self._edges, self._half_life = edges, half_life
        self._latest: dict[str, tuple[int, FloatArray]] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def take(
        self, request_ids: Sequence[str], generated: Sequence[int], curves: FloatArray
    ) -> FloatArray:
        """Return the averages [n, n_edges] with new curves of some requests, and keep them.

        A request that is new here, also one that has moved from another engine, starts with
        what its state says.
        """
        found = curves.copy()
        known = [row for row, name in enumerate(request_ids) if name in self._latest]
        if known:
            before = [self._latest[request_ids[row]] for row in known]
            since = [max(0, generated[row] - n) for row, (n, _) in zip(known, before, strict=True)]
            found[known] = averaged(
                self._edges,
                np.stack([curve for _, curve in before]),
                np.array(since),
                curves[known],
                self._half_life,
            )
        self._latest.update(zip(request_ids, zip(generated, found, strict=True), strict=True))
        return found

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop requests that ended, known or not."""
        for name in request_ids:
            self._latest.pop(name, None)
