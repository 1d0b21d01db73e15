"""How many tokens a request still has to generate, by its age and how long others became."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from predictor.forecasts.kaplan_meier import KaplanMeierCurve

FloatArray = npt.NDArray[np.float64]

Victim = Literal["rest", "age", "context", "newest"]
"""Whom an engine suspends: the request with the longest expected rest, by its forecast or by its
age alone, that with the longest context, or, as vLLM does, the one that came last."""

LOOKED_STEPS, LOOKED_AT = 8, 16
"""Steps between two looks for room for suspended requests, and of how many each looks at."""
LONGEST_SUSPENSION, SHORTEST_LIMIT = 2.0, 256.0
"""Steps for which one is passed by, as a multiple of its expected rest, and at least. The rest is
the forecast's or that of its age, whichever is shorter."""
RECOMPUTED = 64.0
"""Tokens of context that are computed again in the time of about a step."""
LONGEST_HOLD = 128.0
"""Steps for which nothing new begins before one that has just been suspended, at most."""
_KEPT, _FEWEST = 1024, 30


class RestByAge:
    r"""The expected rest given the age, by the lengths of the last 1,024 requests.

    .. math:: E[R \mid n] = \int_n^{\infty} S(t)\,dt \,\Big/\, S(n)

    with S the product-limit curve of Kaplan and Meier (JASA 1958), in which one that its
    ``max_tokens`` ended counts as cut there. A request that has outlived all of them is expected to
    go on for as long as it has.
    """

    def __init__(self) -> None:
        self._lengths = np.zeros(_KEPT)
        self._was_cut = np.zeros(_KEPT, dtype=np.bool_)
        self._ended = self._known = 0
        self._ages, self._rests = np.zeros(1), np.zeros(1)

    def ended(self, tokens: int, was_cut: bool) -> None:
        """Learn from a request that no client or fault has ended."""
        i = self._ended % _KEPT
        self._lengths[i], self._was_cut[i] = tokens, was_cut
        self._ended += 1

    @property
    def knows(self) -> bool:
        """Whether enough has ended to say anything."""
        return self._ended >= _FEWEST

    def at(self, ages: npt.ArrayLike) -> FloatArray:
        """Return the expected rest of requests that have so many tokens, [n], at least 1."""
        if self._ended - self._known >= max(1, min(self._known, _KEPT) // 16):
            self._estimate()
        age = np.asarray(ages, dtype=np.float64)
        rest = np.interp(age, self._ages, self._rests)
        at_least_one: FloatArray = np.maximum(np.where(age > self._ages[-1], age, rest), 1.0)
        return at_least_one

    def _estimate(self) -> None:
        n = min(self._ended, _KEPT)
        curve = KaplanMeierCurve.estimate(self._lengths[:n], self._was_cut[:n])
        self._known = self._ended
        # S is s[k] from t[k] to t[k + 1], the last until the longest that was seen.
        t = np.r_[0.0, curve.times, curve.last_observed]
        s = np.r_[1.0, curve.survival]
        area = np.r_[np.cumsum((s * np.diff(t))[::-1])[::-1], 0.0]
        alive = np.r_[s, s[-1]]
        # Who outlives the longest that was seen goes on for as long as it has.
        total = area + alive[-1] * t[-1]
        self._ages = t
        self._rests = np.divide(total, alive, out=np.maximum(t, 1.0), where=alive > 0.0)


def held(contexts: FloatArray, rests: FloatArray, steps: npt.ArrayLike) -> FloatArray:
    r"""Return the tokens that requests are expected to hold together so many steps from now.

    .. math:: \sum_i e^{-h / E[R_i]} (c_i + h)

    for c tokens now: a survival curve of which only the mean is known.

    Args:
        contexts: [n] tokens of each.
        rests: [n] expected tokens to go, at least 1.
        steps: h, of any shape; so is what is returned.
    """
    ahead = np.asarray(steps, dtype=np.float64)[..., None]
    tokens: FloatArray = (np.exp(-ahead / rests) * (contexts + ahead)).sum(axis=-1)
    return tokens


def peak(contexts: FloatArray, rests: FloatArray) -> float:
    r"""Return the most tokens that requests are expected to hold together from now on.

    The most of `held`, which has the arguments.
    """
    if len(contexts) == 0:
        return 0.0
    steps = np.r_[0.0, np.geomspace(1.0, max(float(rests.max()), 2.0), 16)]
    return float(held(contexts, rests, steps).max())
