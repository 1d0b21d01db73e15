"""The messages between gateway and picker, as the public API encodes them."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.engines.deployment import DeploymentError, Instance, ProxyOptions
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
        assert isinstance(head, Head)
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
    ),
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
