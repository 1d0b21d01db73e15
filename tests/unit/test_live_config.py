"""What an engine with forecasts refuses before it serves."""

from typing import Any

import pytest
import zmq

from data_collection.capture_config import read_capture_config
from predictor.live.live_config import LiveConfig, TelemetryConfig
from predictor.live.telemetry_messages import TelemetryError
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
