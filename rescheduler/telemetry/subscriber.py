"""The socket that engines' telemetry comes through, and the first that is heard of an engine."""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from predictor.live.telemetry_messages import LARGEST_MESSAGE, TOPIC, TelemetryError
from predictor.live.zmq_sockets import (
    apply_curve,
    bind_socket,
    connect_socket,
    notice_lost_peers,
    refuse_open_endpoint,
)
from rescheduler.telemetry.telemetry_view import FinishedForecasts, ForecastBatch, TelemetryView

logger = logging.getLogger(__name__)


_UNTAKEN_FINISHED = 10_000
_KEPT_MESSAGES = 64
_POLL_MS = 100

_SLOW_SECONDS = 0.002
_REST = 9.0
"""A connection whose message took long to read is not read for this many times as long."""


class TelemetrySubscriber:
    """Receives telemetry in a thread of its own.

    Each endpoint is a connection of its own, by which its engine is known: what one engine says
    in the name of another is not heard. One that sends more than can be read in time waits for
    that itself, and none behind it.

    Args:
        connect: endpoints of engines that bind, such as ``tcp://127.0.0.1:5557``; a mapping also
            names the engine of each.
        bind: endpoint that engines connect to, instead.
        keys: folder made by `create_keys`; without it only the loopback is heard.

    Attributes:
        view: read it under ``lock`` only.
        lock: held while a message is applied.
        endpoints: those it connects to, or the one it bound.

    Raises:
        TelemetryError: names the endpoint that cannot be used, and why.
    """

    def __init__(
        self,
        connect: str | Sequence[str] | Mapping[str, str] = (),
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
        self._authenticator: ThreadAuthenticator | None = None
        self._names = dict(connect) if isinstance(connect, Mapping) else {}
        self._context = zmq.Context()  # one context has one handler of keys
        self._sockets: dict[zmq.Socket[bytes], str] = {}
        self._binds = bool(bind)
        try:
            for i, endpoint in enumerate(self.endpoints):
                self.endpoints[i] = self._open(endpoint, keys)
        except BaseException:
            self._close_sockets()
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

    def heard(self, name: str) -> float | None:
        """Return when an engine's last message came, in seconds on the monotonic clock."""
        with self.lock:
            instances = self.view.instances.items()
            times = [view.received for key, view in instances if key.name == name]
        return max(times, default=None)

    def keep_history(self) -> None:
        """Keep the forecasts of running requests from now on; drop requests that ended without."""
        with self.lock:
            self.view.keep_history()
            self._finished.clear()

    def close(self) -> None:
        """Stop receiving and close the sockets; the view stays."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._close_sockets()

    def __enter__(self) -> "TelemetrySubscriber":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, endpoint: str, keys: Path | str | None) -> str:
        """Open a socket; return its endpoint, with the port that it got."""
        socket = self._context.socket(zmq.SUB)
        self._sockets[socket] = endpoint
        self._authenticator = open_subscription(socket, endpoint, keys, self._binds)
        if not self._binds:
            return endpoint
        last = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        return last.rstrip(b"\0").decode()

    def _receive(self) -> None:
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        resting: dict[zmq.Socket[bytes], float] = {}
        while not self._closing.is_set():
            for socket, _ in poller.poll(5 if resting else _POLL_MS):
                took = self._receive_one(socket)
                if took > _SLOW_SECONDS:
                    poller.unregister(socket)
                    resting[socket] = time.monotonic() + _REST * took
            for socket in [one for one, until in resting.items() if until < time.monotonic()]:
                del resting[socket]
                poller.register(socket, zmq.POLLIN)

    def _receive_one(self, socket: "zmq.Socket[bytes]") -> float:
        """Take a message; return for how many seconds this thread computed."""
        began, endpoint = time.thread_time(), self._sockets[socket]
        frames = socket.recv_multipart(copy=False)
        with self.lock:
            try:
                source = (endpoint, frames[0].get(zmq.SRCFD)) if self._binds else endpoint
                finished = self.view.receive(
                    [frame.bytes for frame in frames],
                    time.monotonic(),
                    source,
                    self._names.get(endpoint),
                )
                self._finished.extend(finished)
            except Exception:  # no message may end the thread
                logger.exception("a telemetry message failed")
        return time.thread_time() - began

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def open_subscription(
    socket: "zmq.Socket[bytes]", endpoint: str, keys: Path | str | None, binds: bool = False
) -> ThreadAuthenticator | None:
    """Subscribe a socket to telemetry, and connect or bind it.

    Returns:
        The handler of keys, where it binds with some.

    Raises:
        TelemetryError: names the endpoint that cannot be used, and why.
    """
    socket.setsockopt(zmq.SUBSCRIBE, TOPIC.partition(b"/")[0])
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    socket.setsockopt(zmq.RCVHWM, _KEPT_MESSAGES)
    notice_lost_peers(socket)
    authenticator = None
    if keys is not None:
        authenticator = apply_curve(socket, keys, "watcher", binds)
    try:
        (bind_socket if binds else connect_socket)(socket, endpoint)
    except zmq.ZMQError as error:
        if authenticator is not None:
            socket.close(linger=0)
            authenticator.stop()
        why = _WHY.get(error.errno or 0) or error.strerror or error
        raise TelemetryError(f"{endpoint}: {why}") from error
    return authenticator


_WHY = {
    errno.EADDRINUSE: "the port is in use: does another subscriber run? Bind another endpoint",
    errno.EADDRNOTAVAIL: "this machine has no such address to bind",
    errno.ENODEV: "this machine has no such address to bind",
    errno.EINVAL: "not a ZMQ endpoint; expected something like tcp://127.0.0.1:5557",
}


_PATIENCE = 10.0
_LOOK_MS = 50


def first_snapshot(
    endpoint: str, keys: Path | str | None = None, seconds: float = _PATIENCE
) -> TelemetryView:
    """Return what an engine publishes, as soon as it has said what runs.

    Args:
        endpoint: that it binds.
        keys: folder made by `create_keys`; without it only the loopback is heard.
        seconds: after which it is given up.

    Raises:
        TelemetryError: says why nothing is heard.
    """
    if "://" not in endpoint:
        raise TelemetryError(f"{endpoint}: not a ZMQ endpoint; expected tcp://HOST:PORT")
    refuse_open_endpoint(endpoint, keys)
    view, events, deadline = TelemetryView(), set[int](), time.monotonic() + seconds
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(closing(context.socket(zmq.SUB)))
        monitor = stack.enter_context(closing(socket.get_monitor_socket()))
        stack.callback(socket.disable_monitor)
        open_subscription(socket, endpoint, keys)
        while time.monotonic() < deadline:
            if socket.poll(_LOOK_MS):
                view.receive(socket.recv_multipart(), time.monotonic())
            if any(instance.snapshot_seq >= 0 for instance in view.instances.values()):
                return view
            events.update(_events(monitor))
    raise TelemetryError(f"{endpoint}: {_why(events, view, keys, seconds)}")


def _events(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    while monitor.poll(0):
        yield parse_monitor_message(monitor.recv_multipart())["event"]


def _why(events: set[int], view: TelemetryView, keys: Path | str | None, seconds: float) -> str:
    if zmq.Event.CONNECTED not in events:
        return (
            "nothing listens there. Does the engine run, and is this its forecast.telemetry.bind?"
        )
    if zmq.Event.HANDSHAKE_SUCCEEDED not in events:
        if keys is None:
            return "this is no telemetry endpoint, or one with keys: give their folder as --keys"
        return f"the keys in {keys} are not those of the engine, or this is no telemetry endpoint"
    if view.malformed:
        return "the engine's version of Headway is another: its messages cannot be read"
    return (
        f"connected, but no snapshot came within {seconds:g} s. "
        "Is this the engine's forecast.telemetry.bind?"
    )
