"""An interval of seconds or tokens, and how such intervals are calibrated by what came."""

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from predictor.forecasts.kaplan_meier import KaplanMeierCurve

__all__ = ["Calibration", "Interval", "Trial"]

_LEAST = 1e-6
_SMALLEST_SPREAD = 0.02
"""Of the logarithm: an interval is not taken to be narrower than 2% to either side."""


class Interval(NamedTuple):
    """The 10, 50 and 90% quantile of what is expected, so that 80% come between the outer ones."""

    low: float
    median: float
    high: float

    def plus(self, seconds: float) -> "Interval":
        """Return it that much later."""
        return Interval(*(value + seconds for value in self))

    def times(self, factor: float) -> "Interval":
        """Return it in another unit."""
        return Interval(*(value * factor for value in self))


_WINDOW, _LONGEST = 500, 2_000
"""Forecasts that are learnt from, and so many if the oldest is awaited, as in a long queue."""
_PRIOR, _LEARNED = 50, 20
_REMEMBERED_SECONDS = 1800.0
_TAIL = 0.5
"""Scale of the exponential tail of scores beyond all that came: about that of a normal one."""
_FRESH_SECONDS = 0.25
_GAIN, _NARROWEST, _WIDEST = 0.03, -0.25, 1.5


class Trial:
    """A forecast whose outcome is awaited.

    Attributes:
        expected: the interval as it was before any correction.
        told: as it was corrected.
        made: when.
        score: of what came; None until then.
        late: it has not come by the upper bound that was told, which has been learnt from.
    """

    __slots__ = ("expected", "late", "made", "score", "told")

    def __init__(self, expected: Interval, told: Interval, made: float) -> None:
        self.expected, self.told, self.made = expected, told, made
        self.score: float | None = None
        self.late = False


