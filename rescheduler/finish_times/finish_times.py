"""When each request will start and finish, and how well that came true."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rescheduler.finish_times.interval import Calibration, Interval, Trial
from rescheduler.finish_times.lengths import LatelyEnded
from rescheduler.finish_times.load_ahead import ANYWHERE, STEPS, LoadAhead, Queue, load_ahead
from rescheduler.finish_times.pace import Arrivals, FirstTokens, Pace
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable, PlacedRequests

__all__ = ["KINDS", "Expected", "FinishTimes", "Observed", "PoolLoad"]

logger = logging.getLogger("headway.serve")

_LEVELS = (0.1, 0.5, 0.9)
KINDS = ("arriving", "queued", "first_token", "running")
"""What a request was when its finish was forecast: waiting for no place, waiting for one, at its
first token, later."""

_RATE = 100.0
"""Forecasts a second that are followed, at most: more would teach little, and take time."""
_SAMPLED, _LONGEST_LINE = 8, 2_000
_SAME_SECONDS = 0.02
_FRESH_SECONDS = 0.1
_STALE_SECONDS = 2.0
_SHARE = 0.05
"""Of the processor's time that the load ahead may take."""
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


class PoolLoad(NamedTuple):
    """What is expected of all decode instances together, some time ahead.

    Attributes:
        requests: that run.
        requests_deviation: standard deviation of their number.
        tokens: that they hold in KV caches.
        tokens_deviation: standard deviation of these.
        tokens_per_second: that they generate.
    """

    requests: float
    requests_deviation: float
    tokens: float
    tokens_deviation: float
    tokens_per_second: float


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


