"""Restore how far a request has come, at the engine that goes on with it.

Its prompt there ends with tokens that another engine generated. Left as prompt they would not
count as output: seeds would start again, penalties and ``min_tokens`` would forget them, and a
grammar would begin anew.
"""

import logging
from typing import Any

import torch

from data_collection.versions import vllm_release

__all__ = ["restore_request", "restores_runner_state", "watch_runner"]

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
