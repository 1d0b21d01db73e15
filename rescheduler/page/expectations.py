"""What is expected of a cluster: when its requests end, and how full its instances get."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from scipy.special import ndtr

from predictor.forecasts.expected_load import expected_load
from predictor.forecasts.forecast import Forecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.finish_times.fleet_load import wanted_instances
from rescheduler.page.snapshot import UNKNOWN, Finishes, Instance, Outlook, Snapshot
from rescheduler.placement.instance_state import InstanceState
from rescheduler.proxy.finish_reports import FinishReports

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LEVELS = (0.1, 0.5, 0.9)
_SHORTEST, _LONGEST = 64, 4096
_POINTS = 32
_MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True)
class Expectations:
    """What is expected of the instances of a view. G instances, P points ahead.

    Attributes:
        points: [P] decode steps ahead, from 0; none without forecasts.
        mean: [G, P] context tokens.
        deviation: [G, P] standard deviation of them.
        overflow: [G, P] probability of more than the instance's capacity.
        limited: [G] whether that capacity is known.
    """

    points: IntArray
    mean: FloatArray
    deviation: FloatArray
    overflow: FloatArray
    limited: npt.NDArray[np.bool_]

    def of(self, g: int) -> tuple[list[int], list[int], list[float]]:
        """Return `Instance.ahead`, `Instance.deviation` and `Instance.overflow` of an instance."""
        return (
            np.rint(self.mean[g]).astype(np.int64).tolist(),
            np.rint(self.deviation[g]).astype(np.int64).tolist(),
            self.overflow[g].round(4).tolist() if self.limited[g] else [],
        )


def remaining_interval(forecast: Forecast | None, n_requests: int) -> IntArray:
    """Return the 10, 50 and 90% quantile of remaining tokens, [n, 3]; `UNKNOWN` if not forecast."""
    if forecast is None or n_requests == 0:
        return np.full((n_requests, len(_LEVELS)), UNKNOWN)
    tokens = np.minimum(forecast.quantile(_LEVELS), _MOST_TOKENS)
    interval: IntArray = np.ceil(tokens).astype(np.int64)
    return interval


def expectations(view: ClusterView, interval: IntArray) -> Expectations:
    r"""Return what is expected of a view's instances if no further request comes.

    The horizon is the power of two, from 64 to 4,096 steps, that nine of ten requests are likely
    to end within. The overflow's probability takes the load as normal with the mean and variance
    of `expected_load`:

    .. math:: P\big(L_g(h) > K_g\big) = \Phi\big((\Lambda_g(h) - K_g) / \sqrt{V_g(h)}\big)

    The ``interval`` [n_running, 3] is `remaining_interval` of its running requests.
    """
    n_instances = view.n_instances
    limited = np.array([known(capacity) != UNKNOWN for capacity in view.kv_capacity], dtype=bool)
    if view.forecast is None:
        nothing = np.empty((n_instances, 0))
        return Expectations(np.empty(0, dtype=np.int64), nothing, nothing, nothing, limited)
    reached = float(np.quantile(interval[:, 2], 0.9)) if len(interval) else 0.0
    horizon = 2 ** np.ceil(np.log2(np.clip(reached, _SHORTEST, _LONGEST)))
    points = np.linspace(0, horizon, _POINTS + 1).astype(np.int64)
    load = expected_load(
        view.forecast, view.instance, view.context_tokens, n_instances, int(points[-1])
    )
    mean, deviation = load.mean[:, points], np.sqrt(load.variance[:, points])
    excess = mean - view.kv_capacity[:, None]
    certain = np.where(excess > 0, np.inf, -np.inf)
    score = np.divide(excess, deviation, out=certain, where=deviation > 0)
    return Expectations(points, mean, deviation, np.asarray(ndtr(score)), limited)


def foreseen(snapshot: Snapshot, view: ClusterView, names: Sequence[str]) -> Snapshot:
    """Return a snapshot with what is expected of its requests and instances.

    Its requests are those that run in the view of decode instances, whose ``names`` are [G], then
    those that wait in it, as far as they are shown, and then others.
    """
    n_running, n_requests = len(view.instance), len(snapshot.requests.number)
    running = remaining_interval(view.forecast, n_running)
    waiting = remaining_interval(view.waiting_forecast, view.n_waiting)[: n_requests - n_running]
    others = remaining_interval(None, n_requests - n_running - len(waiting))
    low, median, high = np.concatenate([running, waiting, others]).T.tolist()
    expected, load = expectations(view, running), view.kv_load.tolist()
    at = {name: g for g, name in enumerate(names)}

    def loaded(one: Instance) -> Instance:
        if one.name not in at:
            return one
        ahead, deviation, overflow = expected.of(at[one.name])
        kv_tokens = load[at[one.name]]
        return replace(
            one, kv_tokens=kv_tokens, ahead=ahead, deviation=deviation, overflow=overflow
        )

    return replace(
        snapshot,
        points=expected.points.tolist(),
        instances=[loaded(one) for one in snapshot.instances],
        requests=replace(snapshot.requests, low=low, median=median, high=high),
    )


def known(limit: int | np.integer[Any]) -> int:
    """Return a capacity or a number of slots, `UNKNOWN` for one without a limit."""
    return UNKNOWN if limit >= UNLIMITED // 2 else int(limit)


SECONDS = 60.0
"""Ahead, of the load that is compared with what comes."""
WANTED_SECONDS = 300.0
"""Ahead, of the load that instances are wanted for."""
_LATE_SECONDS = 2.0
"""By which a forecast of now may be older than that."""
_DEVIATIONS = 1.2816
"""Of a normal variable, within which it is with a probability of 0.8."""


class _Foretold(NamedTuple):
    at: float
    tokens: list[int]


class Outlooks:
    """Looks ahead whenever the page looks, and keeps what it saw until that has come."""

    def __init__(
        self,
        reports: FinishReports,
        decodes: list[InstanceState],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._reports, self._decodes = reports, decodes
        self._clock = clock or asyncio.get_running_loop().time
        self._foretold: deque[_Foretold] = deque()

    def now(self) -> Outlook | None:
        """Return what is expected, and what had been of now; None while nothing is known."""
        load, later = (
            self._reports.finish_times.load.at(seconds, arrivals=True)
            for seconds in (SECONDS, WANTED_SECONDS)
        )
        if load is None or later is None:
            return None
        spread = _DEVIATIONS * load.tokens_deviation
        tokens = [round(max(0.0, load.tokens + by)) for by in (-spread, 0.0, spread)]
        now = self._clock()
        self._foretold.append(_Foretold(now, tokens))
        due = now - SECONDS
        while len(self._foretold) > 1 and self._foretold[1].at <= due:
            self._foretold.popleft()
        oldest = self._foretold[0]
        came = due - _LATE_SECONDS < oldest.at <= due
        wanted = wanted_instances(later, self._decodes)
        return Outlook(
            seconds=SECONDS,
            tokens=tokens,
            foretold=oldest.tokens if came else [],
            wanted=wanted,
        )

    def finishes(self) -> Finishes | None:
        """Return how forecasts and promises of finishes came out; None without any."""
        held, promises = self._reports.held, self._reports.promised
        if not held and not promises:
            return None
        return Finishes(
            forecasts=len(held),
            held=round(sum(held) / len(held), 4) if held else None,
            kept=promises["kept"],
            broken=promises["broken"],
            refused=promises["refused"],
        )
