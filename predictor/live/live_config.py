"""What the live worker reads of vLLM's ``--additional-config``, beyond capturing."""

from typing import Annotated

import msgspec

from data_collection.capture.capture_config import CaptureConfig

__all__ = ["ForecastConfig", "LiveConfig", "TelemetryConfig"]


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where forecasts are published.

    Attributes:
        bind: ZMQ endpoint that subscribers connect to. With data parallelism the port is
            raised by the rank. Empty: none.
        connect: endpoints of subscribers that bind themselves, such as a rescheduler.
        instance: name of this engine in the telemetry; host and port when empty.
        keys: folder of CURVE keys created by ``headway keys``; needed off the loopback.
        snapshot_seconds: longest time between two snapshots.
    """

    bind: str = "tcp://127.0.0.1:5557"
    connect: tuple[str, ...] = ()
    instance: str = ""
    keys: str | None = None
    snapshot_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class ForecastConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forecasts inside the engine.

    Attributes:
        checkpoint: folder or Hugging Face id of a survival model trained on this model.
        telemetry: where forecasts are published; null: only the engine's own scheduler has them.
    """

    checkpoint: str
    telemetry: TelemetryConfig | None = TelemetryConfig()


class LiveConfig(CaptureConfig, frozen=True, forbid_unknown_fields=True):
    """The ``headway`` section of ``--additional-config`` for the live worker.

    Attributes:
        forecast: predict in the engine, every k steps and at the end of every prefill.
    """

    forecast: ForecastConfig | None = None
