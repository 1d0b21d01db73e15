"""How long answers are, as those that ended lately tell."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Counted

__all__ = ["LatelyEnded"]

FloatArray = npt.NDArray[np.float64]

_KEPT, _FEWEST = 1_000, 30
_ANEW = 20
"""Requests that end between two curves."""


class LatelyEnded:
    r"""The lengths of the last 1,000 requests, for those of which no engine has said anything yet.

    Of requests with a forecast from their prompt, the ratio of actual to expected tokens is kept in
    place of the number. A request that ended at its ``max_tokens`` would have gone on: the curve is
    that of Kaplan and Meier, over the distinct lengths :math:`t` at which :math:`d` of the
    :math:`n` requests that are at least as long ended by themselves:

    .. math:: S(h) = \prod_{t \le h} \big(1 - d_t / n_t\big)

    Before 30 requests have ended, `LiveForecasts` says what is expected.
    """

    def __init__(self) -> None:
        self._tokens = _Curve()
        self._ratios = _Curve()

    def ended(self, request: Counted) -> None:
        """Learn from a request that has ended by itself."""
        tokens = request.generated_tokens
        if tokens < 1:
            return
        cut = request.max_tokens is not None and tokens >= request.max_tokens
        self._tokens.add(float(tokens), cut)
        if request.expected_tokens is not None:
            self._ratios.add(tokens / max(1, request.expected_tokens), cut)

    def knows(self, request: Counted, forecasts: LiveForecasts) -> bool:
        """Return whether what is expected of a request is more than an assumption."""
        if forecasts.has(request.external_id):
            return True
        return (self._tokens if request.expected_tokens is None else self._ratios).known

    def curves(
        self, requests: Sequence[Counted], forecasts: LiveForecasts, steps: FloatArray
    ) -> FloatArray:
        """Return the probability that each request has more tokens to go than that, [n, n_steps].

        From an engine's forecast if it has made one.
        """
        survival = forecasts.forecast(requests).at(steps)
        for i, request in enumerate(requests):
            curve, unit = self._curve(request, forecasts)
            if curve is not None:
                most = np.inf if request.max_tokens is None else max(1, request.max_tokens)
                survival[i] = np.where(steps < most, curve.survival(steps / unit), 0.0)
        return survival

    def new_request(self, forecasts: LiveForecasts, steps: FloatArray) -> FloatArray:
        """Return the probability that a request to come has more tokens than that, [n_steps]."""
        return np.asarray(self.curves([Counted("a request to come")], forecasts, steps)[0])

    def quantiles(
        self, request: Counted, forecasts: LiveForecasts, levels: tuple[float, ...]
    ) -> list[float]:
        """Return quantiles of the tokens that a request still has to generate, one a level.

        From an engine's forecast if it has made one.
        """
        curve, unit = self._curve(request, forecasts)
        if curve is None:
            forecast = forecasts.forecast([request])
            return [max(1.0, q) for q in forecast.quantile(list(levels))[0].tolist()]
        most = float("inf") if request.max_tokens is None else float(max(1, request.max_tokens))
        return [min(max(1.0, unit * curve.quantile(level)), most) for level in levels]

    def _curve(self, request: Counted, forecasts: LiveForecasts) -> tuple["_Curve | None", float]:
        """Return a request's curve, and its unit in tokens; None where an engine knows better."""
        expected = request.expected_tokens
        curve = self._tokens if expected is None else self._ratios
        if request.generated_tokens or forecasts.has(request.external_id) or not curve.known:
            return None, 1.0
        return curve, 1.0 if expected is None else float(max(1, expected))


class _Curve:
    """The Kaplan-Meier curve of the latest values."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, bool]] = deque(maxlen=_KEPT)
        self._values: FloatArray = np.empty(0)
        self._survival: FloatArray = np.empty(0)
        self._unseen = 0

    @property
    def known(self) -> bool:
        """Whether enough values came."""
        return len(self._latest) >= _FEWEST

    def add(self, value: float, cut: bool) -> None:
        self._latest.append((value, cut))
        self._unseen += 1

    def quantile(self, level: float) -> float:
        """Return the value at a level; the largest one where the curve does not fall as far."""
        self._draw()
        i = int(np.searchsorted(-self._survival, -(1.0 - level), "left"))
        return float(self._values[min(i, len(self._values) - 1)])

    def survival(self, values: FloatArray) -> FloatArray:
        """Return the probability of more than each value."""
        self._draw()
        at = np.searchsorted(self._values, values, "right")
        return np.asarray(np.r_[1.0, self._survival][at])

    def _draw(self) -> None:
        if self._unseen < _ANEW and len(self._values):
            return
        self._unseen = 0
        values, cut = np.array(self._latest, dtype=np.float64).T
        order = np.lexsort((cut, values))  # what ended before what was cut at the same length
        at_risk = len(values) - np.arange(len(values))
        self._values = values[order]
        self._survival = np.cumprod(1.0 - (1.0 - cut[order]) / at_risk)
