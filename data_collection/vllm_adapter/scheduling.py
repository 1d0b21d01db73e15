"""vLLM's scheduler: the requests it holds, the order of its queue, its room, and its answers."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import nan
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from data_collection.vllm_adapter.requests import goes_on
from data_collection.vllm_adapter.support import BINDS_CACHE_MANAGER

_LONGEST_ON_ITS_WAY = 10.0
"""Seconds from the API server to the scheduler, at most."""


def arrival(request: Any) -> float:
    """Return when a request came to the API server, on this process's monotonic clock.

    vLLM notes the time of day. That may be set while the request is here, or be another machine's:
    it is read once, as the request comes to the scheduler, and cannot say more than ten seconds.
    """
    known: float | None = getattr(request, "headway_arrival", None)
    if known is None:
        ago = min(max(0.0, time.time() - request.arrival_time), _LONGEST_ON_ITS_WAY)
        known = request.headway_arrival = time.monotonic() - ago
    return known


def bind_cache_manager(scheduler: Any) -> None:
    """Hand our connector the cache manager, as vLLM does itself since 0.30."""
    connector = scheduler.connector
    if not BINDS_CACHE_MANAGER and hasattr(connector, "bind_kv_cache_manager"):
        connector.bind_kv_cache_manager(scheduler.kv_cache_manager)


def _holding_cache(scheduler: Any) -> Collection[Request]:
    """Return the waiting requests that hold blocks of the KV cache.

    Until vLLM 0.30 they are in one queue with all that were passed over.
    """
    if hasattr(scheduler, "kv_holding_waiting"):
        holding: Collection[Request] = scheduler.kv_holding_waiting
        return holding
    remote = RequestStatus.WAITING_FOR_REMOTE_KVS
    return [one for one in scheduler.skipped_waiting if one.status == remote]


def _without_cache(scheduler: Any) -> Collection[Request]:
    """Return the waiting requests that hold none."""
    waiting: Collection[Request] = scheduler.waiting
    if hasattr(scheduler, "kv_holding_waiting"):
        return waiting
    remote = RequestStatus.WAITING_FOR_REMOTE_KVS
    return [*(one for one in scheduler.skipped_waiting if one.status != remote), *waiting]


def _passed_over(scheduler: Any) -> Collection[Request]:
    """Return the waiting requests that the last step passed over, but for want of room."""
    if hasattr(scheduler, "deferred_waiting"):
        deferred: set[Request] = scheduler.deferred_waiting
        return deferred
    return set(scheduler.skipped_waiting)


def _most_running(scheduler: Any) -> int:
    """Return how many requests may run before others begin."""
    until_0_30: int = scheduler.max_num_running_reqs
    most: int = getattr(scheduler, "max_num_active_reqs", until_0_30)
    return most


def fullness(scheduler: Any) -> dict[str, Any]:
    """Return the gauges of an engine."""
    return {
        "running": len(scheduler.running),
        "waiting": len(_without_cache(scheduler)),
        "kv_usage": float(scheduler.kv_cache_manager.usage),
        # Groups share one pool, and a request has as many blocks of each, but for windows.
        "kv_capacity_tokens": int(scheduler.cache_config.num_gpu_blocks)
        // len(scheduler.kv_cache_config.kv_cache_groups)
        * int(scheduler.block_size),
    }


class QueuedRequest(NamedTuple):
    """A request that waits to be begun, or was preempted.

    Attributes:
        arrived: when it came, in seconds of the monotonic clock.
        context: tokens of its prompt, and of those generated before it was preempted.
        prompt: its token ids; None if the prompt was given as embeddings.
        generated: tokens generated before it was preempted.
        left: output tokens until it is cut.
        temperature: with which it is sampled; nan where unknown.
    """

    request: Request
    arrived: float
    context: int
    prompt: list[int] | None
    generated: int
    left: int
    temperature: float


def queued_requests(scheduler: Any) -> list[QueuedRequest]:
    """Return what waits in a scheduler's queue, from its front on."""
    return [
        QueuedRequest(
            request=request,
            arrived=arrival(request),
            context=request.num_tokens,
            prompt=request.prompt_token_ids,
            generated=request.num_output_tokens,
            left=max(1, request.max_tokens - request.num_output_tokens),
            temperature=request.sampling_params.temperature if request.sampling_params else nan,
        )
        for request in scheduler.waiting
    ]


