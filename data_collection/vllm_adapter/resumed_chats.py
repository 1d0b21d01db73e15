"""Chats that another engine has begun, told by vLLM's API server as if they had begun here.

What makes tool calls and reasoning of an answer's text keeps its state in the API server of one
engine. An engine that goes on with the answer gives all of it to a parser of its own, in the chunks
in which it was parsed before, and tells what the client does not have yet.
"""

import asyncio
import copy
import inspect
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from data_collection.capture.requests import WHOLE_ANSWER

logger = logging.getLogger(__name__)

_STREAM, _CREATE = "chat_completion_stream_generator", "create_chat_completion"
_PROMPT = "prompt_token_ids"
_ERROR, _DONE = 'data: {"error"', "data: [DONE]"
_SLICE_SECONDS = 0.005
"""For which other requests wait while an answer is parsed again."""

_prompt: ContextVar[list[int] | None] = ContextVar("prompt", default=None)


class AnswerBegun(NamedTuple):
    """How far an answer has come elsewhere.

    Attributes:
        generated: tokens at the end of the prompt that other engines generated.
        shown: of them, those whose chunks the client has.
        chunks: in which they were parsed: how many in a row, and the tokens of each.
        stop: strings that end the answer.
        whole: the client does not stream: tokens come as text, and what vLLM makes of all of them
            at the end.
    """

    generated: int
    shown: int
    chunks: Sequence[tuple[int, int]]
    stop: Sequence[str]
    whole: bool

    @property
    def sizes(self) -> Iterator[int]:
        """Tokens of each chunk."""
        return (tokens for count, tokens in self.chunks for _ in range(count))

    @property
    def is_possible(self) -> bool:
        """Whether its chunks are those of its tokens, and end where the client's do."""
        if sum(count * tokens for count, tokens in self.chunks) != self.generated:
            return False
        end, ends = 0, {0}
        for size in self.sizes:
            end += size
            ends.add(end)
        return self.shown in ends and (self.shown > 0 or self.generated == 0)


