"""The picker without Envoy: its messages, and what it keeps of a request."""

import asyncio
import json
import re
from typing import Any

import grpc
import pytest
from gateway_calls import Asked, asked_picker, request_head, said
from hypothesis import given
from hypothesis import strategies as st
from scripted_cluster import until
from scripted_engine import NarrowEngine
from tokenizers import Tokenizer

from rescheduler.engines.deployment import DeploymentError, Instance
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.gateway import exchange
from rescheduler.gateway.exchange import (
    Endpoints,
    EventStream,
    TokenCount,
    body_answers,
    refusal,
    routed,
    unchanged,
)
from rescheduler.gateway.messages import (
    Body,
    Head,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolError,
    Trailers,
    read_event,
)
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState

# Serialised by the code that protoc generates from Envoy's own files (xds-protos 1.85.0).
HEAD = (
    "122d0a2b0a0f0a073a6d6574686f641a04504f53540a180a053a706174681a0f2f76312f636f6d706c6574696f6e"
    "7342580a560a14656e766f792e6c622e7375627365745f68696e74123e0a3c0a25782d676174657761792d64657374"
    "696e6174696f6e2d656e64706f696e742d737562736574121332110a0f1a0d31302e302e302e323a383130304a150a"
    "016112100a0e0a0162120911000000000000f03f5a0408041004"
)
BODY = "2a0e0a0a646174613a207b7d0a0a1001"
ROUTED = (
    "0a520a50124c0a150a110a0c782d726571756573742d69641a016118020a330a2f0a1e782d676174657761792d6465"
    "7374696e6174696f6e2d656e64706f696e741a0d31302e302e302e323a383130301802280142430a410a08656e766f"
    "792e6c6212352a330a310a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e74120f1a0d31"
    "302e302e302e323a38313030"
)
PIECE = "220e0a0c1a0a1a080a04646174611001"
TRAILERS = "3200"
REFUSAL = (
    "3a570a0308f703123c0a240a200a0c636f6e74656e742d747970651a106170706c69636174696f6e2f6a736f6e1802"
    "0a140a100a0b72657472792d61667465721a013718021a027b7d2a0e686561647761795f7069636b6572"
)


def test_what_envoy_encodes_is_read() -> None:
    head = read_event(bytes.fromhex(HEAD))
    headers = {":method": "POST", ":path": "/v1/completions"}
    assert head == Head(False, headers, ends=False, subset=frozenset({"10.0.0.2:8100"}))
    assert read_event(bytes.fromhex(BODY)) == Body(True, b"data: {}\n\n", ends=True)


def test_answers_are_encoded_as_envoy_reads_them() -> None:
    assert routed("10.0.0.2:8100", {"x-request-id": "a"}).hex() == ROUTED
    assert [answer.hex() for answer in body_answers(Body(True, b"data", True))] == [PIECE]
    assert unchanged(Trailers(True)).hex() == TRAILERS
    error = RequestRefusedError(503, "no", retry_after=7)
    error.body = b"{}"
    assert refusal(error).hex() == REFUSAL


@pytest.mark.parametrize(
    ("modes", "refused"), [((4, 4), ""), ((4, 0), "response_body_mode 0"), ((2, 4), "request_body")]
)
def test_a_gateway_that_does_not_stream_bodies_is_told_what_to_set(
    modes: tuple[int, int], refused: str
) -> None:
    message = ProcessingRequest()
    message.request_headers.end_of_stream = True
    message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    if not refused:
        assert isinstance(read_event(message.SerializeToString()), Head)
        return
    with pytest.raises(ProtocolError, match=f"{refused}.*FULL_DUPLEX_STREAMED"):
        read_event(message.SerializeToString())


def test_a_subset_may_be_one_text_or_empty() -> None:
    for text, subset in (("a:1, b:2", {"a:1", "b:2"}), ("", set())):
        message = ProcessingRequest()
        message.request_headers.end_of_stream = True
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.fields["x-gateway-destination-endpoint-subset"].string_value = text
        head = read_event(message.SerializeToString())
        assert head.subset == subset


@given(st.binary(max_size=3), st.integers(0, 70_000), st.booleans(), st.booleans())
def test_a_body_of_any_size_is_handed_on_in_small_pieces(
    word: bytes, times: int, response: bool, ends: bool
) -> None:
    handed, last = b"", []
    for raw in body_answers(Body(response, word * times, ends)):
        answer = ProcessingResponse.FromString(raw)
        assert answer.WhichOneof("kind") == ("response_body" if response else "request_body")
        piece = getattr(answer, answer.WhichOneof("kind")).response.body_mutation.streamed_response
        assert len(piece.body) <= 64 << 10
        handed += piece.body
        last.append(piece.end_of_stream)
    assert handed == word * times
    assert last == [False] * (len(last) - 1) + [ends]


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(**more: object) -> dict[str, object]:
    return {"index": 0, "text": "a", **more}


