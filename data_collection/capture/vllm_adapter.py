"""What capture reads of vLLM's internals: the only place that knows their names.

Written against vLLM 0.32. `tests/integration/test_vllm_contract.py` names every field used
here, for both model runners, so that another version fails there and says which one moved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from data_collection.capture.capture_hook import CaptureHook, Gather
from data_collection.capture.refusals import refuse
from data_collection.capture.requests import MIGRATION_PARAMS, FinishedRequest, replay_of

__all__ = [
    "FINISHED_ATTRIBUTE",
    "finished_request",
    "is_recording_rank",
    "note_scheduled",
    "refuse_unsupported",
    "step_rows",
    "uses_v2_runner",
]

FINISHED_ATTRIBUTE = "headway_finished"
"""Name under which our scheduler adds ended requests to vLLM's `SchedulerOutput`."""

_REPORTING = ("HeadwayScheduler", "FairBatchingScheduler")
"""Names of the schedulers that do, or how they end."""


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse, by name, what capture cannot read correctly.

    Raises:
        ValueError: speculative decoding, a pooling or diffusion model, prefill context
            parallelism or the V2 runner of an XPU is on, or the scheduler that reports the ends
            of requests is missing.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config.scheduler_cls
    reports = getattr(scheduler, "__name__", str(scheduler)).endswith(_REPORTING)
    checks = {
        "speculative decoding is on: one step yields several tokens and the row of the last "
        "accepted one is not known when it is captured; drop --speculative-config": (
            vllm_config.speculative_config is not None
        ),
        "this is a pooling model: it generates no tokens, so nothing remains to forecast; serve a "
        "generative model": model.runner_type == "pooling",
        "this is a diffusion model: a step changes many tokens, and none of its rows is the next "
        "token's; serve an autoregressive model": model.is_diffusion,
        "XPUs have a V2 model runner of their own, which Headway does not know; set "
        "VLLM_USE_V2_MODEL_RUNNER=0": (
            current_platform.is_xpu() and vllm_config.use_v2_model_runner
        ),
        "prefill context parallelism is on: no rank holds a whole prompt's last row; drop "
        "--prefill-context-parallel-size": (
            vllm_config.parallel_config.prefill_context_parallel_size > 1
        ),
        "the scheduler does not report how requests end; add --scheduler-cls "
        "data_collection.vllm_scheduler.HeadwayScheduler": not reports,
    }
    refuse("Headway cannot capture hidden states", checks)


def uses_v2_runner(model_runner: Any) -> bool:
    """Whether this is `v1/worker/gpu/model_runner.py`, the default on GPUs."""
    return type(model_runner).__module__.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))


def is_recording_rank(tp_rank: int, pp_rank: int, pp_size: int) -> bool:
    """Whether this worker records: rank 0 of the last pipeline stage.

    Every tensor-parallel rank holds the same final hidden states, and only the last
    pipeline stage holds them at all.
    """
    return tp_rank == 0 and pp_rank == pp_size - 1


def note_scheduled(hook: CaptureHook, scheduler_output: Any, replays: bool = False) -> None:
    """Pass the requests of a step to the hook, from the scheduler's output alone.

    Args:
        hook: what captures.
        scheduler_output: the step, as it was scheduled.
        replays: whether requests may be replays of transcripts.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    for request in scheduler_output.scheduled_new_reqs:
        prompt_tokens = request.prompt_len
        # The V2 runner sees a request resumed after preemption as a new one.
        known = len(request.prefill_token_ids) if request.prefill_token_ids else prompt_tokens
        sampling = request.sampling_params
        max_tokens = _asked_max_tokens(sampling) if sampling else 0
        replay = replay_of(sampling.extra_args) if replays and sampling else None
        if replay is None:
            temperature = sampling.temperature if sampling else 1.0
            hook.request_added(request.req_id, prompt_tokens, max_tokens, temperature)
        else:
            hook.request_added(
                request.req_id, replay.prompt_tokens, replay.max_tokens, is_replay=True
            )
        hook.request_scheduled(
            request.req_id,
            request.num_computed_tokens,
            scheduled[request.req_id],
            known - prompt_tokens,
        )
    cached = scheduler_output.scheduled_cached_reqs
    for name, computed, known in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        hook.request_scheduled(name, computed, scheduled[name], known)


def step_rows(model_runner: Any) -> tuple[Sequence[str], Gather]:
    """Read the batch the runner has just computed.

    Returns:
        The request ids in batch order, and a function that copies the hidden states (last
        layer, after the final norm) of given batch positions, as many tokens behind the last as
        is asked. On a GPU the copy is enqueued on the current stream at once: the buffer belongs
        to a CUDA graph.
    """
    state = model_runner.execute_model_state
    if state is None:
        return (), _nothing_ran
    if uses_v2_runner(model_runner):
        request_ids, last_rows = state.input_batch.req_ids, state.input_batch.logits_indices
    else:
        batch = model_runner.input_batch
        request_ids = batch.req_ids[: batch.num_reqs]
        last_rows = model_runner.query_start_loc.gpu[1:] - 1

    def gather(positions: list[int], behind: list[int]) -> torch.Tensor:
        device = last_rows.device
        rows = last_rows[_on_device(positions, device)] - _on_device(behind, device)
        return torch.index_select(state.hidden_states, 0, rows)

    return request_ids, gather


def finished_request(request: Any) -> FinishedRequest:
    """Describe a request that vLLM's scheduler is about to forget."""
    reason = str(request.get_finished_reason())
    sampling = request.sampling_params
    return FinishedRequest(
        request_id=request.request_id,
        finish_reason="moved" if reason in ("stop", "length") and _goes_on(request) else reason,
        prompt_tokens=request.num_prompt_tokens,
        total_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        prompt_token_ids=list(request.prompt_token_ids) if request.prompt_token_ids else None,
        output_token_ids=list(request.output_token_ids),
        extra_args=dict(sampling.extra_args or {}) if sampling else {},
        temperature=sampling.temperature if sampling else None,
        top_p=sampling.top_p if sampling else None,
    )


def _asked_max_tokens(sampling: Any) -> int:
    """Return the client's cap: a prefill instance is asked for one token of the answer."""
    params = ((sampling.extra_args or {}).get("kv_transfer_params") or {}).get(MIGRATION_PARAMS)
    return (params or {}).get("max_tokens") or sampling.max_tokens or 0


def _goes_on(request: Any) -> bool:
    """Whether another engine continues a request, so that this is not its end.

    A prefill hands every request over, and a copy is made for one that comes later. A decode
    instance hands over what has been frozen, which ends by a ``max_tokens`` that was lowered for
    it.
    """
    params = request.kv_transfer_params or {}
    headway = params.get(MIGRATION_PARAMS) or {}
    if params.get("do_remote_decode") or headway.get("copies"):
        return True
    return bool(headway.get("frozen")) and str(request.get_finished_reason()) == "length"


def _on_device(positions: list[int], device: torch.device) -> torch.Tensor:
    on_gpu = device.type == "cuda"
    return torch.tensor(positions, pin_memory=on_gpu).to(device, non_blocking=True)


def _nothing_ran(positions: list[int], behind: list[int]) -> torch.Tensor:
    raise RuntimeError(f"rows {positions} are due in a step that ran no model")