class HeldRequest(NamedTuple):
    """A request that could be in the next step, or will be later.

    Attributes:
        runs: whether it is in the running batch.
        holds_cache: whether it has blocks of the KV cache, running or not.
        ready: whether vLLM would compute it now, if its cache had room.
        decoding: whether it decodes; else it prefills.
        wanted: tokens that could be computed now: 1, or what is left of the prompt.
        context: tokens of context once those are computed.
        generated: tokens generated, those on their way included.
    """

    request: Request
    runs: bool
    holds_cache: bool
    ready: bool
    decoding: bool
    wanted: int
    context: int
    generated: int


def held_requests(scheduler: Any, admits: bool) -> list[HeldRequest]:
    """Return the requests of a scheduler but those that wait for more input.

    Without a free slot none that waits is ready, and unless it admits none that holds no cache.

    Those that run come first, then those that wait with a cache of theirs. Of a request whose last
    token is on the way nothing is left to compute; it is left out. A waiting prompt counts whole,
    though the prefix cache may know a part of it.
    """
    running = [_running(scheduler, request) for request in scheduler.running]
    slots = slots_to_begin(scheduler)
    return [
        *(held for held in running if held is not None),
        *_waiting(scheduler, _holding_cache(scheduler), True, may_begin=slots > 0),
        *_waiting(scheduler, _without_cache(scheduler), False, may_begin=slots > 0 and admits),
    ]


def _running(scheduler: Any, request: Request) -> HeldRequest | None:
    ahead, computed = request.num_output_placeholders, request.num_computed_tokens
    # vLLM schedules no step beyond the last token, of the request or of the model.
    at_its_end = ahead > 0 and (
        computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
    )
    wanted = min(
        request.num_tokens_with_spec + ahead - computed, scheduler.max_model_len - computed - 1
    )
    if wanted <= 0 or at_its_end:
        return None
    return HeldRequest(
        request=request,
        runs=True,
        holds_cache=True,
        ready=True,
        decoding=not request.is_prefill_chunk,
        wanted=wanted,
        context=computed + wanted,
        generated=request.num_output_tokens + ahead,
    )


def _waiting(
    scheduler: Any, queue: Iterable[Request], holds_cache: bool, may_begin: bool
) -> Iterator[HeldRequest]:
    for request in queue:
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            continue
        remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
        # What another engine has computed, or is sending, leaves the last token of the prompt.
        wanted = 1 if remote else max(request.num_tokens - request.num_computed_tokens, 1)
        yield HeldRequest(
            request=request,
            runs=False,
            holds_cache=holds_cache,
            ready=may_begin and _is_ready(scheduler, request, holds_cache),
            decoding=wanted == 1 and request.num_computed_tokens > 0,
            wanted=wanted,
            context=request.num_tokens,
            generated=request.num_output_tokens,
        )


def _is_ready(scheduler: Any, request: Request, holds_cache: bool) -> bool:
    if not holds_cache and scheduler.pause_state != PauseState.UNPAUSED:
        return False
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    status = request.status
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    if status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request.grammar
        return grammar is not None and not isinstance(grammar, Exception)
    return status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def room(scheduler: Any) -> tuple[int, int]:
    """Return what a waiting request needs: free blocks of the KV cache, and slots."""
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free, _most_running(scheduler) - len(scheduler.running)


