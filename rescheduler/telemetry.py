"""What running engines tell: the latest view of each, and the socket it comes through."""

import errno
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from predictor.forecast import SurvivalForecast
from predictor.live.curve_keys import apply_curve, refuse_open_endpoint
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
)

__all__ = [
    "FinishedForecasts",
    "InstanceKey",
    "InstanceView",
    "KeptForecast",
    "RunningRequest",
    "TelemetrySubscriber",
    "TelemetryView",
]

_KEPT_FORECASTS = 256
"""Forecasts kept of a running request, beyond which every second one goes."""

_KEPT_FINISHED = 20_000
_KEPT_VANISHED = 1_000
_KEPT_GAPS = 1_000
_UNTAKEN_FINISHED = 10_000
_LARGEST_MESSAGE = 64 << 20
_POLL_MS = 100


class InstanceKey(NamedTuple):
    """An engine, or one data-parallel rank of it."""

    name: str
    rank: int


class KeptForecast(NamedTuple):
    """A forecast as it was received.

    Attributes:
        forecast_at: generated tokens n when it was made.
        tokens_left: tokens to ``max_tokens`` from there.
        survival: the curve at the grid's edges, coded.
    """

    forecast_at: int
    tokens_left: int
    survival: bytes


@dataclass(frozen=True, slots=True)
class FinishedForecasts:
    """A request that ended, with the forecasts that had been received for it.

    Attributes:
        instance: where it ran.
        model: name of the serving model; empty when no snapshot had come yet.
        event: how it ended.
        edges: [n_edges] grid of the curves, in tokens; empty when no forecast had come.
        forecasts: oldest first; evenly thinned when there were more than a few hundred.
    """

    instance: InstanceKey
    model: str
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
        latest: what was told of it last.
        seq: number of the message that told it.
        forecasts: what was forecast so far, oldest first.
    """

    latest: RequestForecast
    seq: int
    forecasts: list[KeptForecast] = field(default_factory=list)
    _stride: int = 1
    _skipped: int = 0

    def tell(self, told: RequestForecast, seq: int) -> None:
        """Take what a message tells, and keep its forecast when it is a new one."""
        newest = self.latest.forecast_at if self.forecasts else -1
        self.latest, self.seq = told, seq
        if told.forecast_at <= newest:
            return
        self._skipped += 1
        if self.forecasts and self._skipped < self._stride:
            return
        self._skipped = 0
        self.forecasts.append(KeptForecast(told.forecast_at, told.tokens_left, told.survival))
        if len(self.forecasts) > _KEPT_FORECASTS:
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
        gauges: state of the engine at the last snapshot.
        model: name of the serving model; empty before the first snapshot.
        k: steps between two predictions; 0 before the first snapshot.
        edges: [n_edges] grid of its curves in tokens; empty before the first.
        requests: those that run and have a forecast, by id.
    """

    epoch: int
    received: float
    seq: int = -1
    step: int = 0
    gauges: Gauges = field(default_factory=Gauges)
    model: str = ""
    k: int = 0
    edges: tuple[int, ...] = ()
    requests: dict[str, RunningRequest] = field(default_factory=dict)
    _snapshot_seq: int = -1
    _received_seqs: _SequenceNumbers = field(default_factory=_SequenceNumbers)
    _finished: dict[str, None] = field(default_factory=dict)
    _vanished: dict[str, RunningRequest] = field(default_factory=dict)


class TelemetryView:
    """What is known of all engines, from the messages in whatever order they come.

    Nothing here has a clock or a socket: the caller says what came, and when.

    Args:
        stale_after: seconds without a message after which an engine is stale.
        forget_after: seconds without a message after which it is forgotten.

    Attributes:
        instances: the latest of each engine.
        malformed: messages that are none of this schema; their numbers also count as lost.
        duplicated: messages that came before.
        outdated: messages that newer ones had overtaken: of an engine before its restart, or
            snapshots and forecasts older than the last snapshot.
        vanished: requests that a snapshot no longer had and whose end was not told.
    """

    def __init__(self, stale_after: float = 3.0, forget_after: float = 300.0) -> None:
        self.instances: dict[InstanceKey, InstanceView] = {}
        self.malformed = self.duplicated = self.outdated = self.vanished = 0
        self._stale_after, self._forget_after = stale_after, forget_after
        self._lost_before = 0

    @property
    def lost(self) -> int:
        """Messages that were numbered and never came, between the first and the last that did."""
        current = (view._received_seqs.lost for view in self.instances.values())
        return self._lost_before + sum(current)

    def receive(self, frames: Sequence[bytes], now: float) -> list[FinishedForecasts]:
        """Take one ZMQ message; what is no telemetry is counted, never raised.

        Args:
            frames: of the message.
            now: seconds on a monotonic clock.

        Returns:
            The requests whose end it tells for the first time.
        """
        for key in [k for k, v in self.instances.items() if now - v.received > self._forget_after]:
            self.forget(key)
        message = _decoded(frames)
        if message is None:
            self.malformed += 1
            return []
        key = InstanceKey(message.instance, message.rank)
        view = self.instances.get(key)
        if view is not None and message.epoch < view.epoch:
            self.outdated += 1
            return []
        if view is None or message.epoch > view.epoch:
            self.forget(key)
            view = self.instances[key] = InstanceView(message.epoch, now)
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
        if message.seq <= view._snapshot_seq:
            self.outdated += 1
        elif view.edges not in ((), tuple(message.edges)):
            self.malformed += 1  # a publisher has one grid
        else:
            view.edges = tuple(message.edges)
            if isinstance(message, Snapshot):
                self._take_snapshot(view, message)
            for told in message.requests:
                self._tell(view, told, message.seq)
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
        """Return whether an engine has told nothing for too long."""
        return now - self.instances[key].received > self._stale_after

    def forget(self, key: InstanceKey) -> None:
        """Drop an engine, if it is known; what it lost stays counted."""
        view = self.instances.pop(key, None)
        if view is not None:
            self._lost_before += view._received_seqs.lost

    def _take_snapshot(self, view: InstanceView, snapshot: Snapshot) -> None:
        """Take the state of an engine, and drop what it no longer runs."""
        view._snapshot_seq = snapshot.seq
        view.gauges, view.model, view.k = snapshot.gauges, snapshot.model, snapshot.k
        told = {request.request_id for request in snapshot.requests}
        for name, request in list(view.requests.items()):
            if name not in told and request.seq < snapshot.seq:  # else it began afterwards
                view._vanished[name] = view.requests.pop(name)
                self.vanished += 1
        _keep_newest(view._vanished, _KEPT_VANISHED)

    def _tell(self, view: InstanceView, told: RequestForecast, seq: int) -> None:
        """Add or update a running request, unless what is known of it is newer."""
        name = told.request_id
        if name in view._finished:
            return
        request = view.requests.get(name)
        if request is None:
            request = view._vanished.pop(name, None)
            self.vanished -= request is not None
        elif seq < request.seq or told.forecast_at < request.latest.forecast_at:
            return
        if request is None:
            request = RunningRequest(told, seq)
        request.tell(told, seq)
        view.requests[name] = request

    def _finish(
        self, key: InstanceKey, view: InstanceView, event: FinishedEvent
    ) -> FinishedForecasts:
        name = event.request_id
        view._finished[name] = None
        _keep_newest(view._finished, _KEPT_FINISHED)
        request = view.requests.pop(name, None)
        if request is None and name in view._vanished:
            request = view._vanished.pop(name)
            self.vanished -= 1
        forecasts = request.forecasts if request else []
        return FinishedForecasts(key, view.model, event, view.edges, forecasts)


