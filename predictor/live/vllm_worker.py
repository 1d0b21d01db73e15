"""The vLLM worker that forecasts its requests.

Given to vLLM as ``--worker-cls predictor.live.vllm_worker.LiveHeadwayWorker``, configured by
the ``headway`` section of ``--additional-config`` (see `live_config`).
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from data_collection.capture.capture_hook import RowConsumer
from data_collection.models import identify
from data_collection.vllm_worker import HeadwayWorker
from predictor.live.engine_forecasts import (
    FORECASTS_ATTRIBUTE,
    GAUGES_ATTRIBUTE,
    REPETITION_ATTRIBUTE,
    ForecastConfig,
    LiveConfig,
)
from predictor.live.forecaster import Forecaster
from predictor.live.telemetry_publisher import TelemetryPublisher
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import CheckpointError, ModelMismatchError
from predictor.models.survival_mlp import SurvivalMLP

__all__ = ["LiveHeadwayWorker"]


class LiveHeadwayWorker(HeadwayWorker):
    """A capturing worker that also predicts, for its scheduler and for subscribers."""

    config_type = LiveConfig
    _forecaster: Forecaster | None = None
    _publisher: TelemetryPublisher | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then the predictor, so that vLLM's profiling counts its memory."""
        super().load_model(*args, **kwargs)
        assert isinstance(self._capture, LiveConfig)
        if self._capture.forecast is not None and self.is_recording_rank():
            self._forecaster = self._load_forecaster(self._capture.forecast)

    def consumers(self) -> list[RowConsumer]:
        """Build what receives the rows: the recorder, if any, and the forecaster."""
        forecaster = [self._forecaster] if self._forecaster is not None else []
        return [*super().consumers(), *forecaster]

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step, capture and forecast."""
        if self._publisher is not None:
            gauges = getattr(scheduler_output, GAUGES_ATTRIBUTE, None)
            self._publisher.at_step(self._engine_steps + 1, gauges)
        if self._forecaster is not None:
            self._forecaster.note_repetition(getattr(scheduler_output, REPETITION_ATTRIBUTE, {}))
        return super().execute_model(scheduler_output)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as usual and attach the forecasts that have arrived to the output."""
        output = super().sample_tokens(*args, **kwargs)
        if self._forecaster is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _WithForecasts(output, self._forecaster)
        _attach(output, self._forecaster)
        return output

    def headway_status(self) -> dict[str, Any]:
        """Return what has been captured, and what forecasts and telemetry cost."""
        publisher, forecaster = self._publisher, self._forecaster
        return super().headway_status() | {
            "handing_on_seconds": forecaster.handing_on_seconds if forecaster else 0.0,
            "telemetry_endpoint": publisher.endpoint if publisher else None,
            "telemetry_seconds": publisher.thread_seconds if publisher else 0.0,
        }

    def _load_forecaster(self, config: ForecastConfig) -> Forecaster:
        """Load the checkpoint and refuse another model's.

        Raises:
            CheckpointError: it is none, or no survival model.
            ModelMismatchError: it was trained on another model's hidden states.
            TelemetryError: the telemetry's endpoint cannot be used.
        """
        predictor = load_predictor(config.checkpoint)
        if not isinstance(predictor, SurvivalMLP):
            raise CheckpointError(
                f"{config.checkpoint} holds a {predictor.kind} model; the engine forecasts with "
                "a survival model: train one with configs/predictor/survival.yaml"
            )
        model = self.vllm_config.model_config
        identity = identify(model.model)
        mine = (predictor.serving_model, predictor.model_revision, predictor.hidden_size)
        served = (identity.name, identity.revision, model.get_hidden_size())
        if mine != served:
            raise ModelMismatchError(
                f"{config.checkpoint} was trained on hidden states of {mine[0]} (revision "
                f"{mine[1]}, d = {mine[2]}); this engine serves {served[0]} (revision "
                f"{served[1]}, d = {served[2]}). Train one with `headway train fit`"
            )
        if config.telemetry is not None:
            self._publisher = TelemetryPublisher(
                config.telemetry,
                rank=self.vllm_config.parallel_config.data_parallel_rank,
                model=identity.name,
                checkpoint=predictor.fingerprint(),
                k=self._capture.k,
                edges=[int(edge) for edge in predictor.edges.tolist()],
                generated=self._generated,
            )
        scheduler = self.vllm_config.scheduler_config
        return Forecaster(predictor, self.device, scheduler.max_num_seqs, self._publisher)


class _WithForecasts(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An output that is still on its way, with the forecasts that arrived by then."""

    def __init__(self, output: AsyncModelRunnerOutput, forecaster: Forecaster) -> None:
        self._output = output
        self._forecaster = forecaster

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the output and attach."""
        output = self._output.get_output()
        _attach(output, self._forecaster)
        return output


def _attach(output: ModelRunnerOutput | None, forecaster: Forecaster) -> None:
    """Attach to an output of this step; vLLM's shared empty one stays as it is."""
    if output is not None and output.req_ids:
        arrived = forecaster.take_arrived()
        if arrived:
            setattr(output, FORECASTS_ATTRIBUTE, arrived)
