"""A request of vLLM's scheduler: what is read of it, and what is changed to end it early."""

import logging
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.request import Request, RequestStatus

from data_collection.capture.requests import MIGRATION_PARAMS, FinishedRequest
from data_collection.versions import vllm_release


def finished_request(request: Request) -> FinishedRequest:
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
        adapter=adapter_of(request),
    )


def adapter_of(request: Any) -> str:
    """Return the name of a request's LoRA adapter; "" for the base model."""
    return request.lora_request.lora_name if request.lora_request is not None else ""


def ended_by_itself(request: Request) -> bool:
    """Whether the length of a request that has just ended tells of others'.

    The API server ends by an abort what has reached a stop string.
    """
    reason, sampling = str(request.get_finished_reason()), request.sampling_params
    if reason in ("stop", "length"):
        return not _goes_on(request)
    stops = bool(sampling and sampling.stop)
    return reason == "abort" and stops and request.num_output_tokens > 0


def _goes_on(request: Request) -> bool:
    """Whether another engine continues a request, so that this is not its end.

    A prefill hands every request over, and a copy is made for one that comes later. A decode
    instance hands over what has been frozen, which ends by a ``max_tokens`` that was lowered for
    it.
    """
    headway = migration_entry(request) or {}
    if (request.kv_transfer_params or {}).get("do_remote_decode") or headway.get("copies"):
        return True
    return bool(headway.get("frozen")) and str(request.get_finished_reason()) == "length"


def migration_entry(request: Request) -> dict[str, Any] | None:
    """Return a proxy's instructions for moving a request; None without any."""
    return _entry(request.kv_transfer_params)


def suspended(request: Request) -> str:
    """Return whether a proxy wants a request to be suspended "first" or "last"; "" likewise."""
    wanted = (_entry(request.kv_transfer_params) or {}).get("suspended")
    return wanted if isinstance(wanted, str) else ""


def asked_max_tokens(sampling: Any) -> int:
    """Return the client's cap: a prefill instance is asked for one token of the answer."""
    asked = (_entry((sampling.extra_args or {}).get("kv_transfer_params")) or {}).get("max_tokens")
    return (asked if isinstance(asked, int) else 0) or sampling.max_tokens or 0


def _entry(transfer: Any) -> dict[str, Any] | None:
    """Return our entry of the parameters of a transfer; None without, or if it is no mapping."""
    entry = transfer.get(MIGRATION_PARAMS) if isinstance(transfer, dict) else None
    return entry if isinstance(entry, dict) else None


def client_arguments(request: Request) -> dict[str, Any] | None:
    """Return the request's ``vllm_xargs``."""
    sampling = request.sampling_params
    return sampling.extra_args if sampling is not None else None


def known_answer(request: Request, most: int) -> list[int]:
    """Return the last tokens of an answer as of the step just scheduled, so many at most.

    Without its newest token, which is still being sampled where steps are scheduled ahead.
    """
    known = max(0, request.num_computed_tokens - request.num_prompt_tokens - 1)
    tokens: list[int] = request.output_token_ids[max(0, known - most) : known]
    return tokens


def is_new_prompt(request: Request) -> bool:
    """Whether a waiting request brings a prompt whose computation has not begun."""
    prefilled = (request.kv_transfer_params or {}).get("do_remote_prefill")
    return not (request.num_preemptions or goes_on(request) or prefilled)


def goes_on(request: Request) -> bool:
    """Whether a waiting request has tokens, from here or another engine, or a cache here."""
    return bool(
        request.num_computed_tokens
        or request.num_output_tokens
        or (migration_entry(request) or {}).get("generated")
    )


def is_decoding(request: Request) -> bool:
    """Whether a request is in the running batch."""
    return bool(request.status == RequestStatus.RUNNING)


