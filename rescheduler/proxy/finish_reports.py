"""When requests will finish, as clients and operators are told."""

import asyncio
import logging
import time
from collections import Counter, deque
from itertools import product
from math import inf

import msgspec

from rescheduler.finish_times.finish_times import KINDS, Expected, FinishTimes, Interval, Observed
from rescheduler.finish_times.fleet_load import AheadMetrics, FleetLoad
from rescheduler.finish_times.promises import Promises
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest, TokenArrival
from rescheduler.proxy.proxy_metrics import ProxyMetrics

logger = logging.getLogger("headway.serve")

_SAMPLE_SECONDS = 1.0
_LATEST = 500
_OUTCOMES = ("earlier", "within", "later")


class _Comment(msgspec.Struct, omit_defaults=True):
    """What a stream that asks for it tells between its events, in seconds from then on.

    Intervals are the 10, 50 and 90% quantile.
    """

    state: str
    finish_s: tuple[float, float, float]
    tokens_left: tuple[int, int, int]
    start_s: tuple[float, float, float] | None = None
    place: int | None = None


class FinishReports:
    """Follows a proxy's requests, and tells when they will finish.

    When that is also tells how busy the engines are. So it is told to clients only whose key an
    engine has accepted.

    Attributes:
        finish_times: of the requests.
        held: whether the latest 80% intervals of a finish held.
        promised: what became of promises, by outcome, since the start.
    """

    def __init__(self, cluster: Cluster[LiveRequest], metrics: ProxyMetrics) -> None:
        self.held: deque[bool] = deque(maxlen=_LATEST)
        self.promised: Counter[str] = Counter()
        self._metrics = metrics
        clock = asyncio.get_running_loop().time
        forecasts = cluster.forecasts or LiveForecasts(None)
        self._learns = forecasts if cluster.forecasts is None else None
        prefills = [one for one in cluster.all if one.instance.role == "prefill"]
        self._decodes = cluster.decodes
        load = FleetLoad(
            cluster.decodes,
            lambda: cluster.dispatcher.usable,
            prefills,
            cluster.placements,
            lambda: cluster.dispatcher.in_line,
            forecasts,
            clock,
        )
        self.finish_times = FinishTimes(load, forecasts, clock, self._observed)
        self._keys = cluster.accounts.keys
        levels = cluster.deployment.proxy.promise_levels
        self._promises = Promises(
            self.finish_times, levels, clock, self._promise_came, cluster.accounts.strictness
        )
        metrics.add(AheadMetrics(self.finish_times.load, cluster.decodes))
        # From 0 on, as the proxy's other counters.
        for of, kinds in (("start", KINDS[:2]), ("finish", KINDS)):
            for kind, outcome in product(kinds, _OUTCOMES):
                metrics.finish_forecasts.labels(of, kind, outcome)

    async def run(self) -> None:
        """Forecast what runs regularly, forever: how forecasts come out is what they learn from."""
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            for look in (self.finish_times.sample, self._promises.protect):
                try:
                    look()
                except Exception:
                    logger.exception("looking at what runs failed")

    def refuse_hopeless(self, request: LiveRequest) -> None:
        """Refuse a request that nothing can be promised to, before anything is done for it.

        Raises:
            RequestRefusedError: 400.
        """
        client = request.client
        seconds = _promised_seconds(request)
        if seconds is None:
            return
        if client.direct or client.background:
            what = client.direct or "service_tier: flex"
            message = f"no promise is given to a request with `{what}`"
            raise RequestRefusedError(400, message, "finish_in_s")
        if seconds <= 0:
            raise RequestRefusedError(400, "`finish_by` is in the past", "finish_by")

    def arrived(self, request: LiveRequest) -> dict[str, str]:
        """Follow a new request; return headers of its answer that tell of its promise.

        Raises:
            RequestRefusedError: 429, it must finish sooner than can be promised.
        """
        if request.client.direct == "path":  # not all of these generate anything
            return {}
        headers = self._promised(request)
        self.finish_times.arrived(request)
        return headers

    def _promised(self, request: LiveRequest) -> dict[str, str]:
        client, seconds = request.client, _promised_seconds(request)
        if seconds is None:
            return {}
        try:
            probability = self._promises.give(request, seconds, client.finish_level, client.tier)
        except RequestRefusedError:
            self._promise_came("refused")
            if not self._may_tell(request):
                message = "it is not likely enough to finish in time"
                raise RequestRefusedError(429, message, "finish_in_s", retry_after=1) from None
            raise
        self._promise_came("given" if request.finish_by < inf else "none")
        if probability is None or not self._may_tell(request):
            return {}
        return {"X-Headway-Finish-Probability": f"{probability:.3f}"}

    def token(self, request: LiveRequest, arrival: TokenArrival, tokens: int, now: float) -> None:
        """Note tokens of a request; before they are counted as generated."""
        instance = request.instance
        if arrival.waited is None:
            self.finish_times.first_token(request)
        elif instance is not None and not (request.several or request.slow_client):
            self.finish_times.load.pace.took(instance, tokens, arrival.waited, now)

    def ended(self, request: LiveRequest, by_itself: bool) -> None:
        """Note that a request has ended."""
        if request.client.direct == "path":
            return
        at = request.last_token
        self.finish_times.ended(request, by_itself, at)
        self._promises.ended(request, by_itself, at)
        if self._learns is not None:
            self._learns.ended(request, by_itself)

    def headers(self, request: LiveRequest) -> dict[str, str]:
        """Return the headers that tell the client of a stream when it is expected to finish."""
        expected = self._expected(request)
        if expected is None:
            return {}
        headers = {"X-Headway-Expected-Finish": _header(expected.finish)}
        if expected.start is not None:
            headers["X-Headway-Expected-Start"] = _header(expected.start)
        return headers

    def comment(self, request: LiveRequest) -> bytes | None:
        """Return a comment of a stream of events that tells how its request stands."""
        expected = self._expected(request)
        return None if expected is None else _comment(expected)

    def drain_seconds(self, instance: InstanceState) -> float | None:
        """Return the seconds until all that runs on an instance has ended; None: not known."""
        if instance not in self._decodes:
            return None
        return self.finish_times.load.drain_seconds(self._decodes.index(instance))

    def _expected(self, request: LiveRequest) -> Expected | None:
        """Return what is expected of a request now, as far as its client may know it."""
        return self.finish_times.expect(request) if self._may_tell(request) else None

    def _may_tell(self, request: LiveRequest) -> bool:
        """Return whether an engine has accepted a request, or lately another one with its key."""
        return request.generated_tokens > 0 or self._keys.knows(request.headers)

    def _promise_came(self, outcome: str) -> None:
        self.promised[outcome] += 1
        self._metrics.promises.labels(outcome).inc()

    def _observed(self, came: Observed) -> None:
        outcome = "within"
        if came.actual < came.expected.low:
            outcome = "earlier"
        elif came.actual > came.expected.high:
            outcome = "later"
        self._metrics.finish_forecasts.labels(came.of, came.kind, outcome).inc()
        if came.of == "finish":
            self.held.append(outcome == "within")


