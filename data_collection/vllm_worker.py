"""The vLLM worker that captures hidden states, to record them and to forecast from them.

Given to vLLM as ``--worker-cls data_collection.vllm_worker.HeadwayWorker``, configured by
the ``headway`` section of ``--additional-config`` (see `capture_config`).
"""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar, Protocol

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from data_collection.capture.averaged_states import AveragedStates
from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from data_collection.capture.capture_hook import CaptureHook, Gather, RowConsumer
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import Session
from data_collection.models import identify
from data_collection.versions import vllm_version
from data_collection.vllm_adapter.logits import (
    GreedyCheck,
    processes_logits,
    refuse_changed_states,
    state_width,
)
from data_collection.vllm_adapter.steps import (
    FINISHED_ATTRIBUTE,
    capture_layer,
    compile_apart,
    is_last_stage,
    is_recording_rank,
    note_scheduled,
    step_rows,
    with_output,
)
from data_collection.vllm_adapter.support import (
    refuse_other_version,
    refuse_unsupported,
    uses_v2_runner,
)

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class StepForecaster(RowConsumer, Protocol):
    """A consumer of rows whose forecasts leave with the outputs of steps."""

    def before_step(self, step: int, scheduled: Any) -> None:
        """Take what the scheduler tells its workers with a step."""

    def attach_arrived(self, output: Any) -> None:
        """Add the forecasts that have arrived to a step's output, for the scheduler."""

    def status(self) -> dict[str, Any]:
        """Return what forecasts and telemetry cost."""