def written_tokens(request: Request) -> int:
    """Return the tokens whose KV is there: steps in flight have not written theirs."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def why_not_ended(request: Request, max_model_len: int, keeps_generators: bool) -> str | None:
    """Return why a request cannot be ended after its next token, to go on elsewhere; or None."""
    if not is_decoding(request):
        return f"it does not decode now ({RequestStatus(request.status).name.lower()})"
    if (
        request.num_output_tokens + 1 >= request.max_tokens
        or request.num_tokens + 1 >= max_model_len
    ):
        return "it is about to end"
    structured = request.structured_output_request
    if structured is not None and structured.reasoner is not None:
        return "its grammar waits for the end of its reasoning, which cannot be restored"
    sampling = request.sampling_params
    seeded = sampling is not None and sampling.seed is not None
    if seeded and keeps_generators and not current_platform.is_cpu():
        return "its generator cannot be restored on the V1 runner of a GPU"
    return None


def end_after_next_token(request: Request) -> int:
    """Let a request that a proxy sent end by its cap after its next token; return its cap."""
    cap: int = request.max_tokens
    request.max_tokens = request.num_output_tokens + 1
    request.kv_transfer_params[MIGRATION_PARAMS]["frozen"] = True
    return cap


def go_on(request: Request, max_tokens: int) -> None:
    """Take back `end_after_next_token`."""
    request.max_tokens = max_tokens
    del request.kv_transfer_params[MIGRATION_PARAMS]["frozen"]


def ended_at_its_cap(request: Request) -> bool:
    """Whether a request ended because it has generated as many tokens as it may."""
    return bool(request.status == RequestStatus.FINISHED_LENGTH_CAPPED)


logger = logging.getLogger(__name__)

_WATCHED = "_headway_restores"
_DRAWS_INTEGERS = vllm_release() >= (0, 32)
"""Whether a token takes one integer; until vLLM 0.31, noise for every entry of the vocabulary."""


def restore_request(request: Any, generated: int) -> list[int]:
    """Make the last tokens of a scheduler's request its output; return them.

    Its prompt is shortened in place: what vLLM has already sent to the workers of it shares the
    list. Its ``max_tokens`` and ``min_tokens`` count from here on.
    """
    tail = list(request.prompt_token_ids[-generated:])
    del request.prompt_token_ids[-generated:]
    request.num_prompt_tokens -= generated
    request._output_token_ids.extend(tail)
    request.max_tokens += generated
    sampling = request.sampling_params
    sampling.max_tokens = request.max_tokens
    if sampling.min_tokens:
        sampling.min_tokens += generated
    structured = request.structured_output_request
    if structured is not None and not structured.grammar.accept_tokens(request.request_id, tail):
        logger.error("%s: the grammar refuses what was generated so far", request.request_id)
    return tail


def restores_runner_state(vllm_config: Any) -> bool:
    """Whether the model runner keeps outputs and generators that have to be restored.

    The V2 runner takes all tokens from the scheduler and draws by position.
    """
    return not vllm_config.use_v2_model_runner


def watch_runner(tails_of: str) -> None:
    """Let the V1 runner's state of a new request start with the output it already has.

    The runner knows a new request by its prompt alone and adds it to its batch within the same
    call. Its table of requests is replaced by one that completes each entry as it is put in, by
    this attribute of the connector's metadata, which maps ids to restored tokens.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's derives from it

    if hasattr(GPUModelRunner, _WATCHED):
        return
    original = GPUModelRunner._update_states

    def update_states(self: Any, scheduler_output: Any) -> Any:
        tails = getattr(scheduler_output.kv_connector_metadata, tails_of, None)
        if tails:
            if not isinstance(self.requests, _RestoringRequests):
                vocabulary = self.model_config.get_vocab_size()
                self.requests = _RestoringRequests(self.requests, vocabulary)
            self.requests.tails = tails
        return original(self, scheduler_output)

    GPUModelRunner._update_states = update_states
    setattr(GPUModelRunner, _WATCHED, True)


class _RestoringRequests(dict[str, Any]):
    """The runner's requests; one that has moved here starts with its output."""

    def __init__(self, requests: dict[str, Any], vocabulary: int) -> None:
        super().__init__(requests)
        self.vocabulary = vocabulary
        self.tails: dict[str, list[int]] = {}

    def __setitem__(self, request_id: str, state: Any) -> None:
        tail = self.tails.pop(request_id, None)
        if tail is not None:
            state.output_token_ids.extend(tail)
            if state.generator is not None:
                _advance(state.generator, len(tail), self.vocabulary)
        super().__setitem__(request_id, state)


def _advance(generator: torch.Generator, tokens: int, vocabulary: int) -> None:
    """Draw what the CPU's sampler has drawn for so many tokens."""
    for _ in range(tokens):
        if _DRAWS_INTEGERS:
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        else:
            torch.empty(vocabulary).exponential_(generator=generator)
