"""Requests that another engine goes on with: neither end nor cap is this engine's; their blocks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

from data_collection.capture.capture_hook import CapturedRows, CaptureHook
from data_collection.vllm_adapter.nixl import LAYOUT, KeepingScheduler
from data_collection.vllm_adapter.requests import finished_request
from data_collection.vllm_adapter.steps import note_scheduled


def request(params: dict[str, Any] | None, max_tokens: int = 40) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params})
    made = Request("r", [1, 2, 3], sampling, None)
    made.append_output_token_ids([4, 5])
    return made


@pytest.mark.parametrize(
    ("params", "status", "reason"),
    [
        (None, RequestStatus.FINISHED_STOPPED, "stop"),
        ({"headway": {"id": "a"}}, RequestStatus.FINISHED_LENGTH_CAPPED, "length"),
        ({"do_remote_decode": True}, RequestStatus.FINISHED_LENGTH_CAPPED, "moved"),
        ({"do_remote_decode": True}, RequestStatus.FINISHED_STOPPED, "moved"),
        ({"do_remote_decode": True}, RequestStatus.FINISHED_ABORTED, "abort"),
        ({"headway": {"id": "a", "frozen": True}}, RequestStatus.FINISHED_LENGTH_CAPPED, "moved"),
        ({"headway": {"id": "a", "frozen": True}}, RequestStatus.FINISHED_STOPPED, "stop"),
    ],
)
def test_only_an_end_of_the_answer_is_reported_as_one(
    params: dict[str, Any] | None, status: RequestStatus, reason: str
) -> None:
    ended = request(params)
    ended.status = status
    assert finished_request(ended).finish_reason == reason


LAYOUT_HERE = {"model": "m", "block_size": 32, "layers": [30]}


@pytest.mark.parametrize(
    ("layout", "reads", "said"),
    [
        (LAYOUT_HERE, True, ""),
        (None, True, ""),
        ({"block_size": 32, "more": 1}, True, ""),
        ({**LAYOUT_HERE, "block_size": 64}, False, "block_size 64 and not 32"),
        ({**LAYOUT_HERE, "model": "x" * 10_000, "layers": [3]}, False, "layers [3] and not [30]"),
        ({**LAYOUT_HERE, "block_size": None}, False, "block_size None and not 32"),
        ([64], False, "an unreadable layout"),
    ],
)
def test_a_kv_cache_of_another_layout_is_not_read(
    layout: Any, reads: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler: Any = object.__new__(KeepingScheduler)
    scheduler.layout, scheduler.failed_loads = LAYOUT_HERE, 0
    params = {"do_remote_prefill": True} | ({} if layout is None else {LAYOUT: layout})
    arrived = request(params)
    scheduler.on_new_request(arrived)
    assert arrived.kv_transfer_params["do_remote_prefill"] == reads  # type: ignore[index]
    assert scheduler.failed_loads == (not reads)
    assert said in caplog.text and bool(said) == bool(caplog.text) and len(caplog.text) < 500


@pytest.mark.parametrize(
    ("params", "cap"),
    [(None, 1), ({"headway": {"id": "a", "max_tokens": 700}}, 700), ({"headway": {"id": "a"}}, 1)],
)
def test_a_prefill_forecasts_up_to_the_client_s_cap(
    params: dict[str, Any] | None, cap: int
) -> None:
    prefill = request(params, max_tokens=1)
    new = NewRequestData.from_request(prefill, ([0],))
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new]
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.num_scheduled_tokens = {"r": 3}
    rows: list[CapturedRows] = []
    consumer: Any = SimpleNamespace(cadence="request", on_rows=rows.append)
    hook = CaptureHook(5, [consumer])
    note_scheduled(hook, output)
    hook.step_done(["r"], lambda positions, behind: torch.zeros(len(positions), 4), [])
    assert [taken.max_tokens for taken in rows] == [[cap]]


BLOCK, NULL = 16, 0


def scheduler(window: int) -> Any:
    """A connector of a model with whole attention beside a window, without an engine."""
    made: Any = object.__new__(KeepingScheduler)
    made._windows = [None, window]
    made.block_size = BLOCK
    made.failed_loads = 0
    made.manager = SimpleNamespace(
        block_pool=SimpleNamespace(null_block=SimpleNamespace(block_id=NULL))
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1
    )
    made.vllm_config = SimpleNamespace(parallel_config=parallel)
    made.layout = {"block_size": BLOCK}
    made.engine_id = "a"
    made.side_channel_host = "127.0.0.1"
    made.side_channel_port = 1
    return made


def first_kept(window: int, computed: int) -> int:
    """The first block of a window that vLLM has not freed, or does not allocate."""
    manager: Any = object.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = window, 1
    skipped: int = manager.get_num_skipped_tokens(computed)
    return skipped // BLOCK


def held(window: int, computed: int) -> list[list[int]]:
    """Block ids of a request's groups, as the scheduler has them."""
    number = cdiv(computed + 1, BLOCK)
    freed = first_kept(window, computed)
    windows = [NULL] * freed + [1000 + i for i in range(freed, number)]
    return [[100 + i for i in range(number)], windows]


@given(window=st.integers(2, 200), tokens=st.integers(1, 600))
def test_a_frozen_request_offers_what_its_reader_allocates(window: int, tokens: int) -> None:
    """Its last token is of the step before: one token less was computed when blocks were freed."""
    made = scheduler(window)
    offered = made.remote_params("x", held(window, max(0, tokens - 1)), tokens, 0.0)
    whole, windows = offered["remote_block_ids"]
    number = cdiv(tokens, BLOCK)
    assert offered["remote_num_tokens"] == tokens and made.failed_loads == 0
    assert whole == [100 + i for i in range(number)]
    assert windows == [1000 + i for i in range(first_kept(window, tokens), number)]


@given(window=st.integers(2, 200), tokens=st.integers(1, 600), later=st.integers(0, 100))
def test_no_freed_block_is_ever_offered(window: int, tokens: int, later: int) -> None:
    made = scheduler(window)
    offered = made.remote_params("x", held(window, tokens + later), tokens, 0.0)
    freed = any(NULL in group for group in offered["remote_block_ids"])
    assert offered["remote_num_tokens"] == (0 if freed else tokens)
    assert made.failed_loads == freed
