"""Every name of vLLM's and NIXL's that Headway reads, changes or overrides, for both runners.

When a new version moves one, the failing line here says which; `data_collection/vllm_adapter` and
the worker, the scheduler and the connector on it are where to fix it. The V2 runner needs Triton to
be imported, so its source is read instead.
"""

import inspect
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm_source import attributes_set_in, fields_of

from data_collection.versions import is_supported_vllm, vllm_release, vllm_version
from data_collection.vllm_adapter import requests, steps
from data_collection.vllm_adapter.support import TELLS_CUT_CALLS
from data_collection.vllm_scheduler import HeadwayScheduler
from data_collection.vllm_worker import HeadwayWorker
from rescheduler.transfer.vllm_connector import KeepingWorker, MigratingScheduler, NixlConnector

SINCE = vllm_release()
SET_ASIDE = "kv_holding_waiting deferred_waiting" if SINCE >= (0, 31) else "skipped_waiting"
TRANSFERS = "transfer_tp_size" if SINCE >= (0, 30) else "vllm_config"
NIXL = "distributed.kv_transfer.kv_connector.v1.nixl"


def test_the_installed_version_is_the_supported_one() -> None:
    assert is_supported_vllm(vllm_version() or "")
    assert is_supported_vllm(vllm.__version__)
    assert vllm_release() == tuple(map(int, vllm.__version__.split(".")[:2]))


@pytest.mark.parametrize(
    "ours",
    [
        *(steps._Attaching, HeadwayScheduler, HeadwayWorker, NixlConnector),
        *(KeepingWorker, MigratingScheduler),
    ],
)
def test_our_classes_lack_no_method(ours: type) -> None:
    assert not inspect.isabstract(ours)


