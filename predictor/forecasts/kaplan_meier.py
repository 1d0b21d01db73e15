"""The product-limit estimate of a survival curve, and recalibration of forecasts by it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import Forecast, ForecastError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KaplanMeierCurve:
    """A step function S(t) = P(T > t).

    Attributes:
        times: [n_steps] ascending values at which something was observed to end.
        survival: [n_steps] S at and after each of them; 1 before the first.
        last_observed: the largest value seen, of ended or cut observations.
    """

    times: FloatArray
    survival: FloatArray
    last_observed: float

    @classmethod
    def estimate(
        cls, values: npt.NDArray[Any], censored: npt.NDArray[np.bool_]
    ) -> "KaplanMeierCurve":
        r"""Estimate S by the product-limit formula (Kaplan and Meier, JASA 1958).

        .. math:: \hat S(t) = \prod_{t_j \le t} \left(1 - \frac{d_j}{m_j}\right)

        with :math:`d_j` observations that ended at :math:`t_j` and :math:`m_j` at least that
        long. One cut at c counts in :math:`m_j` for :math:`t_j \le c` and nowhere else: it
        says that its value is more than c, not what it is.

        Args:
            values: [n] where each ended or was cut.
            censored: [n] whether it was cut.

        Raises:
            ValueError: there are no observations.
        """
        if len(values) == 0:
            raise ValueError("Kaplan-Meier: there are no observations")
        times, ended = np.unique(values[~censored], return_counts=True)
        at_risk = len(values) - np.searchsorted(np.sort(values), times, side="left")
        survival = np.cumprod(1 - ended / at_risk, dtype=np.float64)
        return cls(times.astype(np.float64), survival, float(values.max()))

    def at(self, values: npt.ArrayLike) -> FloatArray:
        """Return S at the given values."""
        steps = np.searchsorted(self.times, values, side="right")
        reached: FloatArray = np.concatenate([[1.0], self.survival])[steps]
        return reached

    def quantile(self, level: float) -> float:
        """Return the first value with S at most 1 - level; the largest seen where none has."""
        i = int(np.searchsorted(-self.survival, level - 1.0, side="left"))
        return float(self.times[i]) if i < len(self.times) else self.last_observed


_FIRST, _DENSE_UNTIL, _OCTAVE = 5, 20, 6
"""Width of the bins near 0, where bins begin to grow, and bins in each doubling from there."""


def survival_edges(limit: int) -> IntArray:
    """Return edges dense near 0 and logarithmic to the model's limit.

    Routing looks tens of tokens ahead, where a bin must be small; far away a relative error is
    what matters, so that bins may grow with the distance.

    Args:
        limit: the last edge: tokens that no request can pass, such as the model's context.

    Returns:
        [n_edges] ascending whole tokens, from 0 to ``limit``.

    Raises:
        ValueError: ``limit`` is not above 20.
    """
    if limit <= _DENSE_UNTIL:
        raise ValueError(
            f"no grid to {limit} tokens in bins of {_FIRST} up to {_DENSE_UNTIL}, then {_OCTAVE} "
            "a doubling"
        )
    dense = np.arange(0, _DENSE_UNTIL, _FIRST)
    bins = max(1, round(_OCTAVE * np.log2(limit / _DENSE_UNTIL)))
    grown = np.geomspace(_DENSE_UNTIL, limit, bins + 1).round()
    edges: IntArray = np.unique(np.concatenate([dense, grown])).astype(np.int64)
    return edges


_KNOTS = 33


class Recalibration:
    r"""A monotone map of probabilities: what was forecast with F happened with g(F).

    .. math:: S'(h) = 1 - g(1 - S(h)),

    g piecewise linear through its knots, from (0, 0) to (1, 1), never falling. A forecast is
    calibrated when g is the identity: of all requests, a share F ended within the h at which
    P(R ≤ h) = F (Kuleshov et al., ICML 2018).

    Args:
        nominal: [n_knots] forecast probabilities, ascending from 0 to 1.
        observed: [n_knots] observed shares, never falling, from 0 to 1.

    Raises:
        ForecastError: the knots are no such map.
    """

    def __init__(self, nominal: Sequence[float], observed: Sequence[float]) -> None:
        x, y = np.asarray(nominal, dtype=np.float64), np.asarray(observed, dtype=np.float64)
        if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
            raise ForecastError(f"a recalibration of {x.shape} nominal, {y.shape} observed knots")
        ends = (x[0], x[-1], y[0], y[-1]) == (0, 1, 0, 1)
        if not ends or not (np.diff(x) > 0).all() or not (np.diff(y) >= 0).all():
            raise ForecastError("a recalibration must rise from (0, 0) to (1, 1)")
        self.nominal, self.observed = tuple(x.tolist()), tuple(y.tolist())

    def apply(self, survival: npt.NDArray[Any]) -> FloatArray:
        """Return the recalibrated curves, same shape."""
        if len(self.nominal) == 2:
            return np.asarray(survival, dtype=np.float64)
        curves: FloatArray = 1.0 - np.interp(1 - survival, self.nominal, self.observed)
        return curves

    def after(self, earlier: "Recalibration") -> "Recalibration":
        """Return one map that does the same as ``earlier`` and then this one."""
        own = np.interp(self.nominal, earlier.observed, earlier.nominal)
        x = np.union1d(earlier.nominal, own)
        between = np.interp(x, earlier.nominal, earlier.observed)
        y = np.maximum.accumulate(np.interp(between, self.nominal, self.observed))
        return Recalibration(x.tolist(), y.tolist())


def observed_levels(
    forecast: Forecast, remaining: npt.NDArray[Any], censored: npt.NDArray[np.bool_]
) -> FloatArray:
    """Return u = P(R ≤ r) under each forecast, at the tokens r that came, [n_requests].

    Uniform on [0, 1] over requests when the forecasts are calibrated. Tokens are whole: the
    value at r - 1/2 is taken, where the even spread puts a token's middle. A request cut at r
    says that its u is above P(R ≤ r). The forecast is without the cap that cut them.
    """
    middle = np.where(censored, remaining, np.maximum(remaining - 0.5, 0))
    return 1 - forecast.at_each(middle)


def observed_share(
    levels: FloatArray, cut: npt.NDArray[np.bool_], nominal: npt.ArrayLike
) -> FloatArray:
    r"""Return the share of requests whose u is at most each nominal level.

    A request that its cap cut has the rest of its curve in one outcome, "the cap": its u is
    spread evenly over (P(R ≤ cap), 1], as for every distribution with an atom (Haider et al.,
    JMLR 2020, for censored observations). The share equals the level when calibrated.
    """
    at = np.atleast_1d(np.asarray(nominal, dtype=np.float64))
    ended = np.searchsorted(np.sort(levels[~cut]), at, side="right").astype(np.float64)
    low = np.sort(np.minimum(levels[cut], 1 - 1e-9))
    spread = np.array([np.clip((x - low) / (1 - low), 0, 1).sum() for x in at])
    share: FloatArray = (ended + spread) / len(levels)
    return share


def fit_recalibration(levels: FloatArray, cut: npt.NDArray[np.bool_]) -> Recalibration:
    """Fit g by isotonic regression of observed shares on nominal levels (Kuleshov et al.).

    Raises:
        ForecastError: no request ended by itself.
    """
    from sklearn.isotonic import IsotonicRegression

    if cut.all():
        raise ForecastError("no request ended by itself: nothing to recalibrate from")
    fine = np.linspace(0, 1, 8 * _KNOTS + 1)[1:-1]
    isotonic = IsotonicRegression(y_min=0.0, y_max=1.0)
    isotonic.fit(fine, observed_share(levels, cut, fine))
    inside = np.linspace(0, 1, _KNOTS)[1:-1]
    observed = isotonic.predict(inside)
    return Recalibration([0.0, *inside.tolist(), 1.0], [0.0, *observed.tolist(), 1.0])