CHAT = [
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
    event(choices=[{"index": 0, "delta": {"content": "a"}}]),
    b": a comment\n\n",
    event(choices=[{"index": 0, "delta": {"reasoning": "a"}}]),
    event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
    b"data: [DONE]\n\n",
]
SPECULATIVE = [
    event(choices=[text(token_ids=[1, 2, 3])]),
    event(choices=[text(token_ids=[4])]),
    event(choices=[], usage={"completion_tokens": 4}),
]
COUNTED = [
    event(choices=[text()], usage={"completion_tokens": 3}),
    event(choices=[text()], usage={"completion_tokens": 10**300}),
    event(choices=[text(), text()], usage={"completion_tokens": "many"}),
    b"data: {\n\ndata: \xff\n\nevent: a\n\n",
]
DOCUMENT = [
    json.dumps({"choices": [{"text": '"completion_tokens": 9'}], "more": "x" * 9_000}).encode(),
    b'{"usage": {"prompt_tokens": 5, "completion_tokens": 17, "total_tokens": 22}, "x": null}',
]


def named(type: str, end: str = "\n", space: str = " ", **more: object) -> bytes:
    """An event as vLLM writes those of messages and responses."""
    data = json.dumps({"type": type, **more})
    return f"event:{space}{type}{end}data:{space}{data}{end}{end}".encode()


def messages(**ends: str) -> list[bytes]:
    """A stream of `/v1/messages`."""
    usage = {"input_tokens": 9, "output_tokens": 0}
    return [
        named("message_start", message={"content": [], "usage": usage}, **ends),
        named("content_block_start", index=0, **ends),
        named("content_block_delta", delta={"type": "text_delta", "text": "a"}, **ends),
        named("content_block_delta", delta={"type": "text_delta", "text": "bc"}, **ends),
        named("content_block_stop", index=0, **ends),
    ]


MESSAGES_END = [
    named("message_delta", delta={}, usage={"input_tokens": 9, "output_tokens": 5}),
    named("message_stop"),
    b"data: [DONE]\n\n",
]
RESPONSES = [
    named("response.created", response={"output": [], "usage": None}),
    named("response.output_item.added", item={}),
    named("response.reasoning_text.delta", delta="a"),
    named("response.output_text.delta", delta="b"),
    named("response.output_text.done", text='b "output_tokens": 9'),
]
RESPONSES_END = [
    named(
        "response.completed",
        response={
            "output": [{"text": "x" * 9_000}],
            "usage": {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13},
        },
    )
]


SPELT_OTHERWISE = [part.replace(b"\n", b"\r\n").replace(b"data: ", b"data:") for part in CHAT]


@pytest.mark.parametrize(
    ("stream", "events", "chunks", "tokens"),
    [
        (CHAT, True, True, 3),
        (SPELT_OTHERWISE, True, True, 3),
        (SPECULATIVE, True, True, 4),
        (COUNTED, True, True, 6),
        (DOCUMENT, False, True, 17),
        (messages(), True, False, 2),
        (messages(end="\r\n", space=""), True, False, 2),
        ([*messages(), *MESSAGES_END], True, False, 5),
        (RESPONSES, True, False, 2),
        ([*RESPONSES, *RESPONSES_END], True, False, 4),
    ],
)
@given(data=st.data())
def test_tokens_are_counted_wherever_packets_end(
    stream: list[bytes], events: bool, chunks: bool, tokens: int, data: st.DataObject
) -> None:
    whole = b"".join(stream)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    count = TokenCount(events, chunks)
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        count.add(whole[start:end])
    count.end()
    assert count.tokens == tokens


def test_an_event_without_end_is_not_kept() -> None:
    stream, rest = EventStream(), b"x" * 4_096
    for _ in range(1_000):
        assert stream.feed(rest) == []
    assert len(stream._rest) < 1 << 20
    assert stream.feed(b"\n\ndata: a\n\n") == [b"data: a"]


class CountingPattern:
    """A pattern that knows how many bytes it has been given to search."""

    def __init__(self, pattern: "re.Pattern[bytes]") -> None:
        self.searched = 0
        self._pattern = pattern

    def search(self, text: bytearray, start: int) -> "re.Match[bytes] | None":
        self.searched += len(text) - start
        return self._pattern.search(text, start)


