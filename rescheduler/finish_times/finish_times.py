"""When each request will start and finish, and how well that came true."""

import logging
import math
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from rescheduler.finish_times.fleet_load import FleetLoad, has_started
from rescheduler.finish_times.lengths import FirstTokens
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable

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


@dataclass(eq=False, slots=True)
class Trial:
    """A forecast whose outcome is awaited.

    Attributes:
        expected: the interval as it was before any correction.
        told: as it was corrected.
        made: when.
        score: of what came; None until then.
        late: it has not come by the upper bound that was told, which has been learnt from.
    """

    expected: Interval
    told: Interval
    made: float
    score: float | None = None
    late: bool = False


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


logger = logging.getLogger("headway.serve")

_LEVELS = (0.1, 0.5, 0.9)
KINDS = ("arriving", "queued", "first_token", "running")
"""What a request was when its finish was forecast: waiting for no place, waiting for one, at its
first token, later."""

_RATE = 100.0
"""Forecasts a second that are followed, at most: more would teach little, and take time."""
_SAMPLED = 8
_SAME_SECONDS = 0.02
_START_SPREAD = 1.5
"""Factor between the median and the bounds of a start before any calibration."""
_LEAST_SECONDS = 1e-3


class Expected(NamedTuple):
    """What is expected of a request, in seconds from now.

    Attributes:
        place: requests that start before it; 0 of one that has started.
        start: its first token; None of one that has generated any.
        finish: its last token.
        tokens: that it still has to generate.
    """

    place: int
    start: Interval | None
    finish: Interval
    tokens: Interval


class Observed(NamedTuple):
    """What came of a forecast.

    Attributes:
        kind: of `KINDS`.
        of: ``start`` or ``finish``.
        expected: the calibrated interval.
        actual: seconds from then on.
    """

    kind: str
    of: str
    expected: Interval
    actual: float


@dataclass(slots=True)
class _Forecast:
    """A forecast that is yet to come true, of its ``start`` or ``finish`` or both."""

    kind: str
    prompts: float
    trials: dict[str, Trial]


@dataclass(slots=True)
class _Followed:
    """The forecasts of a request: at its arrival and first token, and one at random after each."""

    forecasts: dict[str, _Forecast] = field(default_factory=dict)
    sampled: int = 0


class _Raw(NamedTuple):
    kind: str
    place: int
    start: Interval | None
    finish: Interval
    tokens: Interval
    prompts: float
    own: float = 0.0
    """Seconds that it takes from its first token on, at least: nine times in ten it takes more."""


