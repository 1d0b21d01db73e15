"""The socket that engines' telemetry comes through."""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import zmq

from predictor.live.curve_keys import apply_curve, refuse_open_endpoint
from predictor.live.telemetry_messages import TOPIC, TelemetryError
from rescheduler.telemetry.forecast_batch import ForecastBatch
from rescheduler.telemetry.telemetry_view import FinishedForecasts, TelemetryView
from rescheduler.transfer.lost_peers import notice_lost_peers

logger = logging.getLogger(__name__)

__all__ = ["TelemetrySubscriber"]

_UNTAKEN_FINISHED = 10_000
_LARGEST_MESSAGE = 64 << 20
_POLL_MS = 100


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
            raise TelemetryError("no endpoint: give some to connect to, or one to bind")
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
            notice_lost_peers(self._socket)
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

    def take_forecasts(self) -> Sequence[ForecastBatch]:
        """Return the forecasts since the last call, oldest first; needs a view without history."""
        with self.lock:
            return self.view.take_batches()

    def keep_history(self, keep: bool) -> None:
        """Keep the forecasts of running requests from now on, or no longer.

        Requests that have ended without are dropped.
        """
        with self.lock:
            self.view.keep_history(keep)
            self._finished.clear()

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
                    try:
                        self._finished.extend(self.view.receive(frames, time.monotonic()))
                    except Exception:  # no message may end the thread
                        logger.exception("a telemetry message failed")

    def _close_socket(self) -> None:
        self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _why(error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use: does another watcher run? Give another endpoint to bind"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine has no such address to bind"
    if error.errno == errno.EINVAL:
        return "not a ZMQ endpoint; expected something like tcp://127.0.0.1:5557"
    return error.strerror or str(error)
