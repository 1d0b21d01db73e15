"""The vLLM worker of an emulated engine.

Given to vLLM as ``--worker-cls rescheduler.emulation.vllm_worker.EmulatedWorker``, configured by
the ``headway_emulate`` section of ``--additional-config`` (see `emulate_options`).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_collection.models import identify
from data_collection.vllm_adapter.emulated_runner import computes_nothing, refuse_unemulated
from data_collection.vllm_worker import HeadwayWorker, StepForecaster
from predictor.live.telemetry_publisher import TelemetryPublisher
from rescheduler.emulation.emulate_options import read_emulate_config
from rescheduler.emulation.length_posterior import forecast_edges
from rescheduler.emulation.scripted_answers import ScriptedAnswers
from rescheduler.emulation.scripted_forecaster import ScriptedForecaster
from rescheduler.emulation.step_barrier import StepBarrier
from rescheduler.emulation.step_clock import StepClock

_IDLE_SECONDS = 0.001


class EmulatedWorker(HeadwayWorker):
    """Steps as slowly as the engine that is emulated, and answers what is scripted."""

    captures_states = False
    _clock: StepClock | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unemulated(vllm_config)
        self._emulated = read_emulate_config(vllm_config.additional_config)
        super().__init__(vllm_config, *args, **kwargs)
        if self._capture.record is not None:
            raise ValueError(
                "--additional-config, headway.record: an emulated engine has no hidden states"
            )

    def init_device(self) -> None:
        """Make a model runner that computes nothing, and its clock."""
        with computes_nothing():
            super().init_device()
        emulated = self._emulated
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        self.answers = ScriptedAnswers(emulated.lengths, vocabulary)
        self.model_runner.answers = self.answers
        log = None if emulated.log is None else Path(emulated.log)
        group = emulated.barrier
        barrier = None
        if group is not None:
            barrier = StepBarrier(Path(group.file), group.rank, group.patience_s)
        self._clock = StepClock(emulated.step_time, emulated.dilation, log, barrier)

    def make_forecaster(self, generated: dict[str, int]) -> StepForecaster | None:
        """Return what forecasts scripted answers, if anything is forecast."""
        emulated = self._emulated
        if emulated.forecast is None:
            return None
        publisher = None
        if emulated.telemetry is not None:
            publisher = TelemetryPublisher(
                emulated.telemetry,
                rank=self.vllm_config.parallel_config.data_parallel_rank,
                model=identify(self.vllm_config.model_config.model).name,
                checkpoint="emulated",
                k=self._capture.k,
                edges=[int(edge) for edge in forecast_edges(emulated.lengths)],
                generated=generated,
            )
        return ScriptedForecaster(emulated.lengths, emulated.forecast, self.answers, publisher)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Begin a step."""
        assert self._clock is not None
        if scheduler_output.total_num_scheduled_tokens:
            self._clock.begin()
            return super().execute_model(scheduler_output)
        self._clock.idle()
        output = super().execute_model(scheduler_output)
        time.sleep(_IDLE_SECONDS)  # it looks for transfers, as often as a core can
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and end the step when it is due."""
        ran = self.model_runner.execute_model_state is not None
        output = super().sample_tokens(*args, **kwargs)
        if ran and self._clock is not None:
            self._clock.end(self.model_runner.step)
        return output

    def synchronize_device(self) -> None:
        """Note that the engine is idle: vLLM waits for the device when it is paused."""
        if self._clock is not None:
            self._clock.idle()

    def step_rows(self) -> tuple[Sequence[str], Any]:
        """Return the requests of the step; nothing is read of what computes nothing."""
        rows: tuple[Sequence[str], Any] = self.model_runner.rows()
        return rows

    def shutdown(self) -> None:
        """Report how real steps compare, then shut down as usual."""
        if self._clock is not None:
            self._clock.close()
        super().shutdown()
