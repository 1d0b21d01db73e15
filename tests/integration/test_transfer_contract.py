"""Every name of vLLM's and NIXL's that moving requests reads or overrides.

When a new version moves one, the failing line here says which; `rescheduler/transfer/vllm_*.py`
and `sampling_state.py` are where to fix it.
"""

import inspect
import sys
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_source import attributes_set_in

NIXL = "distributed.kv_transfer.kv_connector.v1.nixl"


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (NixlPullConnectorScheduler.on_new_request, {"request"}),
        (
            NixlPullConnectorScheduler.get_num_new_matched_tokens,
            {"request", "num_computed_tokens"},
        ),
        (NixlPullConnectorScheduler.request_finished, {"request", "block_ids"}),
        (NixlPullConnectorScheduler.build_connector_meta, {"scheduler_output"}),
        (NixlPullConnectorScheduler.update_connector_output, {"connector_output"}),
        (NixlPullConnectorScheduler._stop_heartbeat, {"req_id"}),
        (NixlPullConnectorWorker.start_load_kv, {"metadata"}),
        (NixlPullConnectorWorker._get_new_notifs, set()),
        (NixlPullConnectorWorker._is_turn2_read_expired, {"meta"}),
        (KVConnectorBase_V1.bind_kv_cache_manager, {"kv_cache_manager"}),
        (GPUModelRunner._update_states, {"scheduler_output"}),
        (BlockPool.touch, {"blocks"}),
        (BlockPool.free_blocks, {"ordered_blocks"}),
        (BlockPool.get_num_free_blocks, set()),
        (StructuredOutputGrammar.accept_tokens, {"request_id", "tokens"}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_hooks_have_the_parameters_we_use(method: Any, parameters: set[str]) -> None:
    assert parameters <= set(inspect.signature(method).parameters)


def test_what_the_scheduler_s_side_reads_and_fills() -> None:
    names = attributes_set_in(f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler")
    assert {"_reqs_need_send", "_reqs_in_batch", "block_size", "engine_id"} <= names
    assert {"side_channel_host", "side_channel_port", "transfer_tp_size"} <= names
    assert isinstance(NixlPullConnectorScheduler._TRANSFER_MODE, str)
    assert issubclass(NixlPullConnectorScheduler, base_scheduler.NixlBaseConnectorScheduler)


def test_what_the_worker_s_side_reads_and_fills() -> None:
    names = attributes_set_in(f"{NIXL}.base_worker", "NixlBaseConnectorWorker")
    assert {"_bidirectional_kv_xfer_enabled", "_reqs_to_send", "_reqs_to_process"} <= names
    assert "sched_setaffinity" in inspect.getsource(base_worker)
    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    assert hasattr(bindings.nixlAgentConfig(), "pthrDelay")
    assert "nixlBind.nixlAgent(" in inspect.getsource(sys.modules[NixlWrapper.__module__])


def test_what_is_read_of_a_request() -> None:
    names = attributes_set_in("v1.request", "Request")
    assert {"_output_token_ids", "prompt_token_ids", "num_prompt_tokens", "max_tokens"} <= names
    assert {"num_in_flight_tokens", "num_computed_tokens", "kv_transfer_params"} <= names
    assert {"structured_output_request", "sampling_params", "status"} <= names
    assert isinstance(Request.num_tokens, property)
    assert {"RUNNING", "FINISHED_LENGTH_CAPPED"} <= set(RequestStatus.__members__)
    assert {"reasoner"} <= set(StructuredOutputRequest.__annotations__)
    assert isinstance(StructuredOutputRequest.grammar, property)


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
    fields = CachedRequestState.__dataclass_fields__
    assert {"output_token_ids", "generator"} <= set(fields)
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    assert "kv_connector_metadata" in SchedulerOutput.__dataclass_fields__


def test_the_sampler_of_a_cpu_draws_one_integer_a_token() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    source = inspect.getsource(TopKTopPSampler.forward_cpu)
    assert (
        "torch.randint(\n                0, 2**31, (1,), generator=gen, dtype=torch.long" in source
    )


def test_an_engine_keeps_stepping_for_what_is_kept() -> None:
    assert "has_pending_push_work" in inspect.getsource(Scheduler.has_requests)
    assert hasattr(NixlPullConnector, "has_pending_push_work")
    assert hasattr(NixlConnectorMetadata(), "__dict__"), "it takes further attributes"
