"""Requests that another engine goes on with: neither their end nor their cap is this engine's."""

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from data_collection.capture.capture_hook import CapturedRows, CaptureHook
from data_collection.capture.requests import FinishedRequest
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


class _Rows:
    cadence = "request"

    def __init__(self) -> None:
        self.rows: list[CapturedRows] = []

    def on_rows(self, rows: CapturedRows) -> None:
        self.rows.append(rows)

    def on_finished(self, finished: list[FinishedRequest]) -> None: ...

    def close(self) -> None: ...


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
    rows = _Rows()
    hook = CaptureHook(5, [rows])
    note_scheduled(hook, output)
    hook.step_done(["r"], lambda positions, behind: torch.zeros(len(positions), 4), [])
    assert [taken.max_tokens for taken in rows.rows] == [[cap]]
