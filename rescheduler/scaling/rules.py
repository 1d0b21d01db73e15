r"""Rules that say how many replicas there should be, from what is observed every few seconds.

A rule states a demand in replicas at full load, which its target divides: 0.5 leaves half of every
replica free. *Load* is the fuller of two things, a replica's requests and its KV cache:

.. math:: \max(N / S, L / C)

with N requests and L tokens, and S requests and C tokens that a replica holds.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.scaling.capacity import Lengths
from rescheduler.scaling.days import MINUTE

__all__ = ["RULES", "Ahead", "Autoscaler", "Rule", "Seen"]

FloatArray = npt.NDArray[np.float64]

_P90 = 1.2816
_STRIDE = 1.0


class Ahead(NamedTuple):
    """What is expected as many seconds ahead as a replica takes to start.

    Attributes:
        requests: of those now running and waiting, that will be there.
        variance: of their number.
        tokens: that they will hold.
        horizon: seconds.
        rates: [n] requests a second in the minute that began last and in those after it.
        since: seconds since that minute began.
    """

    requests: float
    variance: float
    tokens: float
    horizon: float
    rates: FloatArray
    since: float


class Seen(NamedTuple):
    """What a rule sees.

    Attributes:
        running: requests, as ``vllm:num_requests_running`` summed over replicas.
        waiting: requests, as ``vllm:num_requests_waiting``, and those that found no room.
        held: tokens in KV caches.
        unplaced: requests that found no room, and their tokens.
        rate: requests a second in the last minute.
        step: seconds of a step of a replica at the rule's target.
        slots: S of a replica.
        capacity: C of a replica.
        lengths: of past requests.
        ahead: only for rules that look ahead; computed when asked for.
    """

    running: float
    waiting: float
    held: float
    unplaced: tuple[float, float]
    rate: float
    step: float
    slots: int
    capacity: float
    lengths: Lengths
    ahead: Callable[[], Ahead]

    def load(self, requests: float, tokens: float) -> float:
        """Return replicas that they fill."""
        return max(requests / self.slots, tokens / self.capacity)

    def steady(self, rate: float) -> float:
        r"""Return the load that a rate ends up with, by Little's law: :math:`\lambda W`."""
        busy = rate * self.step
        return self.load(busy * self.lengths.output, busy * self.lengths.held)

    @property
    def present(self) -> float:
        """The load of all requests that are there."""
        return self.load(self.running + self.waiting, self.held + self.unplaced[1])


def _queue(seen: Seen) -> float:
    return seen.waiting / seen.slots


def _kv_usage(seen: Seen) -> float:
    return seen.held / seen.capacity


def _running(seen: Seen) -> float:
    return seen.running / seen.slots


def _load(seen: Seen) -> float:
    return seen.present


def _rate(seen: Seen) -> float:
    return seen.steady(seen.rate)


def _arrivals(seen: Seen) -> float:
    ahead = seen.ahead()
    minutes = max(1, math.ceil((ahead.since + ahead.horizon) / MINUTE))
    return seen.steady(float(ahead.rates[:minutes].max()))


def _load_ahead(seen: Seen) -> float:
    ahead = seen.ahead()
    return seen.load(ahead.requests + _P90 * math.sqrt(ahead.variance), ahead.tokens)


def _load_and_arrivals(seen: Seen) -> float:
    return max(seen.present, _arrivals(seen))


def _load_ahead_and_arrivals(seen: Seen) -> float:
    r"""Return the load now, or the load expected in H seconds if that is more.

    .. math:: \sum_i p_i + \int_0^H \hat\lambda(t + H - u)\, S(u / \tau)\, du

    at its 90th percentile, with :math:`\tau` the seconds of a step: those who will still be there,
    and those who will have come and not gone.
    """
    ahead = seen.ahead()
    ago = np.arange(_STRIDE / 2, ahead.horizon, _STRIDE)
    minute = ((ahead.since + ahead.horizon - ago) // MINUTE).astype(np.int64)
    generated = np.asarray(ago / seen.step, dtype=np.float64)
    come = _STRIDE * ahead.rates[minute] * seen.lengths.at(generated)
    requests, tokens = come.sum(), (come * (seen.lengths.prompt + generated)).sum()
    spread = _P90 * math.sqrt(ahead.variance + requests)
    later = seen.load(ahead.requests + requests + spread, ahead.tokens + tokens)
    return max(seen.present, later)


class Rule(NamedTuple):
    """A rule.

    Attributes:
        demand: replicas at full load.
        text: what it goes by.
        forecasts_arrivals: whether it needs a forecast of arrivals.
        knows: whether it is given the arrivals and lengths that come: an upper bound.
        targets: the least and the greatest that are tried.
    """

    demand: Callable[[Seen], float]
    text: str
    forecasts_arrivals: bool = False
    knows: bool = False
    targets: tuple[float, float] = (0.02, 1.5)


RULES = {
    "queue": Rule(_queue, "requests that wait", targets=(1e-4, 0.5)),
    "kv_usage": Rule(_kv_usage, "KV cache in use"),
    "running": Rule(_running, "requests that run"),
    "load": Rule(_load, "load: the fuller of requests and KV cache, waiting ones included"),
    "rate": Rule(_rate, "requests that came in the last minute, at mean lengths"),
    "arrivals": Rule(_arrivals, "requests that are forecast to come, at mean lengths", True),
    "load_ahead": Rule(_load_ahead, "load that is forecast to be left", targets=(1e-3, 1.5)),
    "load+arrivals": Rule(_load_and_arrivals, "the greater of `load` and `arrivals`", True),
    "load_ahead+arrivals": Rule(
        _load_ahead_and_arrivals, "load that is forecast to be left, and to come", True
    ),
    "oracle": Rule(
        _load_ahead_and_arrivals, "the same, knowing the arrivals and lengths to come", knows=True
    ),
}
"""Name -> rule; ``fixed``, a number that stays, is none of them."""


@dataclass
class Autoscaler:
    r"""The replicas that are ordered, as Kubernetes' HorizontalPodAutoscaler derives them.

    .. math:: n = \lceil \text{demand} / \text{target} \rceil

    Nothing changes while demand / (target · current) is within ``tolerance`` of 1, and there are
    never fewer than was recommended at any time in the last ``stabilisation`` seconds.

    Attributes:
        target: of the load of a replica.
        least: replicas.
        most: replicas.
        tolerance: 0.1 is Kubernetes' own.
        stabilisation: seconds; 300 is Kubernetes' own.
    """

    target: float
    least: int = 1
    most: int = 1000
    tolerance: float = 0.1
    stabilisation: float = 300.0
    _recommended: deque[tuple[float, int]] = field(default_factory=deque, init=False)

    def desired(self, now: float, demand: float, current: int) -> int:
        """Return how many replicas there should be.

        Args:
            now: seconds, never less than before.
            demand: replicas at full load.
            current: replicas that start or are ready.
        """
        wanted = demand / self.target
        steady = abs(wanted / max(current, 1) - 1) <= self.tolerance
        recommended = current if steady else min(math.ceil(wanted - 1e-9), self.most)
        while self._recommended and self._recommended[0][0] <= now - self.stabilisation:
            self._recommended.popleft()
        self._recommended.append((now, recommended))
        highest = max(one for _, one in self._recommended)
        stable = recommended if recommended >= current else min(current, highest)
        return min(max(stable, self.least), self.most)
