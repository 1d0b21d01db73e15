"""Forecasts inside an engine: what is configured, and their way out of a step."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from data_collection.capture.capture_config import CaptureConfig

FORECASTS_ATTRIBUTE = "headway_forecasts"
"""Name under which the worker adds a list of `EngineForecasts` to vLLM's `ModelRunnerOutput`."""

GAUGES_ATTRIBUTE = "headway_gauges"
"""Name under which the scheduler adds its `Gauges` to vLLM's `SchedulerOutput`."""

REPETITION_ATTRIBUTE = "headway_repetition"
"""Name under which the scheduler, which alone knows the tokens, adds to vLLM's `SchedulerOutput`
what `repetition` says of each request's answer."""


@dataclass(frozen=True, slots=True)
class EngineForecasts:
    """The predictions of one engine step, as a struct of arrays.

    Attributes:
        step: engine step after whose forward pass they were made.
        request_ids: [n_requests] ids inside the engine.
        prompt_tokens: [n_requests].
        generated_tokens: [n_requests] n when they were made.
        tokens_left: [n_requests] tokens to ``max_tokens`` from there.
        edges: [n_edges] the grid in tokens.
        survival: [n_requests, n_edges] the curves, recalibrated.
    """

    step: int
    request_ids: list[str]
    prompt_tokens: list[int]
    generated_tokens: list[int]
    tokens_left: list[int]
    edges: npt.NDArray[np.float64]
    survival: npt.NDArray[Any]


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
