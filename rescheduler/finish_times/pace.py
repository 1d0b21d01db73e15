"""How long tokens take lately: the next one of a request that runs, and the first of a new one."""

import math
from collections.abc import Hashable

__all__ = ["Arrivals", "FirstTokens", "Pace"]

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
        self._began, self._at, self._n = now, now, 0.0
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
