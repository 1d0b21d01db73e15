"""What batch formation reads of vLLM's internals: the only place that knows their names.

Written against vLLM 0.32. `tests/integration/test_batching_contract.py` names every field used
here, so that another version fails there and says which one moved.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from data_collection.capture.refusals import refuse
from data_collection.capture.requests import MIGRATION_PARAMS
from data_collection.versions import SUPPORTED_VLLM, vllm_version
from rescheduler.batching.batch_formation import RequestRow, RequestTable
from rescheduler.batching.objectives import Objectives

__all__ = [
    "add_output",
    "is_new_prompt",
    "move_to_front",
    "no_room_for",
    "objectives_given",
    "rank_path",
    "read_table",
    "refuse_other_version",
    "refuse_unsupported",
    "reject",
    "room",
    "step_tokens",
]


def refuse_other_version() -> None:
    """Refuse to read the internals of another vLLM.

    Raises:
        ValueError: it is another.
    """
    found = vllm_version() or "unknown"
    if not found.startswith(SUPPORTED_VLLM):
        raise ValueError(f"Headway reads the internals of vLLM {SUPPORTED_VLLM}x, this is {found}")


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse, by name, engines whose batches would not be those that were planned.

    Raises:
        ValueError: speculative decoding, a pooling or diffusion model, pipeline parallelism,
            whole prefills, scheduling by priority, or a model whose prefill must stop at certain
            tokens.
    """
    model, config = vllm_config.model_config, vllm_config.scheduler_config
    checks = {
        "speculative decoding is on, and a step's tokens are not known before; drop "
        "--speculative-config": vllm_config.speculative_config is not None,
        "this is a pooling or diffusion model, which does not generate a token a step; serve a "
        "generative one": model.runner_type == "pooling" or model.is_diffusion,
        "pipeline parallelism is on, and several batches run at a time; use "
        "--tensor-parallel-size": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "prefills are computed whole; drop --no-enable-chunked-prefill, if the model allows": (
            not config.enable_chunked_prefill
        ),
        "requests are scheduled by priority; drop --scheduling-policy, and give urgent requests "
        "an objective of their own": config.policy != "fcfs",
        "this model's prefill must stop where its state is cached; give "
        "--no-enable-prefix-caching": vllm_config.cache_config.mamba_cache_mode == "align",
    }
    refuse("Headway cannot form this engine's batches", checks)


def rank_path(path: Path, vllm_config: Any) -> Path:
    """Return a file of this engine's own among data-parallel ones: ``steps-1.csv`` of rank 1."""
    rank = vllm_config.parallel_config.data_parallel_rank
    return path.with_stem(f"{path.stem}-{rank}") if rank else path


def objectives_given(request: Request) -> dict[str, Any] | None:
    """Return the request's ``vllm_xargs``."""
    sampling = request.sampling_params
    return sampling.extra_args if sampling is not None else None


def read_table(
    scheduler: Any, objectives: Callable[[Request], Objectives], now: float, admits: bool
) -> RequestTable:
    """Read the requests of an engine.

    Those that wait for a grammar, for a remote cache, or for more input are not eligible, nor
    those that wait beyond the free slots: who holds a cache comes first, then the least slack.
    A waiting prompt counts whole, though the prefix cache may know a part of it; the batch then
    takes less than planned.

    Args:
        scheduler: vLLM's.
        objectives: of a request.
        now: seconds since 1970 at which the batch begins, the clock of arrivals.
        admits: whether requests that wait and hold no cache may begin.
    """
    running = [_running_row(scheduler, request, objectives, now) for request in scheduler.running]
    rows = [row for row in running if row is not None]
    slots = (
        scheduler.max_num_active_reqs
        - len(scheduler.running)
        - scheduler.num_waiting_for_streaming_input
    )
    begin = len(rows)
    open_ = slots > 0 and admits and scheduler.pause_state == PauseState.UNPAUSED
    rows += _waiting_rows(scheduler, scheduler.kv_holding_waiting, objectives, now, slots > 0)
    holding = len(rows)
    rows += _waiting_rows(scheduler, scheduler.waiting, objectives, now, open_)
    table = RequestTable.of(rows)
    ready = begin + np.flatnonzero(table.eligible[begin:])
    if len(ready) > slots:
        ranked = ready[np.lexsort((table.slack[ready], ready >= holding))]
        table.eligible[ranked[slots:]] = False
    return table


