"""What running engines publish: the latest view of each."""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from data_collection.capture.requests import parse_request_id
from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.telemetry_messages import (
    TOPIC,
    Finished,
    FinishedEvent,
    Gauges,
    Message,
    RequestForecast,
    Snapshot,
    TelemetryError,
    decode_message,
    decode_survival,
)

SURVIVAL_SCALE = 65_535
"""What a survival probability of 1 is coded as."""


@dataclass(frozen=True, slots=True, eq=False)
class ForecastBatch:
    """Forecasts of some requests of one engine; never changed once made.

    Attributes:
        edges: [n_edges] grid of the curves, in tokens.
        names: [n] ids of the requests as clients know them.
        prompt_tokens: [n] of each request.
        context: [n] tokens of prompt and output when each forecast was made.
        tokens_left: [n] tokens to ``max_tokens`` from there.
        survival: [n, n_edges] the curves, in units of 1 / `SURVIVAL_SCALE`.
    """

    instance: str
    edges: tuple[int, ...]
    names: tuple[str, ...]
    prompt_tokens: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]
    tokens_left: npt.NDArray[np.int64]
    survival: npt.NDArray[np.uint16]

    @classmethod
    def new(
        cls,
        instance: str,
        edges: Sequence[int],
        names: Sequence[str],
        requests: Sequence[RequestForecast],
    ) -> "ForecastBatch":
        """Return what a checked message forecasts of some of its requests."""
        n = len(requests)
        coded = np.frombuffer(b"".join([one.survival for one in requests]), dtype="<u2")
        return cls(
            instance,
            tuple(edges),
            tuple(names),
            np.fromiter((one.prompt_tokens for one in requests), np.int64, n),
            np.fromiter((one.prompt_tokens + one.forecast_at for one in requests), np.int64, n),
            np.fromiter((one.tokens_left for one in requests), np.int64, n),
            coded.reshape(n, len(edges)),
        )


_KEPT_FORECASTS = 256  # of a running request; beyond, every second one goes
_KEPT_OF_ALL = 1 << 15  # of an engine's running requests, 8 MB; beyond, fewer are kept of each
_KEPT_FINISHED = 20_000
_KEPT_VANISHED = 1_000
_KEPT_GAPS = 1_000
_KEPT_BATCHED = 16_384  # forecasts of an engine until somebody takes them
_MOST_RUNNING = 16_384  # requests on an engine; its next ones are not kept
_MOST_ENGINES = 16  # that one connection speaks for, as one that passes on what others publish


class InstanceKey(NamedTuple):
    """An engine, or one data-parallel rank of it."""

    name: str
    rank: int


class KeptForecast(msgspec.Struct, frozen=True, gc=False):
    """A forecast as it was received, with its curve coded; there may be a hundred thousand."""

    forecast_at: int
    tokens_left: int
    survival: bytes


@dataclass(frozen=True, slots=True)
class FinishedForecasts:
    """A request that ended, with the forecasts that had been received for it.

    Attributes:
        instance: where it ran.
        model: name of the serving model; empty when no snapshot had come yet.
        checkpoint: fingerprint of the predictor; empty likewise.
        event: how it ended.
        edges: [n_edges] grid of the curves, in tokens; empty when no forecast had come.
        forecasts: oldest first; evenly thinned when there were more than a few hundred.
    """

    instance: InstanceKey
    model: str
    checkpoint: str
    event: FinishedEvent
    edges: tuple[int, ...]
    forecasts: list[KeptForecast]

    def forecast(self) -> SurvivalForecast:
        """Return the forecasts as they were made, [n_forecasts], each capped by its own limit."""
        return _decoded_forecast(self.edges, self.forecasts)


