"""What is sent to the engine: prompts to be answered, or transcripts to be replayed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from data_collection.capture.requests import Replay
from data_collection.workload.engine_options import ID_PREFIX, Sampling
from data_collection.workload.prompts import Prompt, PromptError, Transcript

__all__ = ["EngineRequest", "RequestSource", "prompt_requests", "transcript_requests"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request, in the terms of the engine; ``extra_args`` go to the worker that records."""

    id: str
    name: str
    token_ids: list[int]
    sampling: Sampling
    extra_args: dict[str, Any] = field(default_factory=dict)


RequestSource = Callable[[Any], list[EngineRequest]]
"""Makes the requests, once the engine's tokenizer is known."""


def prompt_requests(prompts: list[Prompt], sampling: Sampling) -> RequestSource:
    """Return the source of requests that the model answers."""

    def make(tokenizer: Any) -> list[EngineRequest]:
        return [
            EngineRequest(
                id=ID_PREFIX + prompt.id,
                name=prompt.id,
                token_ids=_templated(tokenizer, prompt.messages),
                sampling=replace(sampling, **prompt.sampling),
                extra_args={"headway_source": prompt.source, "headway_task": prompt.task},
            )
            for prompt in prompts
        ]

    return make


def transcript_requests(transcripts: list[Transcript]) -> RequestSource:
    """Return the source of requests whose answers are known, see `Replay`.

    It raises `PromptError` where a token id is outside the model's vocabulary.
    """
    return lambda tokenizer: [_replayed(tokenizer, transcript) for transcript in transcripts]


def _replayed(tokenizer: Any, transcript: Transcript) -> EngineRequest:
    prompt, answer = _token_ids(tokenizer, transcript)
    if max(*prompt, *answer) >= len(tokenizer):
        raise PromptError(
            f"{transcript.id}: token {max(*prompt, *answer)} is outside the model's vocabulary of "
            f"{len(tokenizer)}: is it another model's transcript?"
        )
    replay = Replay(
        prompt_tokens=len(prompt),
        last_token=answer[-1],
        max_tokens=transcript.max_tokens,
        finish_reason=transcript.finish_reason,
        temperature=transcript.temperature,
        top_p=transcript.top_p,
    )
    labels = {"headway_source": transcript.source, "headway_task": transcript.task}
    return EngineRequest(
        id=transcript.request_id,
        name=transcript.id,
        token_ids=[*prompt, *answer[:-1]],
        sampling=Sampling(temperature=0.0, max_tokens=1),
        extra_args=labels | replay.extra_args(),
    )


def _token_ids(tokenizer: Any, transcript: Transcript) -> tuple[list[int], list[int]]:
    """Return prompt and answer as token ids; text that the model ended is ended likewise."""
    prompt: Any = transcript.prompt
    if not isinstance(prompt[0], int):
        prompt = _templated(tokenizer, prompt)
    answer: Any = transcript.answer
    if isinstance(answer, str):
        answer = tokenizer.encode(answer, add_special_tokens=False)
        if transcript.finish_reason == "stop" or not answer:
            answer = [*answer, tokenizer.eos_token_id]
    return prompt, answer


def _templated(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids
