"""The first that is heard of an engine, or why nothing is."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from predictor.live.telemetry_messages import TelemetryError
from predictor.live.zmq_sockets import refuse_open_endpoint
from rescheduler.telemetry.subscriber import open_subscription
from rescheduler.telemetry.telemetry_view import TelemetryView

_PATIENCE = 10.0
_POLL_MS = 50


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
            if socket.poll(_POLL_MS):
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
