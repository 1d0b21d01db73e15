"""What an engine with forecasts refuses before it serves."""

from typing import Any

import pytest
import zmq

from data_collection.capture.capture_config import read_capture_config
from data_collection.capture.requests import FinishedRequest
from predictor.live.engine_forecasts import LiveConfig, TelemetryConfig
from predictor.live.telemetry_messages import (
    Finished,
    Gauges,
    Message,
    Snapshot,
    TelemetryError,
    decode_message,
)
from predictor.live.telemetry_publisher import TelemetryPublisher


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"k": 0}, r"section 'headway': .*`\$\.k`"),
        ({"k": 20, "forecasts": {}}, "forecasts.*Keys known to this worker: .*forecast"),
        ({"forecast": {}}, "checkpoint"),
        ({"forecast": {"checkpoint": "c", "telemetry": {"snapshot_seconds": 0}}}, "seconds"),
    ],
)
def test_a_section_that_means_nothing_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_capture_config({"headway": section}, LiveConfig)
    with pytest.raises(ValueError, match="no 'headway' section"):
        read_capture_config({}, LiveConfig)


def test_an_endpoint_that_another_has_is_refused() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as occupied:
        port = occupied.bind_to_random_port("tcp://127.0.0.1")
        config = TelemetryConfig(bind=f"tcp://127.0.0.1:{port}")
        with pytest.raises(TelemetryError, match=f"cannot bind tcp://127.0.0.1:{port}"):
            TelemetryPublisher(config, 0, "model", "checkpoint", 20, [0, 1], {})


def test_an_engine_that_becomes_idle_publishes_it_at_once() -> None:
    """Routers wait for what it then can take on; the next regular message is an hour away."""
    running = {"a": 3}
    config = TelemetryConfig(bind="tcp://127.0.0.1:*", snapshot_seconds=3600.0)
    publisher = TelemetryPublisher(config, 0, "model", "checkpoint", 20, [0, 1], running)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(publisher.endpoint)
        received: list[Message] = []
        for _ in range(1200):  # what is published before it is known there does not come
            running.clear()
            publisher.at_step(5, Gauges(running=0, prefill_budget=100.0))
            publisher.finished([FinishedRequest("a", "stop", 4, 2, 16, [1], [2, 3], {})])
            while len(received) < 2 and subscriber.poll(100):
                message = decode_message(subscriber.recv_multipart()[1])
                received += [message] if received or isinstance(message, Finished) else []
            if len(received) == 2:
                break
        publisher.close()
    ended, idle = received
    assert isinstance(ended, Finished) and isinstance(idle, Snapshot)
    assert idle.gauges == Gauges(running=0, prefill_budget=100.0)
