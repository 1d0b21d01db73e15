"""How long answers are and how long their tokens take, as those that ended lately tell."""

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable

logger = logging.getLogger("headway.serve")

FloatArray = npt.NDArray[np.float64]

_KEPT, _FEWEST = 1_000, 30
_OUTLIVED = 1e-6
_ANY = float("inf")
"""Tokens of a request without a limit."""
_ANEW = 20
"""Requests that end between two curves."""


class LatelyEnded:
    """The lengths of 1,000 late requests, for those of which no engine has said anything yet.

    Of requests with a forecast from their prompt, the ratio of actual to expected tokens is kept in
    place of the number. A request that ended at its ``max_tokens`` would have gone on: the curve is
    a `KaplanMeierCurve`, which counts it as cut there. Before 30 requests tell how a request may
    end, `LiveForecasts` says what is expected: those that were cut tell it only of requests that
    are cut there, too.
    """

    def __init__(self) -> None:
        self._tokens = _Curve()
        self._ratios = _Curve()
        self._as_they_ended = _Curve()
        self._failed = False

    def ended(self, request: Placeable) -> None:
        """Learn from a request that has ended by itself."""
        tokens = request.generated_tokens
        if tokens < 1:
            return
        cut, owner = request.was_cut, request.account.name
        self._as_they_ended.add(float(tokens), cut=False, owner=owner)
        self._tokens.add(float(tokens), cut, owner)
        if request.expected_tokens is not None:
            self._ratios.add(tokens / max(1, request.expected_tokens), cut, owner)

    def knows(self, request: Placeable, forecasts: LiveForecasts) -> bool:
        """Return whether what is expected of a request is more than an assumption."""
        return forecasts.has(request.external_id) or self._has_learned(request)

    def curves(
        self, requests: Sequence[Placeable], forecasts: LiveForecasts, steps: FloatArray
    ) -> FloatArray:
        """Return the probability that each request has more tokens to go than that, [n, n_steps].

        From an engine's forecast if it has made one.
        """
        survival = forecasts.forecast(requests).at(steps)
        alike: dict[tuple[int | None, int | None, int], FloatArray] = {}
        for i, request in enumerate(requests):
            if forecasts.has(request.external_id) or not self._has_learned(request):
                continue
            key = request.expected_tokens, request.max_tokens, request.generated_tokens
            try:
                if key not in alike:
                    alike[key] = self._learned(request, steps)
                survival[i] = alike[key]
            except Exception:  # no request may end the forecasts of all
                if not self._failed:
                    logger.exception("%s: its length cannot be told", request.external_id)
                self._failed = True
        return survival

    def _learned(self, request: Placeable, steps: FloatArray) -> FloatArray:
        """Return such a probability by what ended lately, [n_steps]."""
        curve, unit, age = self._of(request), _unit(request), request.generated_tokens
        alive = curve.survival((age + steps) / unit) / curve.survival_at(age / unit)
        return np.where(steps < _left(request), alive, 0.0)

    def new_request(self, forecasts: LiveForecasts, steps: FloatArray) -> FloatArray:
        """Return the probability that a request to come has more tokens than that, [n_steps].

        It will be cut as others were: here nothing is made of that.
        """
        if not self._as_they_ended.knows(_ANY):
            return np.asarray(forecasts.forecast([Placeable("to come")]).at(steps)[0])
        return self._as_they_ended.survival(steps)

    def quantiles(
        self, request: Placeable, forecasts: LiveForecasts, levels: tuple[float, ...]
    ) -> list[float]:
        """Return quantiles of the tokens that a request still has to generate, one a level.

        From an engine's forecast if it has made one.
        """
        curve = self._of(request)
        if forecasts.has(request.external_id) or not self._has_learned(request):
            forecast = forecasts.forecast([request])
            return [max(1.0, q) for q in forecast.quantile(list(levels))[0].tolist()]
        unit, age, most = _unit(request), request.generated_tokens, _left(request)
        alive = curve.survival_at(age / unit)
        ends = [unit * curve.quantile(1.0 - alive * (1.0 - level)) for level in levels]
        return [min(max(1.0, end - age), most) for end in ends]

    def _has_learned(self, request: Placeable) -> bool:
        most = _ANY if request.max_tokens is None else request.max_tokens / _unit(request)
        return self._of(request).knows(most)

    def _of(self, request: Placeable) -> "_Curve":
        return self._tokens if request.expected_tokens is None else self._ratios


def _unit(request: Placeable) -> float:
    """Return the tokens that a request's curve counts in."""
    return 1.0 if request.expected_tokens is None else float(max(1, request.expected_tokens))


def _left(request: Placeable) -> float:
    """Return the tokens that a request may still generate."""
    most = request.max_tokens
    return float("inf") if most is None else float(max(1, most - request.generated_tokens))


class _Latest:
    """The latest values, at most 1,000: one more takes the place of the oldest of who has most.

    So whoever ends many requests takes no others' place.
    """

    def __init__(self) -> None:
        self._of: dict[Hashable, deque[float]] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[float]:
        return chain.from_iterable(self._of.values())

    def add(self, value: float, owner: Hashable) -> None:
        self._of.setdefault(owner, deque()).append(value)
        self._n += 1
        if self._n > _KEPT:
            most = max(self._of, key=lambda one: len(self._of[one]))
            self._of[most].popleft()
            self._n -= 1
            if not self._of[most]:
                del self._of[most]


