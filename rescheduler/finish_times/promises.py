"""Promises of when a request will be finished: given, refused, kept and broken."""

import random
from collections.abc import Callable, Mapping
from math import exp, inf
from weakref import WeakKeyDictionary

from rescheduler.finish_times.finish_times import FinishTimes
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.placeable import Placeable

_GAIN = 0.02
_SERVICE_LEVEL = 0.9
_PROTECTED, _REST_SECONDS = 32, 3.0
_FORGOTTEN, _FORGETS_SECONDS, _TAKEN_OF = 0.02, 1.0, 20
_LONGEST_NAMED = 1e6
_HIGHEST, _STRICTEST, _LONGEST_RETRY = 0.999, 2.0, 60.0


def _own_strictness(account: Account, level: float) -> float:
    return account.strictness.get(level, 0.0)


class Promises:
    r"""Gives promises that are likely enough to be kept.

    A request that must be finished within T seconds is taken if

    .. math:: P(\text{finished within } T) \ge 1 - (1 - p)\,e^{-\delta_p}

    with p the level that it asks for, or that of its class. :math:`\delta_p` rises by 0.02 p / (1 -
    p) with each promise of that level to its account that is broken, and falls by 0.02 with each
    that is kept, between 0 and 2: where more than 1 - p are broken, fewer are given (adaptive
    conformal inference, as in `Calibration`). It falls by 2% with each request that is refused,
    once a second at most: few promises now do not mean few for ever.

    A promise counts as a deadline: once the request has to start in order to keep it, it goes
    before others, as far as `promised_first` lets it; and while it is at risk, its request is not
    moved.

    Args:
        levels: of classes (``service_tier``), with one for ``default``.
        clock: that of ``arrived`` of a request.
        ended: is told how each promise ended: ``kept``, ``broken``, or ``left`` where the request
            did not end by itself in time, or its client took the time.
        usual: returns how strict an account's promises of a level are, as `Accounts.strictness`.
    """

    def __init__(
        self,
        finish_times: FinishTimes,
        levels: Mapping[str, float],
        clock: Callable[[], float],
        ended: Callable[[str], None],
        usual: Callable[[Account, float], float] = _own_strictness,
    ) -> None:
        self._finish_times, self._levels = finish_times, levels
        self._clock, self._tell = clock, ended
        self._usual = usual
        self._forgot_at: WeakKeyDictionary[Account, float] = WeakKeyDictionary()
        self._given: dict[Placeable, float] = {}
        self._random = random.Random(0)
        self._refused = 0

    def give(
        self, request: Placeable, seconds: float, level: float | None, tier: str
    ) -> float | None:
        """Promise a request to finish within so many seconds; return how likely that is.

        At level 0 that is all: nothing is promised, and nothing refused.

        None where nothing is known yet: it is taken without a promise, since only requests that
        run can tell how long they take. So is one of 20 that are refused while nothing runs.

        Raises:
            RequestRefusedError: 429 with the earliest time that could be promised.
        """
        if level is None:
            level = self._levels.get(tier, self._levels.get("default", 0.95))
        level = min(level, _HIGHEST)
        probability = self._finish_times.finish_probability(request, seconds)
        needed = self._needed(request.account, level)
        if probability is None:
            return None
        if probability < needed and self._refused >= _TAKEN_OF and self._finish_times.load.idle:
            self._refused = 0
            return None
        if probability < needed:
            self._refused += 1
            self._forget(request.account, _rounded(level))
            earliest = self._finish_times.finish_quantile(request, needed)
            raise RequestRefusedError(
                429,
                _refusal(seconds, level, earliest),
                "finish_in_s",
                retry_after=round(min(max((earliest or 0.0) - seconds, 1.0), _LONGEST_RETRY)),
            )
        if level == 0:
            return probability
        now = self._clock()
        request.finish_by, request.promised_level = now + seconds, level
        service = self._finish_times.service_quantile(request, max(level, _SERVICE_LEVEL))
        request.start_by = request.finish_by - service
        self._given[request] = level
        return probability

    def _forget(self, account: Account, level: float) -> None:
        """Be less strict after a refusal, once a second: refusals cost their client nothing."""
        if self._clock() - self._forgot_at.get(account, -inf) >= _FORGETS_SECONDS:
            self._forgot_at[account] = self._clock()
            account.strictness[level] = self._usual(account, level) * (1.0 - _FORGOTTEN)

    def ended(self, request: Placeable, by_itself: bool, at: float | None = None) -> None:
        """Note that a request has ended, at a time, with or without a promise."""
        level = self._given.pop(request, None)
        if level is None:
            return
        late = (self._clock() if at is None else at) > request.finish_by
        if request.slow_client or (not by_itself and not late):
            self._tell("left")
            return
        self._tell("broken" if late else "kept")
        change = _GAIN * (1.0 / (1.0 - level) - 1.0 if late else -1.0)
        strictness = self._usual(request.account, _rounded(level)) + change
        request.account.strictness[_rounded(level)] = min(max(0.0, strictness), _STRICTEST)

    def protect(self) -> None:
        """Let no request be moved for now whose promise is at risk, of some that are chosen."""
        now = self._clock()
        chosen = min(_PROTECTED, len(self._given))
        for request in self._random.sample(list(self._given), chosen):
            level = self._given[request]
            if request.finish_by <= now or not request.can_move:
                continue
            left = self._finish_times.finish_probability(request, request.finish_by - now)
            if left is not None and left < self._needed(request.account, level):
                request.rest(now + _REST_SECONDS)

    def _needed(self, account: Account, level: float) -> float:
        if level == 0:
            return 0.0
        return 1.0 - (1.0 - level) * exp(-self._usual(account, _rounded(level)))


def _rounded(level: float) -> float:
    """Return a level of those that are learnt apart, of which there are a hundred."""
    return min(round(level, 2), 0.99)


def _refusal(seconds: float, level: float, earliest: float | None) -> str:
    asked = f"it would not finish within {seconds:.3g} s with a probability of {level:g}"
    if earliest is None or earliest > _LONGEST_NAMED:
        return f"{asked}; when it would is not known yet"
    return f"{asked}; the earliest that can be promised is {earliest:.3g} s from now"
