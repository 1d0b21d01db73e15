"""vLLM's chat server over tokens that are given, and a proxy's splicer over several of these."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from data_collection.vllm_adapter.resumed_chats import ResumedChats
from rescheduler.openai.openai_request import CHAT, ClientRequest, EngineBodies
from rescheduler.openai.openai_response import ResponseCollector
from rescheduler.openai.openai_stream import DONE, EventReader, StreamSplicer, read_chunk
from rescheduler.openai.request_reader import read_request
from rescheduler.transfer.vllm_server import answer_begun

_PROMPT = "user: How is the weather?\nassistant: "
_BODIES = EngineBodies()


class ParsingServer:
    """The server of an engine that generates what it is told to.

    The engine itself is missing; parsers, detokenizer, and what makes events of outputs are vLLM's.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str | None,
        reasoning_parser: str = "",
        resumes: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        chat: Any = OpenAIServingChat.__new__(OpenAIServingChat)
        chat.response_role = "assistant"
        chat.model_config = None
        chat.enable_auto_tools = tool_parser is not None
        chat.parser_cls = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=tool_parser is not None,
        )
        chat._include_reasoning_tokens_details = bool(reasoning_parser)
        chat.return_tokens_as_token_ids = False
        chat.system_fingerprint = f"of {id(self)}"
        chat.request_logger = None
        for flag in ("log_outputs", "per_request_metrics"):
            setattr(chat, f"enable_{flag}", False)
        for flag in ("force_include_usage", "prompt_tokens_details"):
            setattr(chat, f"enable_{flag}", False)
        chat.default_chat_template_kwargs = {}
        chat.create_chat_completion = self._create
        self.chat = chat
        if resumes:
            ResumedChats(chat, answer_begun)

    async def _create(self, request: ChatCompletionRequest, generator: Any) -> AsyncIterator[str]:
        """Do what vLLM does between a request and its stream."""
        (request.kv_transfer_params or {}).pop("prompt_token_ids", None)
        self._adjusted(request)
        return self.chat.chat_completion_stream_generator(
            request,
            generator(request),
            "chatcmpl-1",
            "m",
            [],
            self.tokenizer,
            SimpleNamespace(),
            chat_template_kwargs={},
        )

    async def stream(
        self, body: bytes, groups: Sequence[list[int]], end: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a request for which the engine generates groups of tokens.

        With the last one it ends, for a reason.
        """
        asked = json.loads(body)
        given = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids")
        given = given or self.tokenizer.encode(_PROMPT)
        request = ChatCompletionRequest(**asked)
        events = await self.chat.create_chat_completion(
            request, lambda adjusted: self._outputs(adjusted, given, groups, end)
        )
        reader = EventReader()
        async for event in events:
            for data in reader.feed(event.encode()):
                if data != DONE:
                    yield data

    async def whole(self, asked: dict[str, Any], groups: Sequence[list[int]], end: str) -> Any:
        """Return what vLLM answers to a client that does not stream."""
        request = ChatCompletionRequest(**{**asked, "stream": False, "stream_options": None})
        parser = self._adjusted(request)
        prompt = self.tokenizer.encode(_PROMPT)
        outputs = [one async for one in self._outputs(request, prompt, groups, end)]
        last = outputs[-1].outputs[0]
        last.text = "".join(one.outputs[0].text for one in outputs)
        last.token_ids = [token for one in outputs for token in one.outputs[0].token_ids]
        if request.logprobs:
            last.logprobs = [entry for one in outputs for entry in one.outputs[0].logprobs]

        async def only() -> AsyncIterator[RequestOutput]:
            yield outputs[-1]

        answer = await self.chat.chat_completion_full_generator(
            *(request, only(), "chatcmpl-1", "m", [], self.tokenizer, SimpleNamespace()),
            parser=parser,
        )
        return json.loads(json.dumps(answer.model_dump()))

    def _adjusted(self, request: ChatCompletionRequest) -> Any:
        """Do what vLLM does before it generates; return the parser of a whole answer."""
        if self.chat.parser_cls is None:
            return None
        parser = self.chat.parser_cls(self.tokenizer, request.tools, chat_template_kwargs={})
        if request.tool_choice != "none" or parser.reasoning_parser is not None:
            parser.adjust_request(request)
        return parser

    async def _outputs(
        self,
        request: ChatCompletionRequest,
        prompt: list[int],
        groups: Sequence[list[int]],
        end: str,
    ) -> AsyncIterator[RequestOutput]:
        params = SamplingParams(
            stop=request.stop,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
        )
        asked = SimpleNamespace(
            request_id="1", sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None
        )
        text = IncrementalDetokenizer.from_new_request(self.tokenizer, asked)
        for number, group in enumerate(groups, start=1):
            await asyncio.sleep(0)
            reason = end if number == len(groups) else None
            before = text.num_output_tokens()
            stop = text.update(group, reason == "stop")
            group = group[: text.num_output_tokens() - before]
            reason = "stop" if stop is not None else reason
            said = text.get_next_output_text(reason is not None, delta=True)
            logprobs = None
            if request.logprobs:
                logprobs = [
                    {token: Logprob(-token / 1000, 1, self.tokenizer.decode(token))}
                    for token in group
                ]
            output = CompletionOutput(0, said, group, None, logprobs)
            output.finish_reason, output.stop_reason = reason, stop
            yield RequestOutput("1", None, prompt, None, [output], reason is not None)
            if reason is not None:
                return


async def spliced(
    servers: Sequence[ParsingServer],
    asked: dict[str, Any],
    groups: Sequence[list[int]],
    cuts: Sequence[int] = (),
    end: str = "stop",
    froze: bool = True,
) -> list[dict[str, Any]]:
    """Return what a client is told, whose request goes to the next server at each cut.

    Args:
        servers: in turn.
        asked: the body.
        groups: tokens that are generated, the end included, as they come.
        cuts: after how many groups a server's stream ends.
        end: why the last stream ends.
        froze: a cut is a freeze, whose last chunk is hidden; else the engine dies before it.
    """
    client = read_request(CHAT, json.dumps(asked).encode())
    assert client.movable
    splicer, seen, start = StreamSplicer(client, None), [], 0
    for hop, cut in enumerate([*cuts, len(groups)]):
        last = hop == len(cuts)
        body = _body(client, splicer, hop)
        stream = servers[hop % len(servers)].stream(
            body, groups[start:cut], end if last else "length"
        )
        async for data in stream:
            chunk = read_chunk(data)
            assert chunk.error is None, data
            last = last or chunk.finish_reason not in (None, "length")
            cut_here = chunk.finish_reason is not None and not last
            if not cut_here:
                passed = splicer.pass_on(data, chunk)
            else:
                passed = splicer.pass_on_frozen(data, chunk) if froze else None
            if passed is not None:
                seen.append(json.loads(passed))
            if cut_here:
                break
        await stream.aclose()
        if last:
            break
        splicer.cut()
        start = cut - (not froze)
        assert splicer.output_token_ids == [token for group in groups[:start] for token in group]
    return seen


def _body(client: ClientRequest, splicer: StreamSplicer, hop: int) -> bytes:
    if not splicer.output_token_ids:
        return _BODIES.decode(client, "id", hop, None)
    prompt, output = splicer.prompt_token_ids, splicer.output_token_ids
    return _BODIES.resumed(client, "id", hop, prompt, output, None, splicer.answer_so_far)


async def answered(
    servers: Sequence[ParsingServer], asked: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the whole answer that the proxy makes of what `spliced` returns."""
    collector = ResponseCollector(read_request(CHAT, json.dumps(asked).encode()))
    for chunk in await spliced(servers, asked, *args, **kwargs):
        collector.add(msgspec.json.encode(chunk))
    return json.loads(collector.response())


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what chunks of a chat say together; ids of calls, which engines draw, as numbers."""
    content, reasoning, calls, logprobs, token_ids = "", "", {}, [], []
    end, usage = None, None
    for chunk in chunks:
        assert chunk["id"] == "chatcmpl-1", chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            logprobs += (choice.get("logprobs") or {}).get("content") or []
            token_ids += choice.get("token_ids") or []
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"ids": [], "name": "", "arguments": ""})
                if call.get("id") and call["id"] not in known["ids"]:
                    known["ids"].append(call["id"])
                known["name"] += call["function"].get("name") or ""
                known["arguments"] += call["function"].get("arguments") or ""
            end = choice.get("finish_reason") or end
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": {i: {**call, "ids": len(call["ids"])} for i, call in calls.items()},
        "ids": len({id for call in calls.values() for id in call["ids"]}),
        "end": end,
        "usage": usage,
        "logprobs": logprobs,
        "token_ids": token_ids,
    }