def cache_room(scheduler: Any) -> tuple[int, int]:
    """Return how many blocks of the KV cache are free for each of its groups, and how many are."""
    pool, groups = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_config.kv_cache_groups
    return pool.get_num_free_blocks() // len(groups), pool.num_gpu_blocks // len(groups)


def caches_prefixes(scheduler: Any) -> bool:
    """Return whether a preempted request finds again what nothing has overwritten of its cache."""
    return bool(scheduler.kv_cache_manager.enable_caching)


def is_preempted(request: Any) -> bool:
    """Return whether a request waits since it was preempted."""
    return bool(request.status == RequestStatus.PREEMPTED)


def going_on(scheduler: Any) -> list[str]:
    """Return the waiting requests that have tokens, from here or another engine, or a cache."""
    skipped = getattr(scheduler, "skipped_waiting", ())
    remote = RequestStatus.WAITING_FOR_REMOTE_KVS
    waiting = (*skipped, *scheduler.waiting)
    return [one.request_id for one in waiting if one.status == remote or goes_on(one)]


def copied_requests(scheduler: Any) -> set[str]:
    """Return the running requests that another engine copies: to suspend one frees nothing."""
    ours = getattr(scheduler.connector, "connector_scheduler", None)
    copied: set[str] = getattr(ours, "copied", set())
    return copied


def slots_to_begin(scheduler: Any) -> int:
    """Return how many waiting requests could begin in the next step, for all of its slots."""
    _, slots = room(scheduler)
    return slots - int(scheduler.num_waiting_for_streaming_input)


def no_room_for(scheduler: Any, names: Sequence[str]) -> bool:
    """Whether one of these, for which tokens were planned, was not begun for want of room.

    vLLM puts those aside that it passed over for other reasons, and begins none while one that
    holds a cache cannot continue.
    """
    aside = _passed_over(scheduler)
    if any(request not in aside for request in _holding_cache(scheduler)):
        return False
    waiting = {request.request_id: request for request in scheduler.waiting}
    return any(name in waiting and waiting[name] not in aside for name in names)


def move_to_front(scheduler: Any, names: Sequence[str]) -> None:
    """Let these waiting requests be looked at first, in this order; others keep theirs.

    Until 0.32 vLLM stops at the first waiting request that it gives no tokens.
    """
    queue = scheduler.waiting
    skipped = list(getattr(scheduler, "skipped_waiting", ()))
    if skipped:  # until 0.30 these come first, and the first without tokens stops the others
        scheduler.skipped_waiting.remove_requests(skipped)
        queue.prepend_requests(reversed(skipped))
    by_name = {request.request_id: request for request in queue}
    chosen = [by_name[name] for name in names if name in by_name]
    if hasattr(scheduler, "deferred_waiting"):  # else one passed over once would always be
        scheduler.deferred_waiting.difference_update(chosen)
    if any(a is not b for a, b in zip(queue, chosen, strict=False)):
        queue.remove_requests(chosen)
        queue.prepend_requests(reversed(chosen))


def move_to_back(scheduler: Any, requests: Sequence[Request]) -> None:
    """Let these waiting requests be looked at last, in this order; others keep theirs."""
    queue = scheduler.waiting
    skipped = list(getattr(scheduler, "skipped_waiting", ()))
    if skipped:  # until 0.30 these come first
        scheduler.skipped_waiting.remove_requests(skipped)
        queue.prepend_requests(reversed(skipped))
    there = {request.request_id for request in queue}
    moved = [request for request in requests if request.request_id in there]
    queue.remove_requests(moved)
    for request in moved:
        queue.add_request(request)


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


def _end_token(scheduler: Any) -> int:
    ids = scheduler.vllm_config.model_config.hf_text_config.eos_token_id
    first = ids[0] if isinstance(ids, list) else ids
    return int(first or 0)


def add_output(
    outputs: dict[int, EngineCoreOutputs], client: int, output: EngineCoreOutput
) -> None:
    """Add to the outputs of a step for the clients."""
    outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