def _promised_seconds(request: LiveRequest) -> float | None:
    """Return the seconds within which a request must finish; None: it may take any time."""
    client = request.client
    return client.finish_in if client.finish_by is None else client.finish_by - time.time()


def refuse_promises(request: LiveRequest) -> None:
    """Refuse a request that must finish in time, where other proxies' requests are not known.

    Raises:
        RequestRefusedError: 400.
    """
    client = request.client
    if client.finish_in is not None or client.finish_by is not None:
        message = "no promise is given where a coordinator decides for many proxies"
        raise RequestRefusedError(400, message, "finish_in_s")


def _header(interval: Interval) -> str:
    """Return an interval as an item of a structured field (RFC 9651)."""
    low, median, high = interval
    return f"{median:.3f};low={low:.3f};high={high:.3f}"


def _comment(expected: Expected) -> bytes:
    low, median, high = (round(tokens) for tokens in expected.tokens)
    start = expected.start
    told = _Comment(
        state="running" if start is None else "waiting",
        finish_s=_rounded(expected.finish),
        tokens_left=(low, median, high),
        start_s=None if start is None else _rounded(start),
        place=None if start is None else expected.place,
    )
    return b": headway " + msgspec.json.encode(told) + b"\n\n"


def _rounded(interval: Interval) -> tuple[float, float, float]:
    low, median, high = (round(seconds, 3) for seconds in interval)
    return low, median, high