@dataclass(slots=True)
class RunningRequest:
    """A running request.

    Attributes:
        name: its id as its client knows it.
        latest: its newest report; without its curve in a view made without history.
        seq: number of the message that reported it.
        forecasts: its forecasts since history is kept, oldest first.
    """

    name: str
    latest: RequestForecast
    seq: int
    forecasts: list[KeptForecast] = field(default_factory=list)
    _stride: int = 1
    _skipped: int = 0

    def keep_forecast(self, newest: int, report: RequestForecast, most: int) -> None:
        """Keep the forecast of a report if it is newer than the one made at ``newest`` tokens."""
        if report.forecast_at <= newest:
            return
        self._skipped += 1
        if self.forecasts and self._skipped < self._stride:
            return
        self._skipped = 0
        self.forecasts.append(KeptForecast(report.forecast_at, report.tokens_left, report.survival))
        if len(self.forecasts) > most:
            del self.forecasts[1::2]
            self._stride *= 2


class _SequenceNumbers:
    """Which message numbers came, in any order.

    Attributes:
        lost: numbers between the smallest and the largest that did not come.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._low, self._high = 0, -1
        self._gaps: list[tuple[int, int]] = []  # [first, last] missing, ascending

    def add(self, seq: int) -> bool:
        """Note a number; return whether it is new."""
        if self._low > self._high:
            self._low = self._high = seq
        elif seq > self._high:
            self._add_gap(len(self._gaps), self._high + 1, seq - 1)
            self._high = seq
        elif seq < self._low:
            self._add_gap(0, seq + 1, self._low - 1)
            self._low = seq
        else:
            at = bisect_right(self._gaps, seq, key=lambda gap: gap[0]) - 1
            if at < 0 or seq > self._gaps[at][1]:
                return False
            first, last = self._gaps.pop(at)
            self.lost -= last - first + 1
            self._add_gap(at, seq + 1, last)
            self._add_gap(at, first, seq - 1)
        del self._gaps[:-_KEPT_GAPS]  # the oldest stay lost
        return True

    def _add_gap(self, at: int, first: int, last: int) -> None:
        if first <= last:
            self._gaps.insert(at, (first, last))
            self.lost += last - first + 1


@dataclass(slots=True)
class InstanceView:
    """The latest of one engine since it started.

    Attributes:
        epoch: nanoseconds since 1970 at which its publisher started.
        received: when a message last came, seconds on this machine's monotonic clock.
        seq: number of the newest message.
        step: engine steps by then.
        gauges: at the last snapshot.
        model: name of the serving model; empty before the first snapshot.
        checkpoint: fingerprint of its predictor; empty before the first snapshot.
        k: steps between two predictions; 0 before the first snapshot.
        edges: [n_edges] grid of its curves in tokens; empty before the first.
        requests: those that run and have a forecast, by id.
        snapshot_seq: number of the last snapshot; -1 before the first.
        source: connection that it is heard by; None where connections are not told apart.
    """

    epoch: int
    received: float
    source: Hashable = None
    seq: int = -1
    step: int = 0
    gauges: Gauges = field(default_factory=Gauges)
    model: str = ""
    checkpoint: str = ""
    k: int = 0
    edges: tuple[int, ...] = ()
    requests: dict[str, RunningRequest] = field(default_factory=dict)
    snapshot_seq: int = -1
    _received_seqs: _SequenceNumbers = field(default_factory=_SequenceNumbers)
    _finished: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _vanished: OrderedDict[str, RunningRequest] = field(default_factory=OrderedDict)
    _batches: deque[ForecastBatch] = field(default_factory=deque)
    _batched: int = 0

    def hand_on(self, batch: ForecastBatch) -> None:
        """Keep forecasts until they are taken; of too many the newest."""
        self._batches.append(batch)
        self._batched += len(batch.names)
        while self._batched > _KEPT_BATCHED:
            self._batched -= len(self._batches.popleft().names)

    def take_batches(self) -> Sequence[ForecastBatch]:
        """Return the forecasts kept since the last call, oldest first."""
        batches, self._batches, self._batched = self._batches, deque(), 0
        return batches


class TelemetryView:
    """What is known of all engines, from the messages in whatever order they come.

    Nothing here has a clock or a socket: the caller says what came, and when.

    Args:
        stale_after: seconds without a message after which an engine is stale.
        forget_after: seconds without a message after which it is forgotten.
        history: keep the forecasts of running requests here, to score and show them. Without it
            they are handed on by `take_batches`, once, and are kept only after `keep_history`.

    Attributes:
        instances: the latest of each engine.
        malformed: messages that are none of this schema; their numbers also count as lost.
        duplicated: messages that came before.
        outdated: messages that newer ones had overtaken: of an engine before its restart, or
            snapshots and forecasts older than the last snapshot.
        foreign: messages in the name of an engine that another connection speaks for.
        vanished: requests that a snapshot no longer had and whose end was not reported.
    """

    def __init__(
        self, stale_after: float = 3.0, forget_after: float = 300.0, history: bool = True
    ) -> None:
        self.instances: dict[InstanceKey, InstanceView] = {}
        self.malformed = self.duplicated = self.outdated = self.vanished = self.foreign = 0
        self._stale_after, self._forget_after = stale_after, forget_after
        self._lost_before = 0
        self._history, self._hands_on = history, not history

    @property
    def lost(self) -> int:
        """Messages that were numbered and never came, between the first and the last that did."""
        current = (view._received_seqs.lost for view in self.instances.values())
        return self._lost_before + sum(current)

    def take_batches(self) -> Sequence[ForecastBatch]:
        """Return the forecasts received since the last call, oldest first of each engine."""
        views = self.instances.values()
        return [batch for view in views for batch in view.take_batches()]

    def keep_history(self) -> None:
        """Keep the forecasts of running requests from now on, to score them."""
        self._history = True

    def receive(
        self,
        frames: Sequence[bytes],
        now: float,
        source: Hashable = None,
        name: str | None = None,
    ) -> list[FinishedForecasts]:
        """Take one ZMQ message; invalid messages are counted, never raised.

        Those of a ``source``, which is a connection, come in order; without one in any. At its
        other end is the engine ``name``, whatever it calls itself.

        Returns:
            The requests whose end it reports for the first time.
        """
        for key in [k for k, v in self.instances.items() if now - v.received > self._forget_after]:
            self.forget(key)
        message = _decoded(frames)
        if message is None:
            self.malformed += 1
            return []
        key = InstanceKey(message.instance if name is None else name, message.rank)
        view = self._speaking(key, message.epoch, now, source)
        if view is None:
            return []
        if not view._received_seqs.add(message.seq):
            self.duplicated += 1
            return []
        view.received = now
        if message.seq > view.seq:
            view.seq, view.step = message.seq, message.step
        if isinstance(message, Finished):
            return [
                self._finish(key, view, event)
                for event in message.requests
                if event.request_id not in view._finished
            ]
        if message.seq <= view.snapshot_seq:
            self.outdated += 1
        elif view.edges not in ((), tuple(message.edges)):
            self.malformed += 1  # a publisher has one grid
        else:
            view.edges = tuple(message.edges)
            if isinstance(message, Snapshot):
                self._take_snapshot(view, message)
            new = [one for one in message.requests if self._update(view, one, message.seq)]
            if new and self._hands_on:
                names = [view.requests[one.request_id].name for one in new]
                view.hand_on(ForecastBatch.new(key.name, view.edges, names, new))
        return []

    def forecast(self, key: InstanceKey) -> tuple[list[str], SurvivalForecast]:
        """Return the running requests of an engine, and what is expected of them by now.

        Returns:
            Ids [n_requests], and forecasts aged by the tokens since they were made.

        Raises:
            KeyError: no such engine is known.
        """
        view = self.instances[key]
        latest = [request.latest for request in view.requests.values()]
        kept = [KeptForecast(r.forecast_at, r.tokens_left, r.survival) for r in latest]
        ages = [request.generated_tokens - request.forecast_at for request in latest]
        return list(view.requests), _decoded_forecast(view.edges, kept).aged(ages)

    def is_stale(self, key: InstanceKey, now: float) -> bool:
        """Return whether an engine has not reported recently."""
        return now - self.instances[key].received > self._stale_after

    def forget(self, key: InstanceKey) -> None:
        """Drop an engine, if it is known; what it lost stays counted."""
        view = self.instances.pop(key, None)
        if view is not None:
            self._lost_before += view._received_seqs.lost

    def _speaking(
        self, key: InstanceKey, epoch: int, now: float, source: Hashable
    ) -> InstanceView | None:
        """Return the view of an engine that has sent a message; None if this one may not.

        An engine has one connection, until that has been silent. Another epoch of it is another
        life: epochs are of the engine's wall clock, which may have been set back, so that they are
        compared only where messages may come in any order.
        """
        view = self.instances.get(key)
        if view is not None and view.source == source and view.epoch == epoch:
            return view
        if view is not None and not self.is_stale(key, now):
            if view.source != source:
                self.foreign += 1
                return None
            if source is None and epoch < view.epoch:
                self.outdated += 1
                return None
        self.forget(key)
        others = [k for k, v in self.instances.items() if v.source == source is not None]
        for other in others[: max(0, len(others) + 1 - _MOST_ENGINES)]:
            self.forget(other)
        view = self.instances[key] = InstanceView(epoch, now, source)
        return view

    def _take_snapshot(self, view: InstanceView, snapshot: Snapshot) -> None:
        """Take the state of an engine, and drop what it no longer runs."""
        view.snapshot_seq = snapshot.seq
        view.gauges, view.k = snapshot.gauges, snapshot.k
        view.model, view.checkpoint = snapshot.model, snapshot.checkpoint
        reported = {request.request_id for request in snapshot.requests}
        for name, request in list(view.requests.items()):
            if name not in reported and request.seq < snapshot.seq:  # else it began afterwards
                view._vanished[name] = view.requests.pop(name)
                self.vanished += 1
        _keep_newest(view._vanished, _KEPT_VANISHED)

    def _update(self, view: InstanceView, report: RequestForecast, seq: int) -> bool:
        """Add or update a running request; return False if what is known of it is newer."""
        name = report.request_id
        if name in view._finished:
            return False
        request = view.requests.get(name)
        if request is not None:
            if seq < request.seq or report.forecast_at < request.latest.forecast_at:
                return False
        elif (request := self._come_back(view, name)) is None:
            if len(view.requests) >= _MOST_RUNNING:
                return False
            request = RunningRequest(parse_request_id(name).external_id, report, seq)
        newest = request.latest.forecast_at if request.forecasts else -1
        if self._history:
            most = min(_KEPT_FORECASTS, _KEPT_OF_ALL // max(1, len(view.requests)))
            request.keep_forecast(newest, report, most)
        if self._hands_on:
            report = msgspec.structs.replace(report, survival=b"")
        request.latest = report
        request.seq = seq
        view.requests[name] = request
        return True

    def _finish(
        self, key: InstanceKey, view: InstanceView, event: FinishedEvent
    ) -> FinishedForecasts:
        name = event.request_id
        view._finished[name] = None
        _keep_newest(view._finished, _KEPT_FINISHED)
        request = view.requests.pop(name, None) or self._come_back(view, name)
        forecasts = request.forecasts if request else []
        return FinishedForecasts(key, view.model, view.checkpoint, event, view.edges, forecasts)

    def _come_back(self, view: InstanceView, name: str) -> RunningRequest | None:
        """Take a request from those that had vanished."""
        request = view._vanished.pop(name, None)
        self.vanished -= request is not None
        return request


def _decoded(frames: Sequence[bytes]) -> Message | None:
    if len(frames) != 2 or frames[0] != TOPIC:
        return None
    try:
        return decode_message(frames[1])
    except (TelemetryError, RecursionError):  # the decoder's own of a deeply nested field
        return None


def _decoded_forecast(edges: Sequence[int], kept: Iterable[KeptForecast]) -> SurvivalForecast:
    rows = list(kept)
    if not rows:
        return SurvivalForecast.new([0, 1], np.empty((0, 2)))
    curves = decode_survival([row.survival for row in rows], len(edges))
    return SurvivalForecast.new(edges, curves, [row.tokens_left for row in rows])


def _keep_newest(
    entries: OrderedDict[str, None] | OrderedDict[str, RunningRequest], limit: int
) -> None:
    while len(entries) > limit:
        entries.popitem(last=False)  # of a plain dict the first entry is found ever more slowly