class _Curve:
    """The Kaplan-Meier curve of the latest values: of those that ended, and of those that were cut.

    They are kept apart. However many are cut, they take no place of those that say something.
    """

    def __init__(self) -> None:
        self._ended, self._cut = _Latest(), _Latest()
        self._ascending: list[float] | None = None  # of those that were cut
        self._drawn: KaplanMeierCurve | None = None
        self._unseen = 0

    def knows(self, most: float) -> bool:
        """Return whether enough values came that tell of all that is at most as large."""
        if len(self._ended) >= _FEWEST:
            return True
        if self._ascending is None:
            self._ascending = sorted(self._cut)
        as_large = len(self._cut) - bisect_left(self._ascending, most)
        return len(self._ended) + as_large >= _FEWEST

    def add(self, value: float, cut: bool, owner: Hashable) -> None:
        (self._cut if cut else self._ended).add(value, owner)
        self._ascending = None
        self._unseen += 1
        if self._unseen >= _ANEW:
            self._drawn = None

    def quantile(self, level: float) -> float:
        return self._curve.quantile(level)

    def survival(self, values: FloatArray) -> FloatArray:
        return self._curve.at(values)

    def survival_at(self, value: float) -> float:
        """Return the probability of more than a value; above 0, that of what outlived all."""
        return max(float(self._curve.at([value])[0]), _OUTLIVED)

    @property
    def _curve(self) -> KaplanMeierCurve:
        if self._drawn is None:
            cut = np.arange(len(self._ended) + len(self._cut)) >= len(self._ended)
            values = np.array([*self._ended, *self._cut])
            self._drawn = KaplanMeierCurve.estimate(values, cut)
            self._unseen = 0
        return self._drawn


_MEMORY = 30.0
"""Seconds after which what was seen counts 1/e."""
_MINUTE = 60.0


class Pace:
    r"""Seconds a token, on each instance and on all, pauses included.

    .. math:: \tau = \frac{\sum_i w_i \Delta_i}{\sum_i w_i n_i}, \qquad w_i = e^{-(t - t_i) / 30}

    over the arrivals of :math:`n_i` tokens of a request :math:`\Delta_i` seconds after its tokens
    before: also those that waited for others' prefills, a preemption or a move.
    """

    def __init__(self) -> None:
        self._all = [0.0, 0.0, 0.0]
        self._of: dict[Hashable, list[float]] = {}

    def took(self, instance: Hashable, tokens: int, seconds: float, now: float) -> None:
        """Note that a request's next tokens have come, so many seconds after those before."""
        for sums in (self._all, self._of.setdefault(instance, [now, 0.0, 0.0])):
            weight = math.exp(min(sums[0] - now, 0.0) / _MEMORY)
            sums[0], sums[1], sums[2] = now, weight * sums[1] + seconds, weight * sums[2] + tokens

    def of(self, instance: Hashable | None) -> float | None:
        """Return the seconds a token of an instance, or of all; None while nothing is known."""
        _, seconds, tokens = self._of.get(instance, self._all)
        if tokens < 1.0:
            _, seconds, tokens = self._all
        return seconds / tokens if tokens > 0.0 and seconds > 0.0 else None


class Arrivals:
    """How many requests have come lately, those more than a minute ago hardly counting."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._at = now
        self._n = 0.0
        self._prompts = self._known = 0.0

    def came(self, prompt_tokens: int | None, now: float) -> None:
        """Note a request, and its prompt if an engine has counted it."""
        self._age(now)
        self._n += 1.0
        if prompt_tokens is not None:
            self._prompts += prompt_tokens
            self._known += 1.0

    def rate(self, now: float) -> float:
        """Return requests a second."""
        self._age(now)
        # What memory there can be so far.
        seconds = _MINUTE * -math.expm1(-max(now - self._began, 1.0) / _MINUTE)
        return self._n / seconds

    @property
    def prompt_tokens(self) -> float:
        """Of a request, in the mean of those that engines have counted."""
        return self._prompts / self._known if self._known > 0.0 else 0.0

    def _age(self, now: float) -> None:
        keep = math.exp(min(self._at - now, 0.0) / _MINUTE)
        self._at, self._n = now, keep * self._n
        self._prompts, self._known = keep * self._prompts, keep * self._known


class FirstTokens:
    r"""Seconds until the first token of a request that need not wait for a place.

    .. math:: t = a + b x

    with x the prompt tokens that are to be computed until then, its own and those ahead of it, by
    least squares over the latest requests, each counting 1/e after 200 others. Neither a nor b is
    below 0.
    """

    def __init__(self) -> None:
        self._n = self._x = self._t = self._xx = self._xt = 0.0

    def took(self, tokens: float, seconds: float) -> None:
        """Note the first token of a request."""
        keep = math.exp(-1 / 200)
        self._n = keep * self._n + 1.0
        self._x = keep * self._x + tokens
        self._t = keep * self._t + seconds
        self._xx = keep * self._xx + tokens * tokens
        self._xt = keep * self._xt + tokens * seconds

    def seconds(self, tokens: float) -> float:
        """Return what is expected of such a request; 0 while nothing is known."""
        if self._n < 1.0:
            return 0.0
        spread = self._xx - self._x * self._x / self._n
        b = (self._xt - self._x * self._t / self._n) / spread if spread > 1e-9 * self._xx else 0.0
        b = min(max(b, 0.0), self._t / max(self._x, 1e-9))
        a = (self._t - b * self._x) / self._n
        return a + b * tokens