class HeadwayWorker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker, with a capture hook after every forward pass."""

    config_type: type[CaptureConfig] = CaptureConfig
    """What the ``headway`` section of ``--additional-config`` may hold."""
    captures_states: ClassVar[bool] = True
    """Whether there are hidden states: an emulated engine has none."""

    _hook: CaptureHook | None = None
    _recorder: Recorder | None = None
    _forecaster: StepForecaster | None = None
    _check: GreedyCheck | None = None
    _averages: AveragedStates | None = None
    _is_linear = False
    _makes_logits = True
    _armed = True
    _engine_steps = 0
    _hook_seconds = 0.0

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        refuse_other_version()
        refuse_unsupported("capture", vllm_config)
        self._capture = read_capture_config(vllm_config.additional_config, self.config_type)
        self._replays = self._capture.record is not None and self._capture.record.replays
        self._generated: dict[str, int] = {}
        super().__init__(vllm_config, *args, **kwargs)

    def make_forecaster(self, generated: dict[str, int]) -> StepForecaster | None:
        """Return what forecasts here, given n of every running request, kept up to date."""
        return None

    def step_rows(self) -> tuple[Sequence[str], Gather]:
        """Return the ids of the step's requests, and what copies their rows."""
        return step_rows(self.model_runner)

    def state_width(self) -> int:
        """Return d of the hidden states."""
        found = int(self.vllm_config.model_config.get_hidden_size())
        layer, _ = self.captured()
        return found if layer else state_width(self.model_runner.get_model(), found)

    def captured(self) -> tuple[int, float]:
        """Return the layer whose states are captured, and the half-life of their averages."""
        return self._capture.layer or 0, self._capture.state_half_life or 0.0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then the predictor, so that vLLM's profiling counts its memory.

        Raises:
            UnlikeStatesError: what would be captured does not make the model's logits.
            ValueError: the layer that is to be captured cannot be.
        """
        layer, half_life = self.captured() if self.captures_states else (0, 0.0)
        config, is_last_layer = self.vllm_config, self.captures_states and not layer
        self._makes_logits = is_last_layer and not half_life
        if layer:
            compile_apart(config, layer)
        super().load_model(*args, **kwargs)
        if is_recording_rank():
            self._forecaster = self.make_forecaster(self._generated)
        if layer:
            capture_layer(self.model_runner, layer)
        if half_life and is_recording_rank():
            most = 2 * config.scheduler_config.max_num_seqs  # and some that are preempted
            self._averages = AveragedStates(half_life, self.state_width(), self.device, most)
        if is_last_layer and is_last_stage() and config.lora_config is None:
            model, name = self.model_runner.get_model(), config.model_config.model
            width, dtype = self.state_width(), config.model_config.dtype
            refuse_changed_states(model, name, width, self.device, dtype)
            self._is_linear = True

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as usual, then arm the hook: warm-up steps carry no requests."""
        result = super().compile_or_warm_up_model()
        if is_recording_rank():
            if self._capture.record is not None:
                self._recorder = Recorder(self._capture.record, self._session())
            consumers: tuple[RowConsumer | None, ...] = (self._recorder, self._forecaster)
            present = [consumer for consumer in consumers if consumer is not None]
            config = self.vllm_config.model_config
            if present and self._makes_logits and not processes_logits(config):
                model, cadence = self.model_runner.get_model(), present[0].cadence
                alone = self.vllm_config.parallel_config.tensor_parallel_size == 1
                self._check = GreedyCheck(model, config.model, cadence, self._is_linear, alone)
                present.append(self._check)
            k, averages = self._capture.k, self._averages
            self._hook = CaptureHook(k, present, self._generated, averages)
        return result

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step, then capture the rows that are due."""
        if self._forecaster is not None:
            self._forecaster.before_step(self._engine_steps + 1, scheduler_output)
        output = super().execute_model(scheduler_output)
        self._engine_steps += 1
        if self._hook is not None and self._armed:
            started = time.thread_time()
            note_scheduled(self._hook, scheduler_output, self._replays)
            if self._check is not None:
                self._check.note(scheduler_output.scheduled_new_reqs)
            finished = getattr(scheduler_output, FINISHED_ATTRIBUTE, [])
            self._hook.step_done(*self.step_rows(), finished)
            self._hook_seconds += time.thread_time() - started
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as usual and attach the forecasts that have arrived to the output."""
        output = super().sample_tokens(*args, **kwargs)
        rows = None if self._check is None else self._check.take()
        if self._check is not None and rows is not None:
            output = with_output(output, partial(self._check.compare, rows))
        if self._forecaster is None:
            return output
        return with_output(output, self._forecaster.attach_arrived)

    def shutdown(self) -> None:
        """Write out what is held, then shut down as usual."""
        if self._hook is not None:
            self._hook.close()
            self._hook = None
        super().shutdown()

    def headway_arm(self, armed: bool) -> None:
        """Switch capture off and on between requests, to measure what it costs."""
        self._armed = armed

    def headway_status(self) -> dict[str, Any]:
        """Return what has been captured; called by name through `collective_rpc`."""
        status: dict[str, Any] = {
            "recording": self._recorder is not None,
            "engine_steps": self._engine_steps,
            "hook_seconds": self._hook_seconds,
            "process_seconds": time.process_time(),
            "cudagraph_mode": self.vllm_config.compilation_config.cudagraph_mode.name,
        }
        if self._check is not None:
            status["greedy_tokens_compared"] = self._check.compared
        for reporting in (self._recorder, self._forecaster):
            status |= reporting.status() if reporting is not None else {}
        return status

    def _session(self) -> Session:
        capture = self._capture
        assert capture.record is not None
        model = self.vllm_config.model_config
        identity = identify(model.model)
        layer, half_life = self.captured()
        started = datetime.now(UTC)
        return Session(
            name=f"{started:%Y%m%dT%H%M%S}-{os.getpid()}",
            model=identity.name,
            revision=identity.revision,
            hidden_size=self.state_width(),
            dtype=capture.record.dtype,
            k=capture.k,
            engine=f"vLLM {vllm_version()}",
            runner="V2" if uses_v2_runner(self.model_runner) else "V1",
            headway=version("headway"),
            model_dtype=str(model.dtype).removeprefix("torch."),
            started=started.isoformat(timespec="seconds"),
            layer=str(layer or "last"),
            normalisation="none" if layer else Session.normalisation,
            state_half_life=half_life,
        )