def test_a_stream_in_small_packets_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingPattern(exchange._BLANK_LINE)
    monkeypatch.setattr(exchange, "_BLANK_LINE", counting)
    stream, size = EventStream(), 20_000
    for _ in range(size):
        assert stream.feed(b"x") == []
    assert counting.searched <= 3 * size
    assert stream.feed(b"\n\n") == [b"x" * size]


def test_endpoints_are_addresses() -> None:
    for url, endpoint in (
        ("http://10.0.0.2:8100", "10.0.0.2:8100"),
        ("http://[fd00::2]:8100/", "[fd00::2]:8100"),
        ("http://10.0.0.2", "10.0.0.2:80"),
        ("https://10.0.0.2", "10.0.0.2:443"),
    ):
        state = InstanceState(Instance("engine", "decode", url), ProxyOptions(), None)
        endpoints = Endpoints([state])
        assert endpoints.of(state) == endpoint
        assert endpoints.outside(frozenset({endpoint})) == endpoints.outside(None) == frozenset()
        assert endpoints.outside(frozenset()) == {state}
    named = Instance("engine", "decode", "http://gpu-1:8100")
    with pytest.raises(DeploymentError, match="addresses, not names"):
        Endpoints([InstanceState(named, ProxyOptions(), None)])


def body(of: bytes, ends: bool = False) -> bytes:
    data: bytes = said(request_body={"body": of, "end_of_stream": ends}).SerializeToString()
    return data


PROMPTED = body(b'{"prompt": "a"}', ends=True)


def head(subset: list[str] | None = None, **headers: str) -> bytes:
    message = request_head(**headers)
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        listed = hint.fields["x-gateway-destination-endpoint-subset"].list_value
        for one in subset:
            listed.values.add(string_value=one)
        listed.SetInParent()
    data: bytes = message.SerializeToString()
    return data


def destination(answer: Any) -> tuple[str, str]:
    """What an answer says, in the header and in the metadata."""
    name = "x-gateway-destination-endpoint"
    options = answer.request_headers.response.header_mutation.set_headers
    (header,) = (one.header.raw_value.decode() for one in options if one.header.key == name)
    metadata = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[name]
    return header, metadata.string_value


def refused(answers: list[Any]) -> tuple[int, str]:
    """The status and the message of an error."""
    (answer,) = answers
    error = json.loads(answer.immediate_response.body)["error"]
    return answer.immediate_response.status.code, error["message"]


async def test_a_gateway_may_limit_where_a_request_goes(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, 3) as asked:
        urls = [one.instance.url for one in asked.picker.cluster.all]
        endpoints = [url.removeprefix("http://") for url in urls]
        for subset, chosen in (
            (None, endpoints[0]),
            ([endpoints[2]], endpoints[2]),
            (["10.0.0.1:1", endpoints[1]], endpoints[1]),
        ):
            answers, code = await asked.exchange([head(subset), PROMPTED])
            assert code is grpc.StatusCode.OK
            assert destination(answers[0]) == (chosen, chosen)
        for subset in ([], ["10.0.0.1:1"]):
            for more in ({}, {"path": "/v1/models"}):
                answers, _ = await asked.exchange([head(subset, **more), PROMPTED])
                assert refused(answers) == (503, "no engine in service may serve this request")


async def begun(asked: Asked, *messages: bytes) -> Any:
    call = asked.call()
    for message in messages:
        await call.write(message)
    return call


async def read_all(call: Any) -> list[Any]:
    """Return all answers of an exchange."""
    answers = []
    while (raw := await call.read()) is not grpc.aio.EOF:
        answers.append(ProcessingResponse.FromString(raw))
    return answers


async def test_a_body_that_does_not_come_is_not_waited_for(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, body_seconds=0.05) as asked:
        call = await begun(asked, head())
        answer = ProcessingResponse.FromString(await call.read())
        assert refused([answer]) == (408, "the body took more than 0.05 s")
        assert await call.code() is grpc.StatusCode.OK


async def test_bodies_are_held_only_until_they_are_handed_on(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, bodies_mb=1, largest_body_mb=1) as asked:
        first = b'{"model": "m", "prompt": [1], "suffix": "'.ljust(700 << 10, b"a")
        large, rest = body(first), body(b'"}', ends=True)
        uploading = await begun(asked, head(), large)
        await until(lambda: asked.picker.bodies.held == 700 << 10)
        answers, _ = await asked.exchange([head(), large])
        assert refused(answers)[0] == 503
        await uploading.write(rest)
        reading = asyncio.create_task(read_all(uploading))  # else they are not handed on
        await until(lambda: len(on_engines(asked)) == 1)
        assert on_engines(asked)[0].client.body == {}
        await until(lambda: asked.picker.bodies.held == 0)
        answers, _ = await asked.exchange([head(), large, rest])
        assert answers[0].WhichOneof("kind") == "request_headers"
        await uploading.done_writing()
        assert len(await reading) > 2


