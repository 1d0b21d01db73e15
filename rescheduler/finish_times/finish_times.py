"""When each request will start and finish, and how well that came true."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rescheduler.finish_times.fleet_load import FleetLoad, has_started
from rescheduler.finish_times.interval import Calibration, Interval, Trial
from rescheduler.finish_times.pace import FirstTokens
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable

__all__ = ["KINDS", "Expected", "FinishTimes", "Observed"]

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
    """A forecast that is yet to come true."""

    kind: str
    finish: Trial
    start: Trial | None = None
    prompts: float = 0.0


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
        self.load, self._forecasts, self._clock = load, forecasts, clock
        self._observed = observed
        self._first_tokens = FirstTokens()
        self._finishes = {kind: Calibration(clock) for kind in KINDS}
        self._starts = {kind: Calibration(clock) for kind in KINDS[:2]}
        self._followed: dict[Placeable, _Followed] = {}
        self._unproved: set[Placeable] = set()  # no engine has accepted them yet
        self._random = random.Random(0)
        self._may_follow, self._followed_at = _RATE, clock()
        self._told: tuple[Placeable, float, Expected] | None = None

    def arrived(self, request: Placeable) -> Expected | None:
        """Follow a new request, and return what is expected of it.

        It counts as an arrival once an engine has accepted it, which its first token proves.

        None while nothing is known, or where too many requests come for all to be followed.
        """
        if request.background:
            return None
        self._unproved.add(request)
        if request.several:
            return None
        self._followed[request] = _Followed()
        told = self._follow("arrival", request)
        self.load.join(request)
        return told

    def first_token(self, request: Placeable) -> None:
        """Note that the first token of a request has come."""
        self._proved(request)
        self.load.began(request)
        followed = self._followed.get(request)
        if followed is None:
            return
        for forecast in followed.forecasts.values():
            if forecast.start is not None:
                seconds = self._came("start", self._starts, forecast.kind, forecast.start)
                forecast.start = None
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
                self._came("finish", self._finishes, forecast.kind, forecast.finish, at)
                if forecast.start is not None:  # nobody saw its tokens one by one
                    self._starts[forecast.kind].drop(forecast.start)
            else:
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
        if self._told is not None:
            of, at, told = self._told
            if of is request and self._clock() - at < _SAME_SECONDS:
                return told
        raw = self._raw(request)
        return self._calibrated(raw) if raw is not None else None

    def finish_probability(self, request: Placeable, seconds: float) -> float | None:
        """Return the probability that a request ends within so many seconds.

        None while too few requests have ended.
        """
        raw = self._raw(request)
        if raw is None or not any(self._finishes[kind].learned for kind in KINDS[:2]):
            return None
        return self._finishes[raw.kind].probability(raw.finish, seconds)

    def finish_quantile(self, request: Placeable, level: float) -> float | None:
        """Return the seconds within which a request ends with a probability."""
        raw = self._raw(request)
        return self._finishes[raw.kind].quantile(raw.finish, level) if raw else None

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

    def _follow(self, when: str, request: Placeable) -> Expected | None:
        """Forecast a request, to be compared with what comes."""
        now = self._clock()
        self._may_follow = min(self._may_follow + _RATE * (now - self._followed_at), _RATE)
        self._followed_at = now
        if self._may_follow < 1.0:
            return None
        raw = self._raw(request)
        if raw is None or not self.load.lengths.knows(request, self._forecasts):
            return None
        self._may_follow -= 1.0
        if when == "first_token":
            raw = raw._replace(kind="first_token")
        forecasts = self._followed[request].forecasts
        if when in forecasts:
            self._drop(forecasts[when])
        told, start = self._calibrated(raw), None
        self._told = request, now, told
        if raw.start is not None and told.start is not None:
            start = self._starts[raw.kind].begin(raw.start, told.start)
        forecasts[when] = _Forecast(
            kind=raw.kind,
            finish=self._finishes[raw.kind].begin(raw.finish, told.finish),
            start=start,
            prompts=raw.prompts,
        )
        return told

    def _drop(self, forecast: _Forecast, refused: bool = False) -> None:
        """Forget a forecast; of a request that no engine has accepted no trace is left."""
        self._finishes[forecast.kind].drop(forecast.finish, refused)
        if forecast.start is not None:
            self._starts[forecast.kind].drop(forecast.start, refused)

    def _calibrated(self, raw: _Raw) -> Expected:
        finish, start = self._finishes[raw.kind].interval(raw.finish), None
        if raw.start is not None:
            start = self._starts[raw.kind].interval(raw.start)
            start, finish = _apart(start, finish, raw.own)
        return Expected(raw.place, start, finish, raw.tokens)

    def _came(
        self,
        of: str,
        calibrations: dict[str, Calibration],
        kind: str,
        trial: Trial,
        at: float | None = None,
    ) -> float:
        seconds = max((self._clock() if at is None else at) - trial.made, _LEAST_SECONDS)
        calibrations[kind].came(trial, seconds)
        if self._observed is not None:
            self._observed(Observed(kind, of, trial.told, seconds))
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
