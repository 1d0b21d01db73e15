"""Forecasts of the remaining length: survival curves and point forecasts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from predictor.forecasts.curve_plot import draw_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes


FloatArray = npt.NDArray[np.float64]
Tokens = npt.ArrayLike
"""Numbers of tokens: one for all requests, or [n_requests]."""

_INTERVAL = (0.1, 0.5, 0.9)
_SHOWN = 0.98
"""A figure leaves out the last of a curve's tail, which would squeeze the rest."""
_POINTS = 2048
_MOST_CURVES = 8
_MOST_POINTS = 64
"""Edges that are added to a grid for what requests generate at least."""


class ForecastError(ValueError):
    """Arrays that are no forecast: another shape, a rising curve, a negative age."""


class Forecast(ABC):
    """What is known of the remaining tokens R of n requests that still run.

    S(h) = P(R > h): S(0) = 1 since a running request has a token to come, S never rises, and
    S(h) = 0 from the request's ``max_tokens`` on.

    Attributes:
        age: [n_requests] whole tokens generated since the prediction.
        limit: [n_requests] remaining tokens at which the request is cut (``max_tokens`` less
            those generated), counted from the prediction; infinite when there is none.
    """

    __slots__ = ()
    age: FloatArray
    limit: FloatArray

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of requests."""

    def at(self, h: npt.ArrayLike) -> FloatArray:
        """Return S(h): [n_requests] for one h in tokens, [n_requests, n_h] for several.

        Raises:
            ForecastError: an h is negative.
        """
        horizon = np.asarray(h, dtype=np.float64)
        if horizon.ndim > 1 or (horizon < 0).any():
            raise ForecastError("h is one number of tokens, or several, none negative")
        survival = self._survival(np.atleast_1d(horizon)[None, :])
        return survival if horizon.ndim else survival[:, 0]

    def at_each(self, h: Tokens) -> FloatArray:
        """Return S_i(h_i), [n_requests], for a number of tokens of each request's own."""
        return self._survival(_checked_tokens(h, len(self))[:, None])[:, 0]

    @abstractmethod
    def mean(self) -> FloatArray:
        """Return E[R] in tokens, at least 1, [n_requests]."""

    def quantile(self, q: npt.ArrayLike) -> FloatArray:
        """Return the smallest h with P(R ≤ h) ≥ q: [n_requests], or [n_requests, n_q].

        Raises:
            ForecastError: a q is outside [0, 1].
        """
        levels = np.asarray(q, dtype=np.float64)
        if levels.ndim > 1 or (levels < 0).any() or (levels > 1).any():
            raise ForecastError("q is one level, or several, in [0, 1]")
        tokens = self._quantiles(np.atleast_1d(levels))
        return tokens if levels.ndim else tokens[:, 0]

    @abstractmethod
    def select(self, rows: npt.NDArray[Any]) -> "Forecast":
        """Return the forecast of some of the requests."""

    @abstractmethod
    def on_grid(self, edges: npt.ArrayLike) -> "SurvivalForecast":
        """Return the curve through S at the given edges (exact there, linear between)."""

    def median(self) -> FloatArray:
        """Return the smallest h with S(h) ≤ 1/2, in tokens, [n_requests]."""
        return self.quantile(0.5)

    def aged(self, tokens: Tokens) -> Self:
        """Return the forecast of the same requests after so many more tokens.

        Raises:
            ForecastError: negative, or not one number or one a request.
        """
        return self._with(age=self.age + _checked_tokens(tokens, len(self)))

    def capped(self, limit: Tokens) -> Self:
        """Return the forecast of requests that are cut after ``limit`` more tokens."""
        new = self.age + _checked_tokens(limit, len(self))
        return self._with(limit=np.minimum(self.limit, new))

    def uncapped(self) -> Self:
        """Return the forecast of the same requests if nothing but the model's limit cut them."""
        return self._with(limit=np.full(len(self), np.inf))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw S(h) of each request, its median and, shaded, its 80% interval.

        Args:
            ax: matplotlib axes to draw on; a new figure if there are none.

        Raises:
            ForecastError: no request, or more than can be told apart.
        """
        if not 1 <= len(self) <= _MOST_CURVES:
            raise ForecastError(
                f"a figure shows 1 to {_MOST_CURVES} requests, not {len(self)}: choose some with "
                "select(rows)"
            )
        end = 1.1 * float(self.quantile(_SHOWN).max()) + 1
        tokens = np.unique(np.linspace(0, np.ceil(end), _POINTS).astype(np.int64))
        return draw_curves(tokens, self.at(tokens), self.quantile(_INTERVAL), ax)

    def __repr__(self) -> str:
        name, n = type(self).__name__, len(self)
        if n == 0:
            return f"<{name}: no requests>"
        low, median, high = np.ceil(self.quantile(_INTERVAL)).T
        if n == 1:
            return (
                f"<{name}: median {median[0]:,.0f} tokens, "
                f"80% between {low[0]:,.0f} and {high[0]:,.0f}>"
            )
        most = f"from {median.min():,.0f} to {median.max():,.0f} tokens"
        return f"<{name}: {n} requests, medians {most}>"

    @abstractmethod
    def _survival(self, h: FloatArray) -> FloatArray:
        """S(h), [n_requests, n_h], for tokens [1, n_h] that all share or [n_requests, n_h]."""

    @abstractmethod
    def _quantiles(self, levels: FloatArray) -> FloatArray:
        """The quantiles, [n_requests, n_q], at levels [n_q]."""

    def _with(self, **changes: FloatArray) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, repr=False)
class SurvivalForecast(Forecast):
    r"""Survival curves on a grid of token counts that all requests share.

    Between two edges the curve is linear, that is, the end of the request is spread evenly
    over the tokens of a bin. After j tokens without an end, and without a new prediction,

    .. math:: S(h \mid j) = S(j + h) / S(j),

    which composes: ageing by a and then by b is ageing by a + b. A request that outlived its
    whole curve is expected to end with its next token.

    Attributes:
        edges: [n_edges] ascending whole tokens from 0; the last is the model's limit, which
            no request passes.
        survival: [n_requests, n_edges] P(R > edge) when the prediction was made; 1 at edge 0,
            never rising.
    """

    edges: FloatArray
    survival: npt.NDArray[np.floating[Any]]
    age: FloatArray
    limit: FloatArray

    @classmethod
    def new(
        cls, edges: npt.ArrayLike, survival: npt.ArrayLike, limit: Tokens = np.inf
    ) -> "SurvivalForecast":
        """Return a fresh forecast (age 0), its arrays checked.

        Raises:
            ForecastError: the edges do not ascend in whole tokens from 0, or a curve has
                another length, does not start at 1, rises, or leaves [0, 1].
        """
        grid, curves = np.asarray(edges, dtype=np.float64), np.asarray(survival)
        whole = grid.ndim == 1 and len(grid) > 1 and bool((grid == np.floor(grid)).all())
        if not whole or grid[0] != 0 or (np.diff(grid) <= 0).any():
            raise ForecastError("edges must be whole token counts that ascend from 0")
        if curves.ndim != 2 or curves.shape[1] != len(grid):
            raise ForecastError(f"survival has shape {curves.shape}, the grid {len(grid)} edges")
        if not np.isfinite(curves).all() or (curves < 0).any() or (curves[:, 0] != 1).any():
            raise ForecastError("survival must start at 1 and stay in [0, 1]")
        if (np.diff(curves, axis=1) > 0).any():
            raise ForecastError("survival must never rise")
        n_requests = len(curves)
        return cls(grid, curves, np.zeros(n_requests), _per_request(limit, n_requests))

    def __len__(self) -> int:
        return len(self.survival)

    def mean(self) -> FloatArray:
        r"""Return E[R] in tokens, [n_requests].

        .. math:: E[R] = \sum_{h \ge 0} S(h)
            = \int_0^L S + \tfrac12 \big(S(0) - S(L^-)\big)

        for S linear between whole tokens, with L the tokens left to the limit.
        """
        end = self.age + self._left()
        alive, last = self._curve(self.age[:, None])[:, 0], self._curve(end[:, None])[:, 0]
        area = self._integral(self.age) - self._integral(end) + (alive - last) / 2
        tokens = np.divide(area, alive, out=np.ones_like(area), where=alive > 0)
        return np.asarray(np.clip(tokens, 1.0, end - self.age))

    def _quantiles(self, levels: FloatArray) -> FloatArray:
        alive = self._curve(self.age[:, None])[:, 0]
        columns = []
        for level in levels:
            target = (1 - level) * alive
            # Rounding in a product must not push an exact level to the next step of a curve.
            above = (self.survival > target[:, None] * (1 + 1e-9)).sum(axis=1)
            right = np.clip(above, 1, len(self.edges) - 1)
            rows = np.arange(len(self))
            high, low = self.survival[rows, right - 1], self.survival[rows, right]
            drop = np.where(high > low, high - low, 1.0)
            part = np.clip((high - target) / drop, 0.0, 1.0)
            width = self.edges[right] - self.edges[right - 1]
            reached = self.edges[right - 1] + part * width
            reached = np.where(above == len(self.edges), np.inf, reached)
            columns.append(np.clip(reached - self.age, 0.0, self._left()))
        return np.stack(columns, axis=1)

    def select(self, rows: npt.NDArray[Any]) -> "SurvivalForecast":
        """Return the forecast of some of the requests."""
        return SurvivalForecast(self.edges, self.survival[rows], self.age[rows], self.limit[rows])

    def at_least(self, tokens: npt.ArrayLike) -> "SurvivalForecast":
        r"""Return the forecast of requests that will generate so many more tokens at least.

        .. math:: S_m(h) = \begin{cases} 1 & h < m \\ S(h) / S(m) & h \ge m \end{cases}

        with S linear between the edges and m: those of the first 64 different requests are added
        to them, and those of others rounded down to one.

        Args:
            tokens: [n_requests] m; 0 for those that may end with any token.
        """
        until = np.asarray(tokens, dtype=np.float64)
        bound = until > 0
        if not bound.any():
            return self
        until = np.where(bound, np.minimum(np.floor(self.age) + until, self.edges[-1] - 1), 0.0)
        points = np.unique(until[bound])[:_MOST_POINTS]
        edges = np.unique(np.concatenate([self.edges, points]))
        until = edges[np.searchsorted(edges, until, "right") - 1]
        curves = self._curve(edges[None, :])
        reached = self._curve(until[:, None])
        later = np.divide(curves, reached, out=np.zeros_like(curves), where=reached > 0)
        curves = np.where(bound[:, None], np.where(edges <= until[:, None], 1.0, later), curves)
        return SurvivalForecast(edges, curves, self.age, self.limit)

    def on_grid(self, edges: npt.ArrayLike) -> "SurvivalForecast":
        """Return the curve through S at the given edges (exact there, linear between)."""
        return SurvivalForecast.new(edges, self.at(edges), self._left())

    def arrays(self) -> tuple[FloatArray, npt.NDArray[np.floating[Any]], FloatArray, FloatArray]:
        """Return edges, survival, age and limit as compiled code reads them: it checks no bounds.

        Raises:
            ForecastError: their shapes do not match.
        """
        kept = self.survival.dtype if self.survival.dtype == np.float32 else np.float64
        edges = np.ascontiguousarray(self.edges, dtype=np.float64)
        survival = np.ascontiguousarray(self.survival, dtype=kept)
        age = np.ascontiguousarray(self.age, dtype=np.float64)
        limit = np.ascontiguousarray(self.limit, dtype=np.float64)
        if survival.shape != (len(age), len(edges)) or limit.shape != age.shape:
            raise ForecastError(
                f"survival has shape {survival.shape}, with {len(edges)} edges, {len(age)} ages "
                f"and {len(limit)} limits"
            )
        return edges, survival, age, limit

    def _survival(self, h: FloatArray) -> FloatArray:
        alike = len(self) > 0 and bool((self.age == self.age[0]).all())
        age = self.age[:1] if alike else self.age  # the grid is then searched once for all
        alive = self._curve(age[:, None])
        later = self._curve(age[:, None] + h)
        survival = np.divide(later, alive, out=np.zeros_like(later), where=alive > 0)
        survival[np.broadcast_to(h >= self._left()[:, None], survival.shape)] = 0.0
        survival[np.broadcast_to(h == 0, survival.shape)] = 1.0
        return survival

    def _left(self) -> FloatArray:
        """Tokens to the limit, at least one: the request still runs."""
        return np.asarray(np.maximum(np.minimum(self.limit, self.edges[-1]) - self.age, 1.0))

    def _curve(self, tokens: FloatArray) -> FloatArray:
        """The curve as predicted, at [n_requests, n] tokens, or [1, n] that all share."""
        right = np.clip(np.searchsorted(self.edges, tokens, "right"), 1, len(self.edges) - 1)
        left = self.edges[right - 1]
        part = np.clip((tokens - left) / (self.edges[right] - left), 0.0, 1.0)
        if len(tokens) == 1:
            low, high = self.survival[:, right[0] - 1], self.survival[:, right[0]]
        else:
            low = np.take_along_axis(self.survival, right - 1, axis=1)
            high = np.take_along_axis(self.survival, right, axis=1)
        reached: FloatArray = low + part * (high.astype(np.float64) - low)
        return reached

    def _integral(self, start: FloatArray) -> FloatArray:
        """The curve's integral from [n_requests] tokens to its last edge.

        Summed from that edge, so that the little that is left of an old request's curve is not
        lost beside what is past.
        """
        rows = np.arange(len(self))
        right = np.clip(np.searchsorted(self.edges, start, "right"), 1, len(self.edges) - 1)
        means = (self.survival[:, 1:].astype(np.float64) + self.survival[:, :-1]) / 2
        whole = np.cumsum((means * np.diff(self.edges))[:, ::-1], axis=1)[:, ::-1]
        after = np.concatenate([whole, np.zeros((len(self), 1))], axis=1)
        edge = np.minimum(start, self.edges[-1])
        sides = self.survival[rows, right] + self._curve(edge[:, None])[:, 0]
        area = after[rows, right] + sides / 2 * (self.edges[right] - edge)
        return np.asarray(area)


@dataclass(frozen=True, slots=True, repr=False)
class PointForecast(Forecast):
    """One number a request: STAR's regressor, or the truth, as the oracle of a simulation.

    Its curve is a step: S(h) = 1 for h < R, else 0. A request that outlived its number is
    expected to end with its next token.

    Attributes:
        remaining: [n_requests] predicted tokens when the prediction was made.
    """

    remaining: FloatArray
    age: FloatArray
    limit: FloatArray

    @classmethod
    def new(cls, remaining: npt.ArrayLike, limit: Tokens = np.inf) -> "PointForecast":
        """Return a fresh forecast (age 0).

        Raises:
            ForecastError: not [n_requests] finite numbers.
        """
        tokens = np.asarray(remaining, dtype=np.float64)
        if tokens.ndim != 1 or not np.isfinite(tokens).all():
            raise ForecastError("a point forecast is one finite number of tokens a request")
        return cls(tokens, np.zeros(len(tokens)), _per_request(limit, len(tokens)))

    def __len__(self) -> int:
        return len(self.remaining)

    def mean(self) -> FloatArray:
        """Return R in tokens, at least 1, [n_requests]."""
        return np.maximum(np.minimum(self.remaining, self.limit) - self.age, 1.0)

    def _survival(self, h: FloatArray) -> FloatArray:
        return (h < self.mean()[:, None]).astype(np.float64)

    def _quantiles(self, levels: FloatArray) -> FloatArray:
        return np.repeat(self.mean()[:, None], len(levels), axis=1)

    def select(self, rows: npt.NDArray[Any]) -> "PointForecast":
        """Return the forecast of some of the requests."""
        return PointForecast(self.remaining[rows], self.age[rows], self.limit[rows])

    def on_grid(self, edges: npt.ArrayLike) -> SurvivalForecast:
        """Return the step seen at the given edges (exact there, linear between)."""
        return SurvivalForecast.new(edges, self.at(edges), self.limit - self.age)


def _per_request(tokens: Tokens, n_requests: int) -> FloatArray:
    array = np.asarray(tokens, dtype=np.float64)
    if array.shape not in ((), (n_requests,)) or np.isnan(array).any():
        raise ForecastError(f"{array.shape} numbers of tokens for {n_requests} requests")
    return np.broadcast_to(array, (n_requests,)).copy()


def _checked_tokens(tokens: Tokens, n_requests: int) -> FloatArray:
    array = _per_request(tokens, n_requests)
    if (array < 0).any():
        raise ForecastError("tokens to come cannot be negative")
    return array