@pytest.mark.parametrize(
    ("structure", "names"),
    [
        (CacheConfig, "num_gpu_blocks mamba_cache_mode"),
        (KVCacheBlock, "block_id is_null"),
        (KVCacheGroupSpec, "kv_cache_spec"),
        (SlidingWindowSpec, "sliding_window block_size"),
        (CachedRequestData, "req_ids num_computed_tokens num_output_tokens"),
        (CachedRequestState, "output_token_ids generator"),
        (EngineCoreOutput, "request_id new_token_ids new_logprobs finish_reason stop_reason"),
        (EngineCoreOutput, "events trace_headers"),
        (EngineCoreOutputs, "outputs"),
        (ExecuteModelState, "hidden_states aux_hidden_states"),
        (ModelConfig, "model dtype runner"),
        (ModelRunnerOutput, "req_ids"),
        (NewRequestData, "req_id num_computed_tokens prefill_token_ids sampling_params"),
        (ParallelConfig, "pipeline_parallel_size prefill_context_parallel_size"),
        (SupportsEagle3, "supports_eagle3"),
        (ParallelConfig, "decode_context_parallel_size data_parallel_rank data_parallel_index"),
        (SamplingParams, "extra_args output_kind logprobs seed min_tokens max_tokens"),
        (SchedulerConfig, "scheduler_cls async_scheduling policy max_num_seqs"),
        (SchedulerOutput, "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens"),
        (SchedulerOutput, "total_num_scheduled_tokens kv_connector_metadata"),
        (StructuredOutputRequest, "reasoner"),
        (VllmConfig, "speculative_config additional_config model_config"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_structures_have_the_fields_we_read(structure: type, names: str) -> None:
    fields = {name for kind in structure.__mro__ for name in getattr(kind, "__annotations__", ())}
    assert set(names.split()) <= fields


@pytest.mark.parametrize(
    ("module", "kind", "names"),
    [
        ("config.model", "ModelConfig", "runner_type hf_text_config"),
        ("v1.core.kv_cache_manager", "KVCacheManager", "block_pool enable_caching"),
        ("v1.core.block_pool", "BlockPool", "num_gpu_blocks null_block"),
        ("v1.core.sched.scheduler", "Scheduler", "kv_cache_config"),
        ("v1.core.kv_cache_manager", "KVCacheManager", "coordinator"),
        ("v1.core.kv_cache_coordinator", "KVCacheCoordinator", "single_type_managers"),
        (
            "v1.core.single_type_kv_cache_manager",
            "SlidingWindowManager",
            "extra_retained_tokens sliding_window",
        ),
        ("v1.request", "Request", "request_id arrival_time status client_index sampling_params"),
        ("v1.request", "Request", "num_prompt_tokens num_computed_tokens num_output_placeholders"),
        ("v1.request", "Request", "num_in_flight_tokens num_preemptions is_prefill_chunk"),
        ("v1.request", "Request", "num_stale_output_tokens drop_stale_output max_tokens"),
        ("v1.request", "Request", "prompt_token_ids output_token_ids _output_token_ids"),
        ("v1.request", "Request", "structured_output_request kv_transfer_params all_token_ids"),
        ("v1.core.sched.scheduler", "Scheduler", "running waiting requests vllm_config"),
        ("v1.core.sched.scheduler", "Scheduler", SET_ASIDE),
        ("v1.core.sched.scheduler", "Scheduler", "max_num_running_reqs max_num_scheduled_tokens"),
        ("v1.core.sched.scheduler", "Scheduler", "num_waiting_for_streaming_input max_model_len"),
        ("v1.core.sched.scheduler", "Scheduler", "finished_recving_kv_req_ids block_size"),
        ("v1.core.sched.scheduler", "Scheduler", "kv_cache_manager cache_config"),
        ("v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model_state query_start_loc"),
        ("v1.worker.gpu_model_runner", "GPUModelRunner", "use_aux_hidden_state_outputs"),
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "execute_model_state"),
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "use_aux_hidden_state_outputs"),
        (f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler", "_reqs_need_send block_size"),
        (f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler", "_reqs_in_batch engine_id"),
        (f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler", "_reqs_not_processed"),
        (f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler", "_kv_lease_duration"),
        (f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler", "side_channel_host"),
        (f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler", "side_channel_port"),
        (f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler", TRANSFERS),
        (f"{NIXL}.base_worker", "NixlBaseConnectorWorker", "_bidirectional_kv_xfer_enabled"),
        (f"{NIXL}.base_worker", "NixlBaseConnectorWorker", "_reqs_to_send _reqs_to_process"),
    ],
)
def test_objects_have_the_attributes_we_use(module: str, kind: str, names: str) -> None:
    assert set(names.split()) <= attributes_set_in(module, kind)


def test_the_v2_runner_s_batch_is_where_we_read_it() -> None:
    state = fields_of("v1.worker.gpu.model_runner", "ExecuteModelState")
    assert {"input_batch", "hidden_states", "aux_hidden_states"} <= state
    batch = fields_of("v1.worker.gpu.input_batch", "InputBatch")
    assert {"req_ids", "logits_indices"} <= batch


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (GroupCoordinator, "is_last_rank"),
        (InputBatch, "req_ids num_reqs"),
        (KVCacheManager, "usage"),
        (NewRequestData, "prompt_len"),
        (Request, "num_tokens num_tokens_with_spec num_output_tokens"),
        (Scheduler, "pause_state"),
        (StructuredOutputRequest, "grammar"),
        (VllmConfig, "use_v2_model_runner max_concurrent_batches"),
    ],
)
def test_properties_we_read(kind: type, names: str) -> None:
    for name in names.split():
        assert isinstance(getattr(kind, name), property), name
    assert isinstance(ModelConfig.is_diffusion, cached_property)
    assert "enable_chunked_prefill" in inspect.getsource(SchedulerConfig)


LOOKAHEAD = "request num_computed_tokens num_new_tokens"


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (AsyncModelRunnerOutput.get_output, ""),
        (AsyncScheduler._reserve_prefill_lookahead, LOOKAHEAD),
        (BlockPool.free_blocks, "ordered_blocks"),
        (BlockPool.get_num_free_blocks, ""),
        (BlockPool.touch, "blocks"),
        (GPUModelRunner._update_states, "scheduler_output"),
        (KVCacheManager.get_blocks, "request_id"),
        (KVConnectorBase_V1.__init__, "vllm_config role"),
        (ModelConfig.get_hidden_size, ""),
        (NixlPullConnectorScheduler._stop_heartbeat, "req_id"),
        (NixlPullConnectorScheduler.build_connector_meta, "scheduler_output"),
        (NixlPullConnectorScheduler.get_num_new_matched_tokens, "request num_computed_tokens"),
        (NixlPullConnectorScheduler.on_new_request, "request"),
        (NixlPullConnectorScheduler.request_finished, "request block_ids"),
        (NixlPullConnectorScheduler.update_connector_output, "connector_output"),
        (NixlPullConnectorWorker._get_new_notifs, ""),
        (NixlPullConnectorWorker._is_turn2_read_expired, "meta"),
        (NixlPullConnectorWorker.start_load_kv, "metadata"),
        (Request.get_finished_reason, ""),
        (Request.take_events, ""),
        (Scheduler.__init__, "vllm_config"),
        (Scheduler._free_request, "request"),
        (Scheduler._reserve_prefill_lookahead, LOOKAHEAD),
        (Scheduler.finish_requests, "request_ids finished_status"),
        (Scheduler.schedule, "throttle_prefills"),
        (Scheduler.shutdown, ""),
        (Scheduler.update_from_output, "scheduler_output model_runner_output"),
        (StructuredOutputGrammar.accept_tokens, "request_id tokens"),
        (Worker.compile_or_warm_up_model, ""),
        (Worker.execute_model, "scheduler_output"),
        (Worker.load_model, ""),
        (Worker.sample_tokens, ""),
        (Worker.shutdown, ""),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_methods_have_the_parameters_we_use(method: Any, parameters: str) -> None:
    assert set(parameters.split()) <= set(inspect.signature(method).parameters)


def test_the_names_of_states() -> None:
    statuses = set(RequestStatus.__members__)
    assert {"WAITING", "RUNNING", "PREEMPTED", "WAITING_FOR_STREAMING_REQ"} <= statuses
    assert {"WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"} <= statuses
    assert {"FINISHED_ABORTED", "FINISHED_LENGTH_CAPPED"} <= statuses
    assert str(RequestStatus.get_finished_reason(RequestStatus.FINISHED_ABORTED)) == "abort"
    assert "UNPAUSED" in PauseState.__members__ and "DELTA" in RequestOutputKind.__members__
    names = ["logprob_token_ids", "logprobs", "sampled_token_ranks"]
    assert list(LogprobsLists._fields[:3]) == names
    assert isinstance(NixlPullConnectorScheduler._TRANSFER_MODE, str)


@pytest.mark.parametrize("structure", [SchedulerOutput, ModelRunnerOutput])
def test_outputs_take_an_extra_attribute(structure: type) -> None:
    assert not hasattr(structure, "__slots__")
    assert "slots" not in inspect.getsource(structure).split("class ")[0]
    assert hasattr(NixlConnectorMetadata(), "__dict__")


# Scheduling


def test_an_engine_on_a_cpu_schedules_synchronously(smollm2: Path) -> None:
    """Whatever it is asked to. `tests/v2_engines` keeps it on for tests that depend on it."""
    config = EngineArgs(model=str(smollm2), enforce_eager=True, async_scheduling=True)
    assert config.create_engine_config().scheduler_config.async_scheduling is False


def test_vllm_asks_for_every_request_how_many_tokens_it_gets() -> None:
    """A running request with none sits the step out; a waiting one ends the scan, until 0.32."""
    running, asked, waiting = inspect.getsource(Scheduler.schedule).partition(
        "# Next, schedule the WAITING requests."
    )
    assert asked
    ends = "break" if SINCE < (0, 33) else "skip_request(request_queue)"
    for part, otherwise in ((running, "continue"), (waiting, ends)):
        question, _, answer = part.partition("self._reserve_prefill_lookahead(")
        assert "num_new_tokens = " in question[-40:]
        assert "if num_new_tokens == 0:" in answer.partition(otherwise)[0]
        assert "allocate_slots(" in answer, "nothing is allocated before"


def test_a_waiting_request_that_is_passed_over_is_put_aside() -> None:
    source = inspect.getsource(Scheduler.schedule)
    if SINCE >= (0, 31):
        assert "self.deferred_waiting.add(" in source
        assert "self.deferred_waiting.discard(request)" in source
    else:
        assert "self.skipped_waiting.prepend_requests(step_skipped_waiting)" in source


def test_the_cache_manager_is_handed_to_the_connector() -> None:
    """Until 0.29 only the blocks are, and our scheduler hands on the rest."""
    assert ("connector.bind_kv_cache_manager" in inspect.getsource(Scheduler)) == (SINCE >= (0, 30))
    assert hasattr(KVConnectorBase_V1, "bind_kv_cache_manager") == (SINCE >= (0, 30))


def test_the_queue_can_be_put_in_order() -> None:
    queue = FCFSRequestQueue("abcd")  # type: ignore[arg-type]
    queue.remove_requests(["c", "d"])  # type: ignore[list-item]
    queue.prepend_requests(reversed(["c", "d"]))  # type: ignore[list-item]
    assert list(queue) == ["c", "d", "a", "b"]  # type: ignore[comparison-overlap]


def test_every_schedule_is_followed_by_its_output_also_when_nothing_is_computed() -> None:
    """Rejections are sent in it."""
    source = inspect.getsource(EngineCore.step)
    assert "self.scheduler.schedule(" in source and "update_from_output(" in source
    queued = inspect.getsource(EngineCore.step_with_batch_queue)
    assert "batch_queue.appendleft((future, scheduler_output, exec_future))" in queued
    assert "update_from_output(" in queued


def test_a_stream_shows_no_end_without_a_token() -> None:
    """Why a rejected stream carries one."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.completion import serving as completion

    for module in (chat, completion):
        assert "Chunked prefill case, don't return empty chunks" in inspect.getsource(module)


# Moving


def test_nixl_s_worker_takes_cores_as_we_expect() -> None:
    assert "sched_setaffinity" in inspect.getsource(base_worker)
    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    assert hasattr(bindings.nixlAgentConfig(), "pthrDelay")
    assert "nixlBind.nixlAgent(" in inspect.getsource(sys.modules[NixlWrapper.__module__])


def test_a_new_request_shares_its_prompt_with_the_scheduler_s() -> None:
    """Restoring shortens both in one go."""
    source = inspect.getsource(NewRequestData.from_request)
    assert "prompt_token_ids=request.prompt_token_ids" in source
    assert "sampling_params=request.sampling_params" in source


def test_the_runner_s_table_of_requests() -> None:
    """An entry is complete when it is put in: the batch copies its output right after."""
    source = inspect.getsource(GPUModelRunner)  # the method itself may have been wrapped already
    before, put, after = source.partition("self.requests[req_id] = req_state")
    assert put and "output_token_ids=[]" in before
    assert "reqs_to_add.append(req_state)" in after.partition("# Update the states of")[0]


def test_what_the_sampler_of_a_cpu_draws_for_a_token() -> None:
    """One integer; until 0.31 noise for every entry of the vocabulary."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    source = inspect.getsource(TopKTopPSampler.forward_cpu)
    integer = "torch.randint(\n                0, 2**31, (1,), generator=gen, dtype=torch.long"
    assert (integer in source) == (SINCE >= (0, 32))
    assert "q[i].exponential_(generator=generator)" in source or SINCE >= (0, 32)


def test_an_engine_keeps_stepping_for_what_is_kept() -> None:
    assert "has_pending_push_work" in inspect.getsource(Scheduler.has_requests)
    assert hasattr(NixlPullConnector, "has_pending_push_work")


@pytest.mark.parametrize(
    "transfer",
    [None, {}, *({"headway": entry} for entry in (None, "x", [1], 7, {"max_tokens": "9"}, {}))],
)
def test_what_a_client_sends_as_our_own_entry_is_taken_for_none(transfer: Any) -> None:
    """Neither the scheduler nor the worker may fail on it: all other requests would, too."""
    sampling = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": transfer})
    assert requests.asked_max_tokens(sampling) == 5
    request = Request("a", [1, 2], sampling, None)
    assert isinstance(requests.migration_entry(request), dict | None)
    assert requests.is_new_prompt(request)
    assert requests.finished_request(request).request_id == "a"


def test_a_chat_is_told_and_parsed_as_we_expect() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    both = {"request", "result_generator", "request_id", "model_name", "conversation"}
    both |= {"tokenizer", "request_metadata"}
    stream = inspect.signature(OpenAIServingChat.chat_completion_stream_generator).parameters
    assert both | {"chat_template_kwargs"} <= set(stream)
    full = inspect.signature(OpenAIServingChat.chat_completion_full_generator).parameters
    assert both | {"parser"} <= set(full)
    source = inspect.getsource(OpenAIServingChat)
    assert "return self.chat_completion_stream_generator(" in source
    assert "if self.parser_cls is not None:" in source
    assert '"data: [DONE]\\n\\n"' in source
    create = inspect.signature(OpenAIServingChat.create_chat_completion).parameters
    assert list(create)[:2] == ["self", "request"]
    told = inspect.getsource(OpenAIServingChat.chat_completion_stream_generator)
    tells = 'and output.finish_reason == "stop"' in told or SINCE >= (0, 33)
    assert tells is TELLS_CUT_CALLS