class TelemetrySubscriber:
    """Receives telemetry in a thread of its own.

    Args:
        connect: endpoints of engines that bind, such as ``tcp://127.0.0.1:5557``.
        bind: endpoint that engines connect to, instead.
        keys: folder made by `create_keys`; without it only the loopback is heard.
        view: where messages go; a new one when not given.

    Attributes:
        view: read it under ``lock`` only.
        lock: held while a message is applied.
        endpoints: those it connects to, or the one it bound.

    Raises:
        TelemetryError: names the endpoint that cannot be used, and why.
    """

    def __init__(
        self,
        connect: str | Sequence[str] = (),
        bind: str | None = None,
        keys: Path | str | None = None,
        view: TelemetryView | None = None,
    ) -> None:
        self.view = view or TelemetryView()
        self.lock = threading.Lock()
        self.endpoints = [bind] if bind else [connect] if isinstance(connect, str) else [*connect]
        if not self.endpoints:
            raise TelemetryError("no endpoint: telemetry needs some to connect to, or one to bind")
        for endpoint in self.endpoints:
            refuse_open_endpoint(endpoint, keys)
        self._finished: deque[FinishedForecasts] = deque(maxlen=_UNTAKEN_FINISHED)
        self._closing = threading.Event()
        self._authenticator = None
        self._context = zmq.Context()  # one context has one handler of keys
        self._socket = self._context.socket(zmq.SUB)
        try:
            self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC.partition(b"/")[0])
            self._socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
            self._socket.setsockopt(zmq.IPV6, int(any("[" in name for name in self.endpoints)))
            if keys is not None:
                self._authenticator = apply_curve(self._socket, keys, "watcher", bool(bind))
            self._open(bool(bind))
        except BaseException:
            self._close_socket()
            raise
        self._thread = threading.Thread(target=self._receive, name="telemetry", daemon=True)
        self._thread.start()

    def take_finished(self) -> list[FinishedForecasts]:
        """Return the requests that ended since the last call, at most the last 10,000."""
        with self.lock:
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def close(self) -> None:
        """Stop receiving and close the socket; the view stays."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._close_socket()

    def __enter__(self) -> "TelemetrySubscriber":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, binds: bool) -> None:
        for endpoint in self.endpoints:
            try:
                (self._socket.bind if binds else self._socket.connect)(endpoint)
            except zmq.ZMQError as error:
                raise TelemetryError(f"{endpoint}: {_why(error)}") from error
        if binds:
            last = self._socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(last, bytes)
            self.endpoints = [last.rstrip(b"\0").decode()]

    def _receive(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(_POLL_MS):
                frames = self._socket.recv_multipart()
                with self.lock:
                    self._finished.extend(self.view.receive(frames, time.monotonic()))

    def _close_socket(self) -> None:
        self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


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
    coded = np.frombuffer(b"".join(row.survival for row in rows), dtype="<u2")
    shares: npt.NDArray[np.float64] = coded.reshape(len(rows), len(edges)).astype(np.float64)
    curves = shares / shares[:, :1]  # every curve starts at 1
    return SurvivalForecast.new(edges, curves, [row.tokens_left for row in rows])


def _keep_newest(entries: dict[str, None] | dict[str, RunningRequest], limit: int) -> None:
    while len(entries) > limit:
        del entries[next(iter(entries))]


def _why(error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use: does another watcher run? Give another endpoint to bind"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine has no such address to bind"
    if error.errno == errno.EINVAL:
        return "no ZMQ endpoint; they read like tcp://127.0.0.1:5557"
    return error.strerror or str(error)
