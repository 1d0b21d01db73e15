"""Telemetry, damaged: it is counted and never raised, and the next snapshot is taken."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from fuzzing import PACKABLE, damaged_frames, fuzzed, structs
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
ODD = PACKABLE | st.sampled_from(
    [CURVE, CURVE[:-1], CURVE[::-1], b"", EDGES, EDGES[::-1], [0, 2**63]]
)
DAMAGED = damaged_frames(TOPIC, st.sampled_from(MESSAGES), ODD)

COUNTS = ("rank", "epoch", "seq", "step", "k", "running", "waiting", "kv_capacity_tokens")
COUNTS += ("prompt_tokens", "generated_tokens", "forecast_at", "tokens_left", "total_tokens")
EXTREMES = st.sampled_from(
    [0, 1, 2**16 - 1, 2**20, 2**30, 2**31, 2**40, 2**53, 2**63 - 1, 2**64 - 1]
)
SHARES = st.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 1.0, 1.5, 1e308, None])


@st.composite
def extreme_frames(draw: st.DrawFn) -> list[bytes]:
    """A message of the right shape, in any name, with numbers that no engine has."""
    edges = draw(st.sampled_from([EDGES, list(range(600)), [0, 2**53], [0, 2**64 - 1], [0]]))
    own = dict.fromkeys((*COUNTS, "max_tokens"), EXTREMES)
    own |= dict.fromkeys(("time", "kv_usage", "prefill_budget"), SHARES)
    own |= {
        "instance": st.sampled_from(["gpu0", "the next", "gpu" * 1_000]),
        "request_id": st.sampled_from([REQUEST.request_id, "x" * 1_024, "r"]),
        "edges": st.just(edges),
        "survival": st.just(b"\xff\xff" * len(edges)),
    }
    kind, within = draw(
        st.sampled_from([(Forecasts, RequestForecast), (Snapshot, RequestForecast)])
        | st.just((Finished, FinishedEvent))
    )
    times = draw(st.sampled_from([0, 1, 2, 9_000]))
    requests = [draw(structs(within, **own))] * times
    return [TOPIC, msgspec.msgpack.encode(draw(structs(kind, **own, requests=st.just(requests))))]


@fuzzed(batch=2)
@given(st.booleans(), st.lists(DAMAGED | extreme_frames(), min_size=1, max_size=8))
@example(True, [[TOPIC, b"\x81\xa4junk" + b"\x91" * 100_000]])
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
    for forecasts in view.take_batches():
        assert len(forecasts.names) == len(forecasts.survival)
    for known in view.instances if history else ():
        names, forecast = view.forecast(known)
        assert len(names) == len(forecast.mean()) and np.isfinite(forecast.mean()).all()
    for one in view.instances.values():
        assert 0 <= one.gauges.kv_usage <= 1
        assert one.gauges.prefill_budget is None or abs(one.gauges.prefill_budget) <= 2**40


def snapshot_of(instance: str, seq: int = 1) -> list[bytes]:
    """A valid snapshot of another engine."""
    message = msgspec.structs.replace(MESSAGES[1], instance=instance, seq=seq)
    return [TOPIC, encode_message(message)]


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
@given(batch=st.lists(DAMAGED, min_size=5, max_size=5))
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
