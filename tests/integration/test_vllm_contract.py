"""Every name of vLLM's that the adapter, the worker and the scheduler read, for both runners.

When a new vLLM moves one, the failing line here says which; `vllm_adapter` is where to fix it.
The V2 runner needs Triton to be imported, so its source is read instead.
"""

import dataclasses
import inspect
from pathlib import Path

import pytest
import vllm
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import ExecuteModelState
from vllm.v1.worker.gpu_worker import Worker
from vllm_source import attributes_set_in, fields_of

from data_collection.versions import SUPPORTED_VLLM, vllm_version


def test_the_installed_version_is_the_supported_one() -> None:
    assert (vllm_version() or "").startswith(SUPPORTED_VLLM)
    assert vllm.__version__.startswith(SUPPORTED_VLLM)


@pytest.mark.parametrize(
    ("structure", "names"),
    [
        (
            SchedulerOutput,
            {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"},
        ),
        (
            NewRequestData,
            {"req_id", "num_computed_tokens", "prefill_token_ids", "sampling_params"},
        ),
        (ModelRunnerOutput, {"req_ids"}),
        (CacheConfig, {"num_gpu_blocks"}),
        (CachedRequestData, {"req_ids", "num_computed_tokens", "num_output_tokens"}),
        (VllmConfig, {"speculative_config", "additional_config", "model_config"}),
        (SchedulerConfig, {"scheduler_cls", "async_scheduling", "max_num_seqs"}),
        (ParallelConfig, {"prefill_context_parallel_size", "data_parallel_rank"}),
        (ModelConfig, {"model", "dtype", "runner"}),
    ],
)
def test_structures_have_the_fields_we_read(structure: type, names: set[str]) -> None:
    assert names <= {field.name for field in dataclasses.fields(structure)}


def test_properties_and_methods_we_read() -> None:
    assert isinstance(NewRequestData.prompt_len, property)
    assert isinstance(Request.num_output_tokens, property)
    names = {"request_id", "num_prompt_tokens", "prompt_token_ids", "sampling_params"}
    names |= {"max_tokens", "num_computed_tokens", "output_token_ids"}
    assert names <= attributes_set_in("v1.request", "Request")
    assert callable(Request.get_finished_reason)
    assert "runner_type" in attributes_set_in("config.model", "ModelConfig")
    assert callable(ModelConfig.get_hidden_size)


@pytest.mark.parametrize("structure", [SchedulerOutput, ModelRunnerOutput])
def test_outputs_take_an_extra_attribute(structure: type) -> None:
    assert not hasattr(structure, "__slots__")
    assert "slots" not in inspect.getsource(structure).split("class ")[0]


def test_what_the_gauges_read_of_the_scheduler() -> None:
    names = attributes_set_in("v1.core.sched.scheduler", "Scheduler")
    assert {"running", "waiting", "requests", "kv_cache_manager", "cache_config"} <= names
    assert "block_size" in names
    assert isinstance(KVCacheManager.usage, property)


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_scheduler_hooks(scheduler: type[Scheduler]) -> None:
    assert "request" in inspect.signature(scheduler._free_request).parameters
    assert callable(scheduler.schedule)
    parameters = inspect.signature(scheduler.update_from_output).parameters
    assert {"scheduler_output", "model_runner_output"} <= set(parameters)
    assert "vllm_config" in inspect.signature(Scheduler.__init__).parameters


def test_worker_hooks() -> None:
    assert "scheduler_output" in inspect.signature(Worker.execute_model).parameters
    for name in ("compile_or_warm_up_model", "shutdown", "load_model", "sample_tokens"):
        assert callable(getattr(Worker, name))
    assert callable(AsyncModelRunnerOutput.get_output)


def test_v1_runner_state() -> None:
    assert "hidden_states" in ExecuteModelState._fields
    assert {"execute_model_state", "query_start_loc"} <= attributes_set_in(
        "v1.worker.gpu_model_runner", "GPUModelRunner"
    )
    assert isinstance(InputBatch.req_ids, property)
    assert isinstance(InputBatch.num_reqs, property)


def test_v2_runner_state() -> None:
    state = fields_of("v1.worker.gpu.model_runner", "ExecuteModelState")
    assert {"input_batch", "hidden_states"} <= state
    batch = fields_of("v1.worker.gpu.input_batch", "InputBatch")
    assert {"req_ids", "logits_indices"} <= batch
    runner = attributes_set_in("v1.worker.gpu.model_runner", "GPUModelRunner")
    assert "execute_model_state" in runner


def test_an_engine_on_a_cpu_schedules_synchronously(smollm2: Path) -> None:
    """Whatever it is asked to. `tests/v2_engines` keeps it on for tests that depend on it."""
    config = EngineArgs(model=str(smollm2), enforce_eager=True, async_scheduling=True)
    assert config.create_engine_config().scheduler_config.async_scheduling is False
