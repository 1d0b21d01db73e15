"""Telemetry, damaged: it is counted and never raised, and the next snapshot is taken."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from damage import ODD_VALUES, changed, damaged_bytes
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st

from predictor.live.telemetry_messages import (
    TOPIC,
    Finished,
    FinishedEvent,
    Forecasts,
    Gauges,
    Message,
    RequestForecast,
    Snapshot,
    encode_message,
    encode_survival,
)
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import InstanceKey, TelemetryView

EDGES = [0, 1, 5, 20, 100]
CURVE = encode_survival(np.exp(-np.array(EDGES) / 30.0)[None])[0]
REQUEST = RequestForecast("cmpl-a-0-0123abcd", 7, 20, 20, 400, CURVE)
HEADER: dict[str, Any] = {"instance": "gpu0", "rank": 0, "epoch": 5, "step": 3, "time": 1.5}
MESSAGES: list[Message] = [
    Forecasts(**HEADER, seq=0, edges=EDGES, requests=[REQUEST]),
    Snapshot(
        **HEADER,
        seq=1,
        gauges=Gauges(1, 2, 0.25, 1_000, 512.0),
        model="acme/small",
        checkpoint="0123456789ab",
        k=20,
        edges=EDGES,
        requests=[REQUEST],
    ),
    Finished(**HEADER, seq=2, requests=[FinishedEvent(REQUEST.request_id, "stop", 7, 60, 400)]),
]
PACKABLE = (
    ODD_VALUES.filter(lambda value: not isinstance(value, int) or -(2**63) <= value < 2**64)
    | st.sampled_from([CURVE, CURVE[:-1], CURVE[::-1], b"", EDGES, EDGES[::-1], [0, 2**63]])
    | st.binary(max_size=10)
    | st.datetimes()
)


@st.composite
def damaged_frames(draw: st.DrawFn) -> list[bytes]:
    """The frames of a message, which may be none."""
    message = draw(st.sampled_from(MESSAGES))
    payload = draw(
        st.one_of(
            changed(msgspec.msgpack.decode(encode_message(message)), PACKABLE).map(
                msgspec.msgpack.encode
            ),
            damaged_bytes(encode_message(message)),
            st.binary(max_size=60),
        )
    )
    frames = st.just([TOPIC, payload]) | st.lists(st.binary(max_size=30), max_size=4)
    return draw(frames | st.just([TOPIC + b"0", payload]) | st.just([TOPIC, payload, b""]))


EXTREMES = st.sampled_from(
    [0, 1, 2**16 - 1, 2**20, 2**30, 2**31, 2**40, 2**53, 2**63 - 1, 2**64 - 1]
)
SHARES = st.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 1.0, 1.5, 1e308, None])


@st.composite
def extreme_frames(draw: st.DrawFn) -> list[bytes]:
    """A message of the right shape, in any name, with numbers that no engine has."""
    name = draw(st.sampled_from(["gpu0", "the next", "gpu" * 1_000]))
    header = {"instance": name, "rank": draw(EXTREMES), "epoch": draw(EXTREMES)}
    header |= {"seq": draw(EXTREMES), "step": draw(EXTREMES), "time": draw(SHARES)}
    edges = draw(st.sampled_from([EDGES, list(range(600)), [0, 2**53], [0, 2**64 - 1], [0]]))
    curve = np.full(len(edges), 65_535, dtype="<u2").tobytes()
    name = draw(st.sampled_from([REQUEST.request_id, "x" * 1_024, "r"]))
    request = [name, *(draw(EXTREMES) for _ in range(4)), curve]
    requests = [request] * draw(st.sampled_from([0, 1, 2, 9_000]))
    gauges = [draw(EXTREMES), draw(EXTREMES), draw(SHARES), draw(EXTREMES), draw(SHARES)]
    kinds = {
        "forecasts": {"edges": edges, "requests": requests},
        "snapshot": {
            "edges": edges,
            "requests": requests,
            "gauges": gauges,
            "model": "m",
            "checkpoint": "c",
            "k": draw(EXTREMES),
        },
        "finished": {"requests": [[name, "stop", *(draw(EXTREMES) for _ in range(3))]]},
    }
    kind = draw(st.sampled_from(sorted(kinds)))
    return [TOPIC, msgspec.msgpack.encode({"type": kind, **header, **kinds[kind]})]


@fuzzed(batch=4)
@given(st.booleans(), st.lists(damaged_frames() | extreme_frames(), min_size=1, max_size=8))
def test_a_connection_says_what_it_will_and_another_engine_is_heard(
    history: bool, batch: list[list[bytes]]
) -> None:
    view, now = TelemetryView(history=history), 0.0
    key = InstanceKey("the next", 0)
    view.receive(snapshot_of("x", 0), now, "honest", "the next")
    for seq, frames in enumerate(batch, start=1):
        now += 0.5
        for finished in view.receive(frames, now, "lying"):
            finished.forecast().median()
        view.receive(snapshot_of("x", seq), now, "honest", "the next")
        assert view.instances[key].received == now
        assert set(view.instances[key].requests) == {REQUEST.request_id}
    assert all(len(one.edges) <= 512 for one in view.instances.values())
    for known in view.instances if history else ():
        mean = view.forecast(known)[1].mean()
        assert np.isfinite(mean).all()
    for one in view.instances.values():
        assert 0 <= one.gauges.kv_usage <= 1
        assert one.gauges.prefill_budget is None or abs(one.gauges.prefill_budget) <= 2**40


def snapshot_of(instance: str, seq: int = 1) -> list[bytes]:
    """A valid snapshot of another engine."""
    message = msgspec.structs.replace(MESSAGES[1], instance=instance, seq=seq)
    return [TOPIC, encode_message(message)]


@fuzzed()
@given(st.booleans(), st.lists(damaged_frames(), min_size=1, max_size=4))
@example(True, [[TOPIC, b"\x81\xa4junk" + b"\x91" * 100_000]])
def test_a_view_takes_the_next_snapshot_whatever_came_before(
    history: bool, batch: list[list[bytes]]
) -> None:
    view = TelemetryView(history=history)
    for frames in batch:
        for finished in view.receive(frames, 0.0):
            finished.forecast().median()
    view.receive(snapshot_of("the next"), 1.0)
    assert set(view.instances[InstanceKey("the next", 0)].requests) == {REQUEST.request_id}
    for forecasts in view.take_batches():
        assert len(forecasts.names) == len(forecasts.survival)
    for key in view.instances if history else ():
        names, forecast = view.forecast(key)
        assert len(names) == len(forecast.mean())


@pytest.fixture(scope="module")
def subscriber() -> Iterator[tuple[TelemetrySubscriber, zmq.Socket[bytes]]]:
    """A subscriber, and the socket of an engine that it hears."""
    with (
        TelemetrySubscriber(
            bind="tcp://127.0.0.1:*", view=TelemetryView(history=False)
        ) as telemetry,
        zmq.Context() as context,
        context.socket(zmq.PUB) as engine,
    ):
        engine.linger = 0
        engine.connect(telemetry.endpoints[0])
        hears(telemetry, engine, "the first")
        yield telemetry, engine


def hears(telemetry: TelemetrySubscriber, engine: zmq.Socket[bytes], name: str) -> bool:
    """Return whether a subscriber takes a valid snapshot, which is sent until it does."""
    key, deadline, seq = InstanceKey(name, 0), time.monotonic() + 120, 0
    while time.monotonic() < deadline:
        engine.send_multipart(snapshot_of(name, seq))
        seq += 1
        for _ in range(100):
            with telemetry.lock:
                if telemetry.view.instances.pop(key, None) is not None:
                    return True
            time.sleep(0.0005)
    return False


@fuzzed(batch=5)
@given(batch=st.lists(damaged_frames(), min_size=5, max_size=5))
def test_a_subscriber_hears_the_next_snapshot_whatever_came_before(
    subscriber: tuple[TelemetrySubscriber, zmq.Socket[bytes]],
    batch: list[list[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry, engine = subscriber
    for frames in batch:
        engine.send_multipart(frames or [b""])
    assert hears(telemetry, engine, "the next")
    forecasts = LiveForecasts(telemetry)
    forecasts.refresh()
    assert len(forecasts.forecast([])) == 0
    assert not caplog.records
