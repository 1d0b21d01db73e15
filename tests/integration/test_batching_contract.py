"""Every name of vLLM's that forming batches and rejecting requests reads or overrides.

When a new vLLM moves one, the failing line here says which; `rescheduler/batching/vllm_adapter.py`
is where to fix it.
"""

import dataclasses
import inspect
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus
from vllm_source import attributes_set_in

from rescheduler.batching.vllm_adapter import rank_path, refuse_unsupported


def test_what_is_read_of_a_request() -> None:
    names = attributes_set_in("v1.request", "Request")
    assert {"arrival_time", "num_computed_tokens", "num_output_placeholders"} <= names
    assert {"is_prefill_chunk", "num_stale_output_tokens", "drop_stale_output"} <= names
    assert {"num_preemptions", "num_prompt_tokens", "max_tokens", "client_index"} <= names
    assert {"structured_output_request", "kv_transfer_params", "status"} <= names
    for name in ("num_tokens", "num_tokens_with_spec", "num_output_tokens"):
        assert isinstance(getattr(Request, name), property), name
    assert callable(Request.take_events) and callable(Request.get_finished_reason)


def test_what_is_read_of_the_scheduler() -> None:
    names = attributes_set_in("v1.core.sched.scheduler", "Scheduler")
    assert {"running", "waiting", "kv_holding_waiting", "deferred_waiting", "requests"} <= names
    assert {"max_num_active_reqs", "max_num_scheduled_tokens", "max_model_len"} <= names
    assert {"num_waiting_for_streaming_input", "finished_recving_kv_req_ids"} <= names
    assert {"vllm_config", "kv_cache_manager"} <= names
    assert isinstance(Scheduler.pause_state, property)
    assert "UNPAUSED" in PauseState.__members__
    assert "block_pool" in attributes_set_in("v1.core.kv_cache_manager", "KVCacheManager")
    assert callable(BlockPool.get_num_free_blocks) and KVCacheManager


@pytest.mark.parametrize(
    ("structure", "names"),
    [
        (VllmConfig, {"speculative_config", "additional_config", "model_config"}),
        (SchedulerConfig, {"policy", "async_scheduling"}),
        (CacheConfig, {"mamba_cache_mode"}),
        (ParallelConfig, {"pipeline_parallel_size", "data_parallel_rank"}),
        (SchedulerOutput, {"num_scheduled_tokens", "total_num_scheduled_tokens"}),
    ],
)
def test_structures_have_the_fields_we_read(structure: type, names: set[str]) -> None:
    assert names <= {field.name for field in dataclasses.fields(structure)}


def test_chunked_prefill_and_the_end_of_the_sequence_are_where_we_read_them() -> None:
    assert "enable_chunked_prefill" in inspect.getsource(SchedulerConfig)
    names = attributes_set_in("config.model", "ModelConfig")
    assert {"hf_text_config", "runner_type"} <= names
    assert isinstance(ModelConfig.is_diffusion, cached_property)


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_the_hooks_we_override(scheduler: type[Scheduler]) -> None:
    assert "throttle_prefills" in inspect.signature(scheduler.schedule).parameters
    parameters = list(inspect.signature(scheduler._reserve_prefill_lookahead).parameters)
    assert parameters == ["self", "request", "num_computed_tokens", "num_new_tokens"]
    assert "request" in inspect.signature(scheduler._free_request).parameters
    assert callable(scheduler.update_from_output) and callable(scheduler.shutdown)


def test_vllm_asks_for_every_request_how_many_tokens_it_gets() -> None:
    """A running request with none sits the step out, and a waiting one ends the scan."""
    running, asked, waiting = inspect.getsource(Scheduler.schedule).partition(
        "# Next, schedule the WAITING requests."
    )
    assert asked
    for part, otherwise in ((running, "continue"), (waiting, "break")):
        question, _, answer = part.partition("self._reserve_prefill_lookahead(")
        assert "num_new_tokens = " in question[-40:]
        assert "if num_new_tokens == 0:" in answer.partition(otherwise)[0]
        assert "allocate_slots(" in answer, "nothing is allocated before"


def test_a_waiting_request_that_is_passed_over_is_put_aside() -> None:
    source = inspect.getsource(Scheduler.schedule)
    assert "self.deferred_waiting.add(request_to_skip)" in source
    assert "self.deferred_waiting.discard(request)" in source


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
    finish = inspect.signature(Scheduler.finish_requests).parameters
    assert {"request_ids", "finished_status"} <= set(finish)


def test_what_a_client_reads_in_an_error() -> None:
    fields = {"request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason"}
    assert fields | {"events", "trace_headers"} <= set(EngineCoreOutput.__struct_fields__)
    assert "outputs" in EngineCoreOutputs.__struct_fields__
    names = ["logprob_token_ids", "logprobs", "sampled_token_ranks"]
    assert list(LogprobsLists._fields[:3]) == names
    assert str(RequestStatus.get_finished_reason(RequestStatus.FINISHED_ABORTED)) == "abort"
    assert "DELTA" in RequestOutputKind.__members__
    assert {"extra_args", "output_kind", "logprobs"} <= set(SamplingParams.__struct_fields__)


def test_a_stream_shows_no_end_without_a_token() -> None:
    """Why a rejected stream carries one."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.completion import serving as completion

    for module in (chat, completion):
        assert "Chunked prefill case, don't return empty chunks" in inspect.getsource(module)


def test_the_statuses_of_requests_that_wait() -> None:
    names = set(RequestStatus.__members__)
    assert {"WAITING", "PREEMPTED", "WAITING_FOR_STREAMING_REQ", "FINISHED_ABORTED"} <= names
    assert {"WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"} <= names


def engine_config(model: Path, **options: Any) -> Any:
    return EngineArgs(model=str(model), enforce_eager=True, **options).create_engine_config()


def test_a_plain_engine_is_accepted(smollm2: Path) -> None:
    refuse_unsupported(engine_config(smollm2))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": NGRAM}, "speculative decoding is on.*drop --speculative-config"),
        ({"runner": "pooling"}, "this is a pooling or diffusion model"),
        ({"scheduling_policy": "priority"}, "by priority; drop --scheduling-policy"),
        ({"enable_chunked_prefill": False, "max_model_len": 512}, "prefills are computed whole"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    smollm2: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(engine_config(smollm2, **options))


def test_what_a_small_machine_cannot_configure_is_refused_too(smollm2: Path) -> None:
    config = engine_config(smollm2)
    config.parallel_config.pipeline_parallel_size = 2
    config.cache_config.mamba_cache_mode = "align"
    both = r"pipeline parallelism is on.*; .*--no-enable-prefix-caching"
    with pytest.raises(ValueError, match=both):
        refuse_unsupported(config)


def test_each_data_parallel_engine_writes_its_own_steps(smollm2: Path) -> None:
    config = engine_config(smollm2)
    assert rank_path(Path("runs/steps.csv"), config) == Path("runs/steps.csv")
    config.parallel_config.data_parallel_rank = 2
    assert rank_path(Path("runs/steps.csv"), config) == Path("runs/steps-2.csv")