def _running_row(
    scheduler: Any, request: Request, objectives: Callable[[Request], Objectives], now: float
) -> RequestRow | None:
    """Return a running request; None if its last token is on the way."""
    ahead, computed = request.num_output_placeholders, request.num_computed_tokens
    wanted = request.num_tokens_with_spec + ahead - computed
    # vLLM schedules no step beyond the last token, of the request or of the model.
    at_its_end = ahead > 0 and (
        computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
    )
    wanted = min(wanted, scheduler.max_model_len - computed - 1)
    if wanted <= 0 or at_its_end:
        return None
    generated = request.num_output_tokens + ahead
    due = objectives(request)
    return RequestRow(
        name=request.request_id,
        slack=due.deadline(request.arrival_time, generated) - now,
        tpot=due.tpot,
        decoding=not request.is_prefill_chunk,
        wanted=wanted,
        context=computed + wanted,
        eligible=True,
    )


def _waiting_rows(
    scheduler: Any,
    queue: Iterable[Request],
    objectives: Callable[[Request], Objectives],
    now: float,
    may_begin: bool,
) -> Iterator[RequestRow]:
    for request in queue:
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            continue
        remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
        # What another engine has computed, or is sending, leaves the last token of the prompt.
        wanted = 1 if remote else max(request.num_tokens - request.num_computed_tokens, 1)
        due = objectives(request)
        yield RequestRow(
            name=request.request_id,
            slack=due.deadline(request.arrival_time, request.num_output_tokens) - now,
            tpot=due.tpot,
            decoding=wanted == 1 and request.num_computed_tokens > 0,
            wanted=wanted,
            context=request.num_tokens,
            eligible=may_begin and _is_ready(scheduler, request),
        )


def _is_ready(scheduler: Any, request: Request) -> bool:
    """Whether vLLM would begin a waiting request now, if there were room."""
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    status = request.status
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    if status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request.grammar
        return grammar is not None and not isinstance(grammar, Exception)
    return status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def move_to_front(scheduler: Any, names: Sequence[str]) -> None:
    """Let these waiting requests be looked at first, in this order; others keep theirs.

    vLLM stops at the first waiting request that it gives no tokens.
    """
    queue = scheduler.waiting
    by_name = {request.request_id: request for request in queue}
    chosen = [by_name[name] for name in names if name in by_name]
    if any(a is not b for a, b in zip(queue, chosen, strict=False)):
        queue.remove_requests(chosen)
        queue.prepend_requests(reversed(chosen))


def room(scheduler: Any) -> tuple[int, int]:
    """Return what a waiting request needs: free blocks of the KV cache, and slots."""
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free, scheduler.max_num_active_reqs - len(scheduler.running)


def no_room_for(scheduler: Any, names: Sequence[str]) -> bool:
    """Whether one of these, for which tokens were planned, was not begun for want of room.

    vLLM puts those aside that it passed over for other reasons, and begins none while one that
    holds a cache cannot continue.
    """
    aside = scheduler.deferred_waiting
    if any(request not in aside for request in scheduler.kv_holding_waiting):
        return False
    waiting = {request.request_id: request for request in scheduler.waiting}
    return any(name in waiting and waiting[name] not in aside for name in names)


def step_tokens(scheduler: Any, output: SchedulerOutput) -> tuple[int, int]:
    """Return the tokens of a step that has just been scheduled, and their requests' context."""
    computed = attrgetter("num_computed_tokens")
    requests = scheduler.requests
    context = sum(computed(requests[name]) for name in output.num_scheduled_tokens)
    return output.total_num_scheduled_tokens, context


def is_new_prompt(request: Request) -> bool:
    """Whether a waiting request brings a prompt whose computation has not begun."""
    params = request.kv_transfer_params or {}
    moved = (params.get(MIGRATION_PARAMS) or {}).get("generated")
    return not (
        request.num_preemptions
        or request.num_computed_tokens
        or request.num_output_tokens
        or params.get("do_remote_prefill")
        or moved
    )


def reject(scheduler: Any, request: Request, reason: str) -> tuple[int, EngineCoreOutput]:
    """End a waiting request; return the message for its client, and which client it is.

    The API server shows nothing of a stream that ends without a token, so that there the answer
    carries one: the end of the sequence.
    """
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    sampling = request.sampling_params
    tokens: list[int] = []
    logprobs = None
    if sampling.output_kind.name == "DELTA":
        tokens = [_end_token(scheduler)]
        if sampling.logprobs is not None:
            logprobs = LogprobsLists(np.array([tokens]), np.zeros((1, 1)), np.array([1]))
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=tokens,
        new_logprobs=logprobs,
        finish_reason=request.get_finished_reason(),
        stop_reason=reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    return request.client_index, output


def add_output(
    outputs: dict[int, EngineCoreOutputs], client: int, output: EngineCoreOutput
) -> None:
    """Add to the outputs of a step for the clients."""
    outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)


def _end_token(scheduler: Any) -> int:
    ids = scheduler.vllm_config.model_config.hf_text_config.eos_token_id
    first = ids[0] if isinstance(ids, list) else ids
    return int(first or 0)