class ResumedChats:
    """Wraps the chats of an API server.

    Args:
        chat: vLLM's ``OpenAIServingChat``, two of whose methods are replaced.
        begun: says of a request how far it has come, and how it is told; None: as by vLLM alone.
    """

    def __init__(self, chat: Any, begun: Callable[[Any], AnswerBegun | None]) -> None:
        self._chat, self._begun = chat, begun
        self._original, self._create = getattr(chat, _STREAM), getattr(chat, _CREATE)
        self._signature = inspect.signature(self._original)
        setattr(chat, _STREAM, self.stream)
        setattr(chat, _CREATE, self.create)

    async def create(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the tokens that a request's prompt is given as: vLLM takes them out of it."""
        ids = (request.kv_transfer_params or {}).get(_PROMPT)
        _prompt.set(list(ids) if isinstance(ids, list) else None)
        return await self._create(request, *args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        """Return the events of a stream."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        request, prompt = arguments["request"], _prompt.get() or []
        begun = self._begun(request)
        if begun is not None and (not begun.is_possible or len(prompt) <= begun.generated > 0):
            logger.error("%s: it cannot have begun as it says", arguments["request_id"])
            begun = None
        if begun is None or not (begun.generated or begun.whole):
            events: AsyncIterator[str] = self._original(*args, **kwargs)
            return events
        answer = _Answer(arguments, begun, prompt)
        return self._told(answer, arguments)

    async def _told(self, answer: "_Answer", arguments: dict[str, Any]) -> AsyncIterator[str]:
        """Yield the events that the client does not have yet."""
        outputs = answer.outputs()
        original = self._original
        if answer.begun.whole:
            plain = copy.copy(self._chat)
            plain.__dict__.pop(_STREAM)
            plain.parser_cls = None
            original = getattr(plain, _STREAM)
        events = original(**{**arguments, "result_generator": outputs})
        try:
            async for event in events:
                if not answer.goes_on and not event.startswith(_ERROR):
                    continue
                if answer.whole is not None and event.startswith(_DONE):
                    yield await self._whole(answer.whole, arguments)
                yield event
        finally:
            await events.aclose()
            await outputs.aclose()

    async def _whole(self, finished: RequestOutput, arguments: dict[str, Any]) -> str:
        """Return the event of what vLLM makes of an answer without a stream."""
        request, full = arguments["request"], self._chat.chat_completion_full_generator
        names = inspect.signature(full).parameters
        given = {name: value for name, value in arguments.items() if name in names}
        if self._chat.parser_cls is not None:
            given["parser"] = self._chat.parser_cls(
                arguments["tokenizer"],
                request.tools,
                chat_template_kwargs=arguments.get("chat_template_kwargs"),
                model_config=self._chat.model_config,
            )
        alone = {"stream": False, "stream_options": None, "logprobs": False}
        given["request"] = request.model_copy(update={**alone, "return_token_ids": False})

        async def only() -> AsyncGenerator[RequestOutput, None]:
            yield finished

        answered = (await full(**{**given, "result_generator": only()})).model_dump(mode="json")
        (choice,) = answered["choices"]
        event = {"choices": [], WHOLE_ANSWER: {"choice": choice, "usage": answered["usage"]}}
        return f"data: {json.dumps(event)}\n\n"


class _Answer:
    """An answer from its first token on, though this engine goes on with it only.

    The engine begins at once; meanwhile what the client has is parsed again.

    Attributes:
        begun: how far it has come elsewhere.
        goes_on: the engine has given a token, or failed.
        whole: all of it, once it has ended, for a client that does not stream.
    """

    def __init__(self, arguments: dict[str, Any], begun: AnswerBegun, prompt: list[int]) -> None:
        self.begun, self.goes_on = begun, False
        self.whole: RequestOutput | None = None
        self._engine = arguments["result_generator"]
        self._name = arguments["request_id"]
        length = len(prompt) - begun.generated
        self._prompt, self._tail = prompt[:length], prompt[length:]
        self._text: Any = None
        if begun.generated:
            self._text = _detokenizer(arguments, begun, self._prompt)
        self._tokens: list[int] = []
        self._said: list[str] = []

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield what one engine would have generated."""
        first = asyncio.ensure_future(anext(self._engine, None))
        try:
            await asyncio.sleep(0)
            since, end, sizes = time.monotonic(), 0, self.begun.sizes
            while end < self.begun.shown:
                start, end = end, end + next(sizes)
                yield self._again(self._tail[start:end])
                if time.monotonic() - since > _SLICE_SECONDS:
                    await asyncio.sleep(0)
                    since = time.monotonic()
            output = await first
            self.goes_on = True
            for size in sizes:
                start, end = end, end + size
                yield self._again(self._tail[start:end])
            while output is not None:
                if output.outputs[0].token_ids or output.outputs[0].finish_reason is not None:
                    self._take(output)
                    yield output
                if output.finished:
                    return
                output = await anext(self._engine, None)
        except Exception:
            self.goes_on = True  # the client has to hear of it
            raise
        finally:
            first.cancel()
            await asyncio.wait([first])
            if not first.cancelled():
                first.exception()
            await self._engine.aclose()

    def _again(self, tokens: list[int]) -> RequestOutput:
        """Return an output of tokens that another engine generated.

        Their log-probabilities are not known here: whoever has them puts them in.
        """
        self._text.update(tokens, False)
        self._tokens += tokens
        text = self._text.get_next_output_text(False, delta=True)
        output = CompletionOutput(0, text, tokens, None, [None] * len(tokens))
        return RequestOutput(self._name, None, self._prompt, None, [output], False)

    def _take(self, result: RequestOutput) -> None:
        """Make an output of the engine one of the whole answer."""
        output = result.outputs[0]
        tokens = list(output.token_ids)
        if self._text is not None:
            tokens = self._continue(result, output, tokens)
            result.prompt_token_ids = self._prompt
        if not self.begun.whole:
            return
        self._tokens += tokens
        self._said.append(output.text)
        if output.finish_reason is not None:
            text = "".join(self._said) if self._text is None else self._text.output_text
            whole = CompletionOutput(0, text, self._tokens, None, None)
            whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
            self.whole = copy.copy(result)
            self.whole.outputs = [whole]

    def _continue(
        self, result: RequestOutput, output: CompletionOutput, tokens: list[int]
    ) -> list[int]:
        """Give tokens the text that they have after the others; a stop string may end it."""
        before = self._text.num_output_tokens()
        stop = self._text.update(tokens, output.finish_reason == "stop")
        if stop is not None:
            output.finish_reason, output.stop_reason = "stop", stop
            result.finished = True
        tokens = tokens[: self._text.num_output_tokens() - before]
        output.token_ids = tokens
        if output.logprobs is not None:
            output.logprobs = output.logprobs[: len(tokens)]
        ended = output.finish_reason is not None
        output.text = self._text.get_next_output_text(ended, delta=True)
        return tokens


def _detokenizer(arguments: dict[str, Any], begun: AnswerBegun, prompt: list[int]) -> Any:
    """Return vLLM's own detokenizer, with an answer's prompt.

    No stop string is looked for in what was generated: it would have ended there.
    """
    request = arguments["request"]
    params = SamplingParams(
        stop=list(begun.stop),
        min_tokens=(request.min_tokens or 0) + begun.generated,
        max_tokens=None,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
    )
    asked = SimpleNamespace(
        request_id=arguments["request_id"],
        sampling_params=params,
        prompt_token_ids=prompt,
        prompt_embeds=None,
    )
    return IncrementalDetokenizer.from_new_request(arguments["tokenizer"], asked)
