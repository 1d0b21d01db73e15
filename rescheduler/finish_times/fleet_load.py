"""The load of the decode instances now and ahead, seen anew as often as it is cheap."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil, isfinite
from typing import Any, NamedTuple

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rescheduler.cluster.cluster_view import UNLIMITED
from rescheduler.finish_times.lengths import Arrivals, LatelyEnded, Pace
from rescheduler.finish_times.load_ahead import ANYWHERE, STEPS, LoadAhead, Queue, load_ahead
from rescheduler.placement.guarded_policy import longest_prompt
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable, Placements

logger = logging.getLogger("headway.serve")

_LONGEST_LINE = 2_000
_MOST_GENERATED = 2**30
_FRESH_SECONDS, _STALE_SECONDS = 0.1, 2.0
_SHARE = 0.05
"""Of the processor's time that the load ahead may take."""


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


class Start(NamedTuple):
    """What waits before a request.

    Attributes:
        steps: decode steps until there is room for it.
        place: requests that start before it.
        prompts: tokens of prompts to be computed until its first token, with its own.
        queues: whether others are to start before it, wherever it may go.
    """

    steps: float
    place: int
    prompts: float
    queues: bool


class FleetLoad:
    """The requests of a proxy's decode instances, and when what waits will start.

    Args:
        decodes: instances that decode.
        usable: returns those that take new requests.
        prefills: instances that prefill for them.
        placements: of all requests on them.
        in_line: returns the requests that wait for a place, in the order of service.
        forecasts: of remaining lengths.
        clock: seconds.

    Attributes:
        pace: how long tokens take.
        lengths: of the requests that ended lately.
    """

    def __init__(
        self,
        decodes: Sequence[InstanceState],
        usable: Callable[[], Sequence[InstanceState]],
        prefills: Sequence[InstanceState],
        placements: Placements[Any],
        in_line: Callable[[], Sequence[Placeable]],
        forecasts: LiveForecasts,
        clock: Callable[[], float],
    ) -> None:
        self._decodes = decodes
        self._prefills = prefills
        self._placements = placements
        self._usable, self._in_line = usable, in_line
        self._forecasts, self._clock = forecasts, clock
        self.pace = Pace()
        self.lengths = LatelyEnded()
        self._arrivals = Arrivals(clock())
        self._ahead: LoadAhead | None = None
        self._line: dict[Placeable, int] = {}
        self._prompts = 0.0
        self._further = 0
        self._waiting = 0
        self._queued = np.zeros(len(decodes), dtype=np.int64)
        self._joined: set[Placeable] = set()  # since the load ahead was computed
        self._due = -np.inf
        self._failed = False
        self._longest = longest_prompt(decodes)

    def came(self, request: Placeable) -> None:
        """Count the arrival of a request that an engine has accepted."""
        known = self._prompt(request) if request.prompt_is_known else None
        self._arrivals.came(known, self._clock())

    def join(self, request: Placeable) -> None:
        """Count a new request in the load ahead, since others may come before it is seen anew."""
        if self._ahead is None or request in self._line:
            return
        curve = self.lengths.curves([request], self._forecasts, STEPS)[0]
        self._ahead = self._ahead.with_one_more(curve, self._context(request))
        self._line[request] = len(self._line)
        self._joined.add(request)
        self._prompts += self._prompt(request) / self._computing

    def began(self, request: Placeable) -> None:
        """Note that a request waits no more."""
        self._joined.discard(request)

    def start_of(self, request: Placeable) -> Start | None:
        """Return what waits before a request that has not started; None: nobody knows.

        Nor does anyone where no instance has room for it within 65,536 steps.
        """
        self._look()
        ahead = self._ahead
        if ahead is None:
            return None
        at = self._line.get(request)
        if at is None:  # after all others, of which not all were looked at
            steps = ahead.next_start(self._context(request))
            steps *= 1.0 + self._further / max(1, len(self._line))
        else:
            steps = float(ahead.start[at])
        if not np.isfinite(steps):
            return None
        own = self._prompt(request) if request.instance is None else 0
        place = int((ahead.start < steps).sum())
        return Start(steps, place, self._prompts + own, steps > 0 or self._queues(request))

    def drain_seconds(self, g: int) -> float | None:
        """Return the seconds until all that runs on a decode instance now has ended, as P90.

        None while nothing is known.
        """
        self._look()
        pace = self.pace.of(self._decodes[g])
        if self._ahead is None or pace is None:
            return None
        return float(self._ahead.drained[g]) * pace

    def at(self, seconds: float, arrivals: bool) -> PoolLoad | None:
        r"""Return the load of all decode instances that many seconds ahead; None: not known yet.

        With ``arrivals``, requests come as they did in the last minute, at a rate
        :math:`\lambda` and with prompts of :math:`\bar c` tokens, and end as others did lately:

        .. math::

            N(h) = \lambda \tau \int_0^h S(u)\,du, \qquad
            \Lambda(h) = \lambda \tau \int_0^h S(u)\,(\bar c + u)\,du

        in steps of :math:`\tau` seconds; a Poisson number of them, each as variable as its length.
        """
        self._look()
        ahead, pace = self._ahead, self.pace.of(None)
        if ahead is None or pace is None:
            return None
        steps = seconds / pace
        n, n_variance, tokens, tokens_variance = ahead.at(steps).sum(axis=1).tolist()
        if arrivals:
            grid = np.linspace(0.0, steps, 129)
            alive = self.lengths.new_request(self._forecasts, grid)
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
        self._look()
        return self._ahead

    def _queues(self, request: Placeable) -> bool:
        if request.instance is not None:
            g = self._decodes.index(request.instance) if request.instance in self._decodes else -1
            return g < 0 or self._queued[g] > 1
        waiting = self._waiting + len(self._joined)
        return waiting > 0 or bool((self._queued > 0).all())

    def _prompt(self, request: Placeable) -> int:
        """Return the tokens of a request's prompt: as many as an engine takes, whatever one says.

        Otherwise a single request could fill the whole load ahead.
        """
        return min(request.prompt_tokens, self._longest)

    def _context(self, request: Placeable) -> int:
        """Return the tokens that a request holds, likewise."""
        return self._prompt(request) + min(request.generated_tokens, _MOST_GENERATED)

    def _look(self) -> None:
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
                if has_started(request):
                    running.append(request)
                    where.append(g)
                else:
                    queue.append(request)
                    queued_at.append(g)
        self._longest = longest_prompt(self._decodes)
        prefilled = sum(map(self._prompt, queue))
        for instance in self._prefills:
            prefilled += sum(map(self._prompt, self._placements.on(instance)))
        line = list(self._in_line())
        self._further = max(0, len(line) - _LONGEST_LINE)
        del line[_LONGEST_LINE:]
        queue += line
        queued_at += [ANYWHERE] * len(line)
        slots, usable = [one.slots for one in self._decodes], set(self._usable())
        self._ahead = load_ahead(
            self._forecasts.forecast(running),
            np.array(where, dtype=np.int64),
            np.array(list(map(self._context, running)), dtype=np.int64),
            np.array(slots, dtype=np.int64),
            np.array([one.kv_capacity for one in self._decodes], dtype=np.int64),
            Queue(
                self.lengths.curves(queue, self._forecasts, STEPS),
                np.array(list(map(self._context, queue)), dtype=np.int64),
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


def has_started(request: Placeable) -> bool:
    """Return whether a request has a token."""
    return request.generating or request.generated_tokens > 0


HORIZONS = (15, 60, 120, 300)
"""Seconds ahead."""

_QUANTILES = {"0.5": 0.0, "0.9": 1.2816}
"""Of a normal distribution, in standard deviations."""
_ARRIVALS = {"none": False, "as_lately": True}
_ROOM = 0.9
"""Of an instance's memory and of its slots that is to be used."""


def wanted_instances(load: PoolLoad, decodes: Sequence[InstanceState]) -> int | None:
    """Return how many instances a load takes that is exceeded one time in ten; None: unknown.

    Such that nine tenths of their memory, and of their slots, are enough.
    """
    known = [one for one in decodes if one.engine is not None]
    if not known:
        return None
    deviations = _QUANTILES["0.9"]
    tokens = load.tokens + deviations * load.tokens_deviation
    requests = load.requests + deviations * load.requests_deviation
    capacity = sum(one.kv_capacity for one in known) / len(known)
    slots = sum(one.slots for one in known) / len(known)
    if capacity <= 0 or slots <= 0:
        return None
    return max(1, ceil(tokens / (_ROOM * capacity)), ceil(requests / (_ROOM * slots)))


class AheadMetrics(Collector):
    """Gauges that are computed whenever Prometheus asks; none while nothing is known."""

    def __init__(self, load: FleetLoad, decodes: Sequence[InstanceState]) -> None:
        self._load, self._decodes = load, decodes
        self._failed = False

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now; none where they cannot be computed."""
        try:
            yield from list(self._gauges())
            self._failed = False
        except Exception:
            if not self._failed:
                logger.exception("the load ahead cannot be told")
            self._failed = True

    def _gauges(self) -> Iterator[Metric]:
        labels = ["seconds", "quantile", "arrivals"]
        tokens = GaugeMetricFamily(
            "headway_proxy_expected_context_tokens",
            "context tokens expected on all decode instances, so many seconds ahead; with no "
            "further arrivals, or with those of the last minute going on",
            labels=labels,
        )
        requests = GaugeMetricFamily(
            "headway_proxy_expected_requests",
            "requests expected to run on all decode instances, likewise",
            labels=labels,
        )
        rate = GaugeMetricFamily(
            "headway_proxy_expected_tokens_per_second",
            "tokens expected to be generated by all decode instances, likewise",
            labels=labels,
        )
        wanted = GaugeMetricFamily(
            "headway_proxy_wanted_instances",
            "decode instances that hold the load expected so many seconds ahead nine times in ten, "
            "arrivals going on as in the last minute",
            labels=["seconds"],
        )
        for seconds in HORIZONS:
            for name, arrivals in _ARRIVALS.items():
                load = self._load.at(seconds, arrivals)
                if load is None:
                    continue
                for quantile, deviations in _QUANTILES.items():
                    at = [str(seconds), quantile, name]
                    tokens.add_metric(at, load.tokens + deviations * load.tokens_deviation)
                    n = load.requests + deviations * load.requests_deviation
                    requests.add_metric(at, n)
                    share = n / load.requests if load.requests > 0 else 1.0
                    rate.add_metric(at, load.tokens_per_second * share)
                needed = wanted_instances(load, self._decodes) if arrivals else None
                if needed is not None:
                    wanted.add_metric([str(seconds)], needed)
        yield from (tokens, requests, rate, wanted)
        yield from self._of_instances()

    def _of_instances(self) -> Iterator[Metric]:
        drained = GaugeMetricFamily(
            "headway_proxy_expected_drain_seconds",
            "until all that runs on an instance now has ended, nine times in ten, if nothing moves",
            labels=["instance_name"],
        )
        capacity = GaugeMetricFamily(
            "headway_proxy_kv_capacity_tokens",
            "that an instance's KV cache holds, says its control socket",
            labels=["instance_name"],
        )
        homeless = GaugeMetricFamily(
            "headway_proxy_unplaceable_requests",
            "waiting requests that no decode instance is expected to have room for",
        )
        ahead = self._load.ahead
        for g, instance in enumerate(self._decodes):
            if instance.kv_capacity < UNLIMITED // 2:
                capacity.add_metric([instance.name], instance.kv_capacity)
            seconds = self._load.drain_seconds(g)
            if seconds is not None:
                drained.add_metric([instance.name], seconds)
        if ahead is not None:
            homeless.add_metric([], sum(not isfinite(start) for start in ahead.start.tolist()))
        yield from (drained, capacity, homeless)