@pytest.mark.parametrize("length", ["1", str(1 << 20), None])
async def test_memory_is_counted_as_bodies_come_whatever_they_say(
    tokenizer: Tokenizer, length: str | None
) -> None:
    announced = {} if length is None else {"content-length": length}
    async with asked_picker(tokenizer, bodies_mb=2, largest_body_mb=1) as asked:
        silent = [await begun(asked, head(**announced)) for _ in range(4)]
        answers, _ = await asked.exchange([head(), PROMPTED])
        assert answers[0].WhichOneof("kind") == "request_headers", "they have sent nothing yet"
        part = body(b" " * (900 << 10))
        for call in silent:
            await call.write(part)
        answered = [asyncio.create_task(call.read()) for call in silent]
        await until(lambda: sum(map(asyncio.Task.done, answered)) == 2)
        assert asked.picker.bodies.held == 2 * (900 << 10)
        refusals = [ProcessingResponse.FromString(one.result()) for one in answered if one.done()]
        assert [refused([answer])[0] for answer in refusals] == [503] * 2
        for call in silent:
            call.cancel()
        await asyncio.gather(*answered, return_exceptions=True)
        await asked.idle()
        await until(lambda: asked.picker.bodies.held == 0)


async def test_a_body_may_come_in_one_message(tokenizer: Tokenizer) -> None:
    async with asked_picker(tokenizer, largest_body_mb=8) as asked:
        for size, status in ((8 << 20, 400), ((8 << 20) + 1, 413)):  # read to its end: no JSON
            answers, code = await asked.exchange([head(), body(b"a" * size, ends=True)])
            assert code is grpc.StatusCode.OK
            assert refused(answers)[0] == status


async def test_no_more_requests_wait_than_may_however_late_their_bodies_come(
    tokenizer: Tokenizer,
) -> None:
    async with asked_picker(tokenizer, kind=NarrowEngine, pool=2) as asked:
        dispatcher = asked.picker.cluster.dispatcher
        calls = [await begun(asked, head(), PROMPTED)]
        await until(lambda: len(on_engines(asked)) == 1)
        part = body(b" ")
        late = [await begun(asked, head(), part) for _ in range(5)]
        await until(lambda: asked.picker.bodies.held == 5)
        for call in late:
            await call.write(PROMPTED)
        answers = [asyncio.create_task(call.read()) for call in late]
        await until(lambda: len(dispatcher.waiting) + sum(map(asyncio.Task.done, answers)) == 5)
        assert len(dispatcher.waiting) == 2
        refusals = [ProcessingResponse.FromString(one.result()) for one in answers if one.done()]
        assert [refused([answer])[0] for answer in refusals] == [429] * 3
        for call in [*calls, *late]:
            call.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await asked.idle()


def on_engines(asked: Asked) -> list[Any]:
    on = asked.picker.cluster.placements.on
    return [request for one in asked.picker.cluster.all for request in on(one)]


@pytest.mark.parametrize("answer", ["nothing", "headers", "half", "whole"])
async def test_a_request_counts_until_its_answer_ends_or_the_gateway_goes(
    tokenizer: Tokenizer, answer: str
) -> None:
    events = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
    headers = [
        {"key": ":status", "raw_value": b"200"},
        {"key": "content-type", "raw_value": b"text/event-stream"},
    ]
    parts = [
        said(response_headers={"headers": {"headers": headers}}),
        said(response_body={"body": events[:50]}),
        said(response_body={"body": events[50:], "end_of_stream": True}),
    ]
    many = {"nothing": 0, "headers": 1, "half": 2, "whole": 3}[answer]
    async with asked_picker(tokenizer) as asked:
        call = await begun(asked, head(), PROMPTED)
        await until(lambda: len(on_engines(asked)) == 1)
        (request,) = on_engines(asked)
        for part in parts[:many]:
            await call.write(part.SerializeToString())
        if answer == "whole":
            await until(lambda: not on_engines(asked))
        elif answer == "half":
            await until(lambda: request.generated_tokens == 1)
        assert request.ended == (answer == "whole")
        call.cancel()
        await until(lambda: not on_engines(asked))
        assert request.generated_tokens == (2 if answer == "whole" else int(answer == "half"))
        assert asked.picker.ready