class FinishTimes:
    r"""Forecasts in seconds from forecasts in tokens, the pace of the engines, and the load ahead.

    Of a request that runs, with :math:`R_q` the quantile of its remaining tokens and
    :math:`\tau_g` the seconds a token of its instance lately (`Pace`):

    .. math:: T_q = R_q\,\tau_g

    Of one that has not begun, with s the steps until there is room for it (`load_ahead`), and F the
    seconds to its first token once there is (`FirstTokens`), :math:`T_q = s \tau + F + R_q \tau`.
    Each of the four `KINDS` has a `Calibration` of its own, which makes the intervals hold.

    Args:
        load: of the instances.
        forecasts: of remaining lengths.
        clock: seconds, that of ``arrived`` of a request.
        observed: is told what came of each forecast.

    Attributes:
        load: as given.
    """

    def __init__(
        self,
        load: FleetLoad,
        forecasts: LiveForecasts,
        clock: Callable[[], float],
        observed: Callable[[Observed], None] | None = None,
    ) -> None:
        self.load = load
        self._forecasts = forecasts
        self._clock = clock
        self._observed = observed
        self._first_tokens = FirstTokens()
        self._calibrations = {("finish", kind): Calibration(clock) for kind in KINDS}
        self._calibrations |= {("start", kind): Calibration(clock) for kind in KINDS[:2]}
        self._followed: dict[Placeable, _Followed] = {}
        self._unproved: set[Placeable] = set()  # no engine has accepted them yet
        self._random = random.Random(0)
        self._allowed, self._allowed_at = _RATE, clock()
        self._latest: tuple[Placeable, float, Expected] | None = None

    def arrived(self, request: Placeable) -> None:
        """Follow a new request.

        It counts as an arrival once an engine has accepted it, which its first token proves.
        """
        if request.background:
            return
        self._unproved.add(request)
        if request.several:
            return
        self._followed[request] = _Followed()
        self._follow("arrival", request)
        self.load.join(request)

    def first_token(self, request: Placeable) -> None:
        """Note that the first token of a request has come."""
        self._proved(request)
        self.load.began(request)
        followed = self._followed.get(request)
        if followed is None:
            return
        for forecast in followed.forecasts.values():
            if "start" in forecast.trials:
                seconds = self._settle("start", forecast)
                if forecast.kind == "arriving":
                    self._first_tokens.took(forecast.prompts, seconds)
        followed.sampled = 0
        self._follow("first_token", request)

    def ended(self, request: Placeable, by_itself: bool, at: float | None = None) -> None:
        """Note that a request has ended, at a time; learn from it if it did by itself.

        Nothing is learnt of the times of one whose client was what took them.
        """
        if by_itself:
            self._proved(request)
        refused = request in self._unproved
        self._unproved.discard(request)
        self.load.began(request)
        followed = self._followed.pop(request, None)
        complete = by_itself and request.generated_tokens > 0
        if complete and not (request.several or request.background):
            self.load.lengths.ended(request)
        complete = complete and not request.slow_client
        for forecast in followed.forecasts.values() if followed is not None else ():
            if complete:
                self._settle("finish", forecast, at)
            # The start of one that is complete is left where nobody saw its tokens one by one.
            self._drop(forecast, refused)

    def _proved(self, request: Placeable) -> None:
        if request in self._unproved:
            self._unproved.discard(request)
            self.load.came(request)

    def expect(self, request: Placeable) -> Expected | None:
        """Return what is expected of a request now; None while nothing is known.

        Nothing is either where no instance has room for it within 65,536 steps, nor of a background
        request that waits for as long as others come.
        """
        if request.background and not has_started(request):
            return None
        if self._latest is not None:
            of, at, told = self._latest
            if of is request and self._clock() - at < _SAME_SECONDS:
                return told
        raw = self._raw(request)
        return self._calibrated(raw) if raw is not None else None

    def finish_probability(self, request: Placeable, seconds: float) -> float | None:
        """Return the probability that a request ends within so many seconds.

        None while too few requests have ended.
        """
        raw = self._raw(request)
        if raw is None or not any(self._calibrations["finish", kind].learned for kind in KINDS[:2]):
            return None
        return self._calibrations["finish", raw.kind].probability(raw.finish, seconds)

    def finish_quantile(self, request: Placeable, level: float) -> float | None:
        """Return the seconds within which a request ends with a probability."""
        raw = self._raw(request)
        return self._calibrations["finish", raw.kind].quantile(raw.finish, level) if raw else None

    def service_quantile(self, request: Placeable, level: float) -> float:
        """Return the seconds that a request takes from its start on, with a probability."""
        quantile = self.load.lengths.quantiles(request, self._forecasts, (level,))[0]
        first = self._first_tokens.seconds(float(request.prompt_tokens))
        return first + quantile * (self.load.pace.of(request.instance) or 0.0)

    def sample(self) -> None:
        """Forecast some of the requests that wait or run, at random, so that it is followed.

        To be called regularly. Of a request that is chosen more often one such forecast is kept,
        any of them as likely.
        """
        chosen = min(_SAMPLED, len(self._followed))
        for request in self._random.sample(list(self._followed), chosen):
            followed = self._followed[request]
            followed.sampled += 1
            if self._random.random() * followed.sampled < 1.0:
                try:
                    self._follow("later" if has_started(request) else "waiting", request)
                except Exception:
                    logger.exception("request %s is not followed any more", request.id)
                    for forecast in self._followed.pop(request).forecasts.values():
                        self._drop(forecast)

    def _follow(self, when: str, request: Placeable) -> None:
        """Forecast a request, to be compared with what comes; not more often than at a rate."""
        now = self._clock()
        self._allowed = min(self._allowed + _RATE * (now - self._allowed_at), _RATE)
        self._allowed_at = now
        if self._allowed < 1.0:
            return
        raw = self._raw(request)
        if raw is None or not self.load.lengths.knows(request, self._forecasts):
            return
        self._allowed -= 1.0
        if when == "first_token":
            raw = raw._replace(kind="first_token")
        forecasts = self._followed[request].forecasts
        if when in forecasts:
            self._drop(forecasts[when])
        expected, calibrations = self._calibrated(raw), self._calibrations
        self._latest = request, now, expected
        trials = {"finish": calibrations["finish", raw.kind].begin(raw.finish, expected.finish)}
        if raw.start is not None and expected.start is not None:
            trials["start"] = calibrations["start", raw.kind].begin(raw.start, expected.start)
        forecasts[when] = _Forecast(raw.kind, raw.prompts, trials)

    def _drop(self, forecast: _Forecast, refused: bool = False) -> None:
        """Forget a forecast; of a request that no engine has accepted no trace is left."""
        for of, trial in forecast.trials.items():
            self._calibrations[of, forecast.kind].drop(trial, refused)

    def _calibrated(self, raw: _Raw) -> Expected:
        finish, start = self._calibrations["finish", raw.kind].interval(raw.finish), None
        if raw.start is not None:
            start = self._calibrations["start", raw.kind].interval(raw.start)
            start, finish = _apart(start, finish, raw.own)
        return Expected(raw.place, start, finish, raw.tokens)

    def _settle(self, of: str, forecast: _Forecast, at: float | None = None) -> float:
        """Learn what came of a forecast now, or at a time; return after how many seconds."""
        trial = forecast.trials.pop(of)
        seconds = max((self._clock() if at is None else at) - trial.made, _LEAST_SECONDS)
        self._calibrations[of, forecast.kind].came(trial, seconds)
        if self._observed is not None:
            self._observed(Observed(forecast.kind, of, trial.told, seconds))
        return seconds

    def _raw(self, request: Placeable) -> _Raw | None:
        """Return what is expected of a request before it is calibrated."""
        pace = self.load.pace.of(request.instance)
        if pace is None:
            return None
        self._forecasts.refresh()
        tokens = Interval(*self.load.lengths.quantiles(request, self._forecasts, _LEVELS))
        if has_started(request):
            return _Raw("running", 0, None, tokens.times(pace), tokens, 0.0)
        waits = self.load.start_of(request)
        if waits is None:
            return None
        seconds = waits.steps * pace + self._first_tokens.seconds(waits.prompts)
        seconds = max(seconds, pace, _LEAST_SECONDS)
        start = Interval(seconds / _START_SPREAD, seconds, seconds * _START_SPREAD)
        return _Raw(
            kind="queued" if waits.queues else "arriving",
            place=waits.place,
            start=start,
            finish=tokens.times(pace).plus(seconds),
            tokens=tokens,
            prompts=waits.prompts,
            own=tokens.low * pace,
        )


def _apart(start: Interval, finish: Interval, own: float) -> tuple[Interval, Interval]:
    """Return a start and a finish that are so many seconds apart in every quantile.

    Each is calibrated by its own outcomes. So the start could be expected after the finish.
    """
    own = max(own, _LEAST_SECONDS)
    finish = Interval(*(max(seconds, own + _LEAST_SECONDS) for seconds in finish))
    latest = (seconds - own for seconds in finish)
    start = Interval(*(min(pair) for pair in zip(start, latest, strict=True)))
    return start, finish
