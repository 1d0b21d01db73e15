"""What is sent to the engine: prompts to be answered, or transcripts to be replayed."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from data_collection.capture.requests import Replay
from data_collection.workload.engine_options import ID_PREFIX, Sampling
from data_collection.workload.prompts import Prompt, PromptError, Transcript


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
        template = _ChatTemplate(tokenizer)
        requests = [
            EngineRequest(
                id=ID_PREFIX + prompt.id,
                name=prompt.id,
                token_ids=template.tokens(prompt.where, prompt.messages, prompt.template),
                sampling=replace(sampling, **prompt.sampling),
                extra_args={"headway_source": prompt.source, "headway_task": prompt.task},
            )
            for prompt in prompts
        ]
        template.tell_what_it_ignored()
        return requests

    return make


def transcript_requests(transcripts: list[Transcript]) -> RequestSource:
    """Return the source of requests whose answers are known, see `Replay`.

    It raises `PromptError` where a token id is outside the model's vocabulary.
    """

    def make(tokenizer: Any) -> list[EngineRequest]:
        template = _ChatTemplate(tokenizer)
        requests = [_replayed(tokenizer, template, transcript) for transcript in transcripts]
        template.tell_what_it_ignored()
        return requests

    return make


def _replayed(tokenizer: Any, template: "_ChatTemplate", transcript: Transcript) -> EngineRequest:
    prompt, answer = _token_ids(tokenizer, template, transcript)
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


def _token_ids(
    tokenizer: Any, template: "_ChatTemplate", transcript: Transcript
) -> tuple[list[int], list[int]]:
    """Return prompt and answer as token ids; text that the model ended is ended likewise."""
    prompt: Any = transcript.prompt
    if not isinstance(prompt[0], int):
        prompt = template.tokens(transcript.where, prompt, transcript.template)
    answer: Any = transcript.answer
    if isinstance(answer, str):
        answer = tokenizer.encode(answer, add_special_tokens=False)
        if transcript.finish_reason == "stop" or not answer:
            answer = [*answer, tokenizer.eos_token_id]
    return prompt, answer


_Messages = list[dict[str, Any]]
_NEEDED = ("tools", "tool_calls", "function_call", "refusal", "role")
"""What a prompt would be another one without."""
_REASONING = ("reasoning", "reasoning_content")
_ALWAYS_READ = ("system", "user", "assistant")


class _ChatTemplate:
    """Puts conversations into a model's chat template, and notices what the template ignores."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ignored: dict[str, list[str]] = {}

    def tokens(self, where: str, messages: _Messages, template: dict[str, Any]) -> list[int]:
        """Return the token ids of a conversation that is to be answered.

        Raises:
            PromptError: the template refuses it, or ignores what is essential in it.
        """
        try:
            ids: list[int] = self._applied(messages, template)
            text = self._applied(messages, template, tokenize=False)
        except Exception as error:  # a template is a program, which may raise anything
            why = " ".join(str(error).split()) or type(error).__name__
            message = f"{where}: the model's chat template does not take this: {why}"
            raise PromptError(message) from error
        for name, what, others, arguments in _without_each(messages, template):
            if not self._differs(text, others, arguments):
                if name in _NEEDED:
                    raise PromptError(
                        f"{where}: the model's chat template ignores {what}: leave the line out, "
                        "or choose a model whose template reads them"
                    )
                self._ignored.setdefault(name, []).append(where)
        return ids

    def tell_what_it_ignored(self) -> None:
        """Say which fields of messages the template made nothing of."""
        for name, places in self._ignored.items():
            print(
                f"the model's chat template ignores {name!r} in {len(places):,} prompts, the "
                f"first in {places[0]}",
                file=sys.stderr,
            )

    def _differs(self, text: Any, messages: _Messages, template: dict[str, Any]) -> bool:
        try:
            return bool(self._applied(messages, template, tokenize=False) != text)
        except Exception:  # it cannot do without
            return True

    def _applied(self, messages: _Messages, template: dict[str, Any], tokenize: bool = True) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False, **template
        )


def _without_each(
    messages: _Messages, template: dict[str, Any]
) -> Iterator[tuple[str, str, _Messages, dict[str, Any]]]:
    """Yield the name of all that a template might ignore, and the conversation without it."""
    if "tools" in template:
        less = {name: value for name, value in template.items() if name != "tools"}
        yield "tools", "'tools'", messages, less
    fields = {name: None for message in messages for name in message}
    for name in fields:
        if name in ("role", "content", "reasoning"):
            continue
        gone = _REASONING if name in _REASONING else (name,)
        others = [{k: v for k, v in one.items() if k not in gone} for one in messages]
        yield name, f"{name!r} of messages", others, template
    roles = {message["role"]: None for message in messages}
    for role in roles:
        if role not in _ALWAYS_READ:
            others = [message for message in messages if message["role"] != role]
            yield "role", f"messages of role {role!r}", others, template