class Calibration:
    r"""Corrects intervals by how the latest ones came out.

    Of an interval :math:`(l, m, u)` and what came, :math:`t`, the score counts how far from the
    median it was, in units of the distance to the bound on that side, on a logarithmic scale:

    .. math::

        z = \frac{\ln t - \ln m}{\ln u - \ln m} \text{ if } t \ge m, \qquad
        z = \frac{\ln t - \ln m}{\ln m - \ln l} \text{ otherwise,}

    so that :math:`P(z \le -1) = 0.1`, :math:`P(z \le 0) = 0.5` and :math:`P(z \le 1) = 0.9` of
    intervals that hold what they say. The quantiles of the scores of the last 500 forecasts take
    the place of -1, 0 and 1 in later intervals: split conformal prediction with a normalised score,
    on a window of at most half an hour. Of a forecast that has not come true yet the score is at
    least that of the seconds since: the quantiles are Kaplan and Meier's, else those that end soon
    would count more.

    The errors of forecasts made within a short time are alike, as when a queue grows faster than
    foreseen; so either side is :math:`e^{w}` as wide, with w that rises with each outcome beyond
    it and falls with the others, by 0.03 (missed - 0.1), between -0.25 and 1.5; what has not come
    by the upper bound counts as soon as that is certain.

    It begins with 50 scores of a normal distribution, which leave intervals as they are, and which
    the first 50 that came replace.

    Source: Lei et al. 2018, "Distribution-free predictive inference for regression", section 5.2;
    Candès et al. 2023, "Conformalized survival analysis", for what is censored;
    Gibbs and Candès 2021, "Adaptive conformal inference under distribution shift".
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trials: deque[Trial] = deque()
        self._prior = (ndtri((np.arange(_PRIOR) + 0.5) / _PRIOR) / ndtri(0.9)).tolist()
        self._order = np.random.default_rng(0).permutation(_PRIOR)
        self._seen = 0
        self._wider = [0.0, 0.0]
        self._due = -math.inf
        self._scores = self._levels = np.empty(0)
        self._middle = self._farthest = 0.0

    def begin(self, expected: Interval, told: Interval) -> Trial:
        """Return a forecast that is to be learnt from."""
        trial = Trial(expected, told, self._clock())
        self._trials.append(trial)
        while len(self._trials) > (_LONGEST if self._trials[0].score is None else _WINDOW):
            self._trials.popleft()
        return trial

    def came(self, trial: Trial, actual: float) -> None:
        """Learn from what came of a forecast."""
        trial.score = _score(trial.expected, actual)
        self._widen(0, actual < trial.told.low)
        if not trial.late:
            self._widen(1, actual > trial.told.high)

    def _widen(self, side: int, missed: bool) -> None:
        widened = self._wider[side] + _GAIN * (missed - 0.1)
        self._wider[side] = min(max(widened, _NARROWEST), _WIDEST)

    def drop(self, trial: Trial, unlearn: bool = False) -> None:
        """Forget a forecast, of which nothing will come; also what its lateness has taught."""
        if unlearn and trial.late:
            self._wider[1] = max(self._wider[1] - _GAIN * 0.9, _NARROWEST)
        with suppress(ValueError):
            self._trials.remove(trial)

    @property
    def learned(self) -> bool:
        """Whether enough has come for what it says to be more than an assumption."""
        self._learn()
        return self._seen >= _LEARNED

    def interval(self, expected: Interval) -> Interval:
        """Return an interval corrected."""
        return Interval(*(self.quantile(expected, level) for level in (0.1, 0.5, 0.9)))

    def quantile(self, expected: Interval, level: float) -> float:
        """Return what will not be exceeded with a probability below 1."""
        self._learn()
        beyond = 1.0 - self._levels[-1]
        if level > self._levels[-1]:
            score = self._farthest - _TAIL * math.log((1.0 - level) / beyond)
        else:
            score = float(np.interp(level, self._levels, self._scores))
        score = self._middle + (score - self._middle) * math.exp(self._wider[level > 0.5])
        median, below, above = _spreads(expected)
        return math.exp(min(median + score * (above if score >= 0 else below), 700.0))

    def probability(self, expected: Interval, most: float) -> float:
        """Return the probability that no more comes than ``most``."""
        if most <= 0:
            return 0.0
        self._learn()
        away = _score(expected, most) - self._middle
        score = self._middle + away * math.exp(-self._wider[away > 0])
        if score > self._farthest:
            beyond = 1.0 - self._levels[-1]
            return float(1.0 - beyond * math.exp((self._farthest - score) / _TAIL))
        return float(np.interp(score, self._scores, self._levels, left=0.0))

    def _learn(self) -> None:
        """Compute the distribution of the scores anew, unless that was done just now."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _FRESH_SECONDS
        while self._trials and self._trials[0].made < now - _REMEMBERED_SECONDS:
            self._trials.popleft()
        scores = [
            trial.score if trial.score is not None else _score(trial.expected, now - trial.made)
            for trial in self._trials
        ]
        for trial in self._trials:
            if trial.score is None and not trial.late and now - trial.made > trial.told.high:
                trial.late = True
                self._widen(1, missed=True)
        came = [trial.score is not None for trial in self._trials]
        self._seen = sum(came)
        prior = [self._prior[i] for i in self._order[self._seen :]]
        values = np.array(scores + prior)
        ended = np.array(came + [True] * len(prior), dtype=bool)
        curve, n = KaplanMeierCurve.estimate(values, ~ended), len(values)
        self._scores, self._farthest = curve.times, curve.last_observed
        # Of n scores and the one to come, each is as likely the largest as any other.
        self._levels = (1.0 - curve.survival) * n / (n + 1)
        self._middle = float(np.interp(0.5, self._levels, self._scores))


def _spreads(expected: Interval) -> tuple[float, float, float]:
    """Return ln m, ln m - ln l and ln u - ln m."""
    low, median, high = (math.log(max(value, _LEAST)) for value in expected)
    return median, max(median - low, _SMALLEST_SPREAD), max(high - median, _SMALLEST_SPREAD)


def _score(expected: Interval, actual: float) -> float:
    median, below, above = _spreads(expected)
    distance = math.log(max(actual, _LEAST)) - median
    return distance / (above if distance >= 0 else below)