class FinishTimes:
    r"""Forecasts in seconds from forecasts in tokens, the pace of the engines, and the load ahead.

    Of a request that runs, with :math:`R_q` the quantile of its remaining tokens and
    :math:`\tau_g` the seconds a token of its instance lately (`Pace`):

    .. math:: T_q = R_q\,\tau_g

    Of one that has not begun, with s the steps until there is room for it (`load_ahead`), and F the
    seconds to its first token once there is (`FirstTokens`), :math:`T_q = s \tau + F + R_q \tau`.
    Each of the four `KINDS` has a `Calibration` of its own, which makes the intervals hold.

    Args:
        decodes: instances that decode.
        usable: returns those that take new requests.
        prefills: instances that prefill for them.
        placements: of all requests on them.
        in_line: returns the requests that wait for a place, in the order of service.
        forecasts: of remaining lengths.
        clock: seconds, that of ``arrived`` of a request.
        observed: is told what came of each forecast.
    """

    def __init__(
        self,
        decodes: Sequence[InstanceState],
        usable: Callable[[], Sequence[InstanceState]],
        prefills: Sequence[InstanceState],
        placements: PlacedRequests[Placeable],
        in_line: Callable[[], Sequence[Placeable]],
        forecasts: LiveForecasts,
        clock: Callable[[], float],
        observed: Callable[[Observed], None] | None = None,
    ) -> None:
        self._decodes, self._prefills, self._placements = decodes, prefills, placements
        self._usable = usable
        self._in_line, self._forecasts, self._clock = in_line, forecasts, clock
        self._observed = observed
        self.pace, self._arrivals = Pace(), Arrivals(clock())
        self._lengths, self._first_tokens = LatelyEnded(), FirstTokens()
        self._finishes = {kind: Calibration(clock) for kind in KINDS}
        self._starts = {kind: Calibration(clock) for kind in KINDS[:2]}
        self._followed: dict[Placeable, _Followed] = {}
        self._ahead: LoadAhead | None = None
        self._line: dict[Placeable, int] = {}
        self._prompts, self._further, self._waiting = 0.0, 0, 0
        self._queued = np.zeros(len(decodes), dtype=np.int64)
        self._joined: set[Placeable] = set()  # since the load ahead was computed
        self._due = -np.inf
        self._random = random.Random(0)
        self._failed = False
        self._may_follow, self._followed_at = _RATE, clock()
        self._told: tuple[Placeable, float, Expected] | None = None

    def arrived(self, request: Placeable) -> Expected | None:
        """Follow a new request, and return what is expected of it.

        None while nothing is known, or where too many requests come for all to be followed.
        """
        if request.background:
            return None
        self._arrivals.came(request.prompt_tokens, self._clock())
        if request.several:
            return None
        self._followed[request] = _Followed()
        told = self._follow("arrival", request)
        self._join(request)
        return told

    def first_token(self, request: Placeable) -> None:
        """Note that the first token of a request has come."""
        self._joined.discard(request)
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
        self._joined.discard(request)
        followed = self._followed.pop(request, None)
        complete = by_itself and request.generated_tokens > 0
        if complete and not request.several:
            self._lengths.ended(request)
        complete = complete and not request.slow_client
        for forecast in followed.forecasts.values() if followed is not None else ():
            if complete:
                self._came("finish", self._finishes, forecast.kind, forecast.finish, at)
                if forecast.start is not None:  # nobody saw its tokens one by one
                    self._starts[forecast.kind].drop(forecast.start)
            else:
                self._drop(forecast)

    def expect(self, request: Placeable) -> Expected | None:
        """Return what is expected of a request now; None while nothing is known.

        Nothing is either where no instance has room for it within 65,536 steps.
        """
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
        quantile = self._lengths.quantiles(request, self._forecasts, (level,))[0]
        first = self._first_tokens.seconds(float(request.prompt_tokens))
        return first + quantile * (self.pace.of(request.instance) or 0.0)

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
                self._follow("later" if _started(request) else "waiting", request)

    def drain_seconds(self, g: int) -> float | None:
        """Return the seconds until all that runs on a decode instance now has ended, as P90.

        None while nothing is known.
        """
        self._look_ahead()
        pace = self.pace.of(self._decodes[g])
        if self._ahead is None or pace is None:
            return None
        return float(self._ahead.drained[g]) * pace

    def load_at(self, seconds: float, arrivals: bool) -> PoolLoad | None:
        r"""Return the load of all decode instances that many seconds ahead; None: not known yet.

        With ``arrivals``, requests come as they did in the last minute, at a rate
        :math:`\lambda` and with prompts of :math:`\bar c` tokens, and end as others did lately:

        .. math::

            N(h) = \lambda \tau \int_0^h S(u)\,du, \qquad
            \Lambda(h) = \lambda \tau \int_0^h S(u)\,(\bar c + u)\,du

        in steps of :math:`\tau` seconds; a Poisson number of them, each as variable as its length.
        """
        self._look_ahead()
        ahead, pace = self._ahead, self.pace.of(None)
        if ahead is None or pace is None:
            return None
        steps = seconds / pace
        n, n_variance, tokens, tokens_variance = (
            float(ahead.at(steps, values).sum())
            for values in (
                *(ahead.requests, ahead.requests_variance),
                *(ahead.tokens, ahead.tokens_variance),
            )
        )
        if arrivals:
            grid = np.linspace(0.0, steps, 129)
            alive = self._lengths.new_request(self._forecasts, grid)
            rate = self._arrivals.rate(self._clock()) * pace
            held = self._arrivals.prompt_tokens + grid
            more = rate * float(np.trapezoid(alive, grid))
            n, n_variance = n + more, n_variance + more
            tokens += rate * float(np.trapezoid(alive * held, grid))
            tokens_variance += rate * float(np.trapezoid(alive * held**2, grid))
        return PoolLoad(n, n_variance**0.5, tokens, tokens_variance**0.5, n / pace)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        busy = any(self._placements.on(one) for one in (*self._decodes, *self._prefills))
        return not busy and not self._in_line()

    @property
    def ahead(self) -> LoadAhead | None:
        """The load ahead, of the decode instances in their order; None where it cannot be told."""
        self._look_ahead()
        return self._ahead

    def _follow(self, when: str, request: Placeable) -> Expected | None:
        """Forecast a request, to be compared with what comes."""
        now = self._clock()
        self._may_follow = min(self._may_follow + _RATE * (now - self._followed_at), _RATE)
        self._followed_at = now
        if self._may_follow < 1.0:
            return None
        raw = self._raw(request)
        if raw is None or not self._lengths.knows(request, self._forecasts):
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

    def _drop(self, forecast: _Forecast) -> None:
        self._finishes[forecast.kind].drop(forecast.finish)
        if forecast.start is not None:
            self._starts[forecast.kind].drop(forecast.start)

    def _calibrated(self, raw: _Raw) -> Expected:
        finish, start = self._finishes[raw.kind].interval(raw.finish), None
        if raw.start is not None:
            start = self._starts[raw.kind].interval(raw.start)
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
        pace = self.pace.of(request.instance)
        if pace is None:
            return None
        started = _started(request)
        if not started:
            self._look_ahead()
        self._forecasts.refresh()
        tokens = Interval(*self._lengths.quantiles(request, self._forecasts, _LEVELS))
        if started:
            return _Raw("running", 0, None, tokens.times(pace), tokens, 0.0)
        ahead = self._ahead
        if ahead is None:
            return None
        at = self._line.get(request)
        if at is None:  # after all others, of which not all were looked at
            steps = ahead.next_start(request.context_tokens)
            steps *= 1.0 + self._further / max(1, len(self._line))
        else:
            steps = float(ahead.start[at])
        if not np.isfinite(steps):
            return None
        counted = request.instance is not None
        prompts = self._prompts + (0 if counted else request.prompt_tokens)
        seconds = steps * pace + self._first_tokens.seconds(prompts)
        seconds = max(seconds, pace, _LEAST_SECONDS)
        start = Interval(seconds / _START_SPREAD, seconds, seconds * _START_SPREAD)
        return _Raw(
            kind="queued" if steps > 0 or self._queues(request) else "arriving",
            place=int((ahead.start < steps).sum()),
            start=start,
            finish=tokens.times(pace).plus(seconds),
            tokens=tokens,
            prompts=prompts,
        )

    def _queues(self, request: Placeable) -> bool:
        """Return whether others are to start before a request, wherever it may go."""
        if request.instance is not None:
            g = self._decodes.index(request.instance) if request.instance in self._decodes else -1
            return g < 0 or self._queued[g] > 1
        waiting = self._waiting + len(self._joined)
        return waiting > 0 or bool((self._queued > 0).all())

    def _join(self, request: Placeable) -> None:
        """Count a new request in the load ahead, since others may come before it is seen anew."""
        if self._ahead is None or request in self._line:
            return
        curve = self._lengths.curves([request], self._forecasts, STEPS)[0]
        self._ahead = self._ahead.with_one_more(curve, request.context_tokens)
        self._line[request] = len(self._line)
        self._joined.add(request)
        self._prompts += request.prompt_tokens / self._computing

    def _look_ahead(self) -> None:
        """Compute the load ahead anew, unless that was done just now."""
        if self._clock() < self._due:
            return
        began = time.perf_counter()
        try:
            self._forecasts.refresh()
            self._compute()
            self._failed = False
        except Exception:
            if not self._failed:
                logger.exception("the load ahead cannot be told")
            self._failed, self._ahead = True, None
        took = time.perf_counter() - began
        self._due = self._clock() + min(max(_FRESH_SECONDS, took / _SHARE), _STALE_SECONDS)

    def _compute(self) -> None:
        running: list[Placeable] = []
        where: list[int] = []
        queue: list[Placeable] = []
        queued_at: list[int] = []
        for g, instance in enumerate(self._decodes):
            for request in self._placements.on(instance):
                if _started(request):
                    running.append(request)
                    where.append(g)
                else:
                    queue.append(request)
                    queued_at.append(g)
        prefilled = sum(one.prompt_tokens for one in queue)
        for instance in self._prefills:
            prefilled += sum(one.prompt_tokens for one in self._placements.on(instance))
        line = list(self._in_line())
        self._further = max(0, len(line) - _LONGEST_LINE)
        del line[_LONGEST_LINE:]
        queue += line
        queued_at += [ANYWHERE] * len(line)
        slots, usable = [one.slots for one in self._decodes], set(self._usable())
        self._ahead = load_ahead(
            self._forecasts.forecast(running),
            np.array(where, dtype=np.int64),
            np.array([one.context_tokens for one in running], dtype=np.int64),
            np.array(slots, dtype=np.int64),
            np.array([one.kv_capacity for one in self._decodes], dtype=np.int64),
            Queue(
                self._lengths.curves(queue, self._forecasts, STEPS),
                np.array([one.context_tokens for one in queue], dtype=np.int64),
                np.array(queued_at, dtype=np.int64),
            ),
            np.array([one in usable for one in self._decodes], dtype=bool),
        )
        self._line = {request: place for place, request in enumerate(queue)}
        self._prompts = prefilled / self._computing
        self._queued = np.bincount(
            np.array(queued_at, dtype=np.int64)[: len(queue) - len(line)],
            minlength=len(self._decodes),
        )
        self._waiting = len(line) + self._further
        self._joined.clear()

    @property
    def _computing(self) -> int:
        """Number of instances that compute prompts."""
        return max(1, len(self._prefills) or len(self._decodes))


def _started(request: Placeable) -> bool:
    return request.generating or request.generated_tokens > 0
