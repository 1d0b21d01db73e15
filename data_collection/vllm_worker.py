"""The vLLM worker that captures hidden states.

Given to vLLM as ``--worker-cls data_collection.vllm_worker.HeadwayWorker``, configured by
the ``headway`` section of ``--additional-config`` (see `capture_config`).
"""

import os
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from data_collection.capture.capture_hook import CaptureHook, RowConsumer
from data_collection.capture.recorder import Recorder
from data_collection.capture.vllm_adapter import (
    FINISHED_ATTRIBUTE,
    is_recording_rank,
    note_scheduled,
    refuse_unsupported,
    step_rows,
    uses_v2_runner,
)
from data_collection.dataset.dataset_schema import Session
from data_collection.models import identify
from data_collection.versions import SUPPORTED_VLLM, vllm_version

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

__all__ = ["HeadwayWorker"]


class HeadwayWorker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker, with a capture hook after every forward pass."""

    config_type: type[CaptureConfig] = CaptureConfig
    """What the ``headway`` section of ``--additional-config`` may hold."""

    _hook: CaptureHook | None = None
    _recorder: Recorder | None = None
    _armed = True
    _engine_steps = 0
    _hook_seconds = 0.0

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        found = vllm_version() or "unknown"
        if not found.startswith(SUPPORTED_VLLM):
            raise ValueError(
                f"Headway reads the internals of vLLM {SUPPORTED_VLLM}x, this is {found}"
            )
        refuse_unsupported(vllm_config)
        self._capture = read_capture_config(vllm_config.additional_config, self.config_type)
        self._replays = self._capture.record is not None and self._capture.record.replays
        self._generated: dict[str, int] = {}
        super().__init__(vllm_config, *args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as usual, then arm the hook: warm-up steps carry no requests."""
        result = super().compile_or_warm_up_model()
        if self.is_recording_rank():
            self._hook = CaptureHook(self._capture.k, self.consumers(), self._generated)
        return result

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step, then capture the rows that are due."""
        output = super().execute_model(scheduler_output)
        self._engine_steps += 1
        if self._hook is not None and self._armed:
            started = time.thread_time()
            note_scheduled(self._hook, scheduler_output, self._replays)
            finished = getattr(scheduler_output, FINISHED_ATTRIBUTE, [])
            self._hook.step_done(*step_rows(self.model_runner), finished)
            self._hook_seconds += time.thread_time() - started
        return output

    def shutdown(self) -> None:
        """Write out what is held, then shut down as usual."""
        if self._hook is not None:
            self._hook.close()
            self._hook = None
        super().shutdown()

    def is_recording_rank(self) -> bool:
        """Whether this worker of a model-parallel group captures."""
        pp_group = get_pp_group()
        return is_recording_rank(
            get_tensor_model_parallel_rank(), pp_group.rank_in_group, pp_group.world_size
        )

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
        return status | (self._recorder.status() if self._recorder else {})

    def consumers(self) -> list[RowConsumer]:
        """Build what receives the rows; called once, after warm-up, on the recording rank."""
        consumers: list[RowConsumer] = []
        if self._capture.record is not None:
            self._recorder = Recorder(self._capture.record, self._session(self._capture))
            consumers.append(self._recorder)
        return consumers

    def _session(self, capture: CaptureConfig) -> Session:
        assert capture.record is not None
        model = self.vllm_config.model_config
        identity = identify(model.model)
        started = datetime.now(UTC)
        return Session(
            name=f"{started:%Y%m%dT%H%M%S}-{os.getpid()}",
            model=identity.name,
            revision=identity.revision,
            hidden_size=model.get_hidden_size(),
            dtype=capture.record.dtype,
            k=capture.k,
            engine=f"vLLM {vllm_version()}",
            runner="V2" if uses_v2_runner(self.model_runner) else "V1",
            headway=version("headway"),
            model_dtype=str(model.dtype).removeprefix("torch."),
            started=started.isoformat(timespec="seconds"),
        )
