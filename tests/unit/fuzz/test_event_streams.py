"""What an engine streams, damaged: chunks are read, or refused as no chunks."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from fuzzing import damaged_bytes, fuzzed, json_text
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rescheduler.openai.openai_request import CHAT, COMPLETIONS, ClientRequest
from rescheduler.openai.openai_response import ResponseCollector
from rescheduler.openai.openai_stream import (
    EventReader,
    StreamSplicer,
    event,
    read_chunk,
    read_signs,
)
from rescheduler.openai.request_reader import read_request

PROMPT = [1504, 282, 253]
USAGE = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
END = {"choices": [], "usage": USAGE, "system_fingerprint": "engine"}


def completion_chunk(token: int, finish_reason: str | None = None) -> dict[str, Any]:
    logprobs = {
        "text_offset": [0],
        "token_logprobs": [-1.0],
        "tokens": ["word"],
        "top_logprobs": [{"word": -1.0}],
    }
    choice = {"index": 0, "text": "word", "token_ids": [token], "logprobs": logprobs}
    choice |= {"finish_reason": finish_reason, "stop_reason": None, "prompt_token_ids": PROMPT}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "choices": [choice]}


def chat_chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    logprobs = {"content": [{"token": "word", "logprob": -1.0}]}
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if "content" in delta:
        choice |= {"token_ids": [1200], "logprobs": logprobs}
    return {"id": "chatcmpl-1", "created": 1, "prompt_token_ids": PROMPT, "choices": [choice]}


STREAMS: dict[bool, list[dict[str, Any]]] = {
    False: [completion_chunk(1200), completion_chunk(2400), completion_chunk(1300, "length"), END],
    True: [
        chat_chunk({"role": "assistant"}),
        chat_chunk({"content": "word"}),
        chat_chunk({"content": "word", "reasoning": "so"}, "stop"),
        END,
    ],
}
"""Whether it is a chat -> an engine's chunks."""

Payloads = list[bytes]
WHOLE = {chat: [json.dumps(chunk).encode() for chunk in chunks] for chat, chunks in STREAMS.items()}


@st.composite
def damaged_streams(draw: st.DrawFn) -> tuple[bool, Payloads]:
    """Whether it is a chat, and its chunks, of which one is damaged."""
    chat = draw(st.booleans())
    payloads = list(WHOLE[chat])
    at = draw(st.integers(0, len(payloads) - 1))
    payloads[at] = draw(json_text(STREAMS[chat][at]))
    return chat, payloads


def client_request(chat: bool, keeps_token_ids: bool) -> ClientRequest:
    text: dict[str, Any] = {"messages": []} if chat else {"prompt": "a"}
    asked = {**text, "stop": ["never"], "return_token_ids": keeps_token_ids}
    return read_request(CHAT if chat else COMPLETIONS, json.dumps(asked).encode())


NOISE = [b"data: 1\n\n", b": c\n\n", b"event: e\ndata: 2\n\n", b"\n\n", b"x"]


@fuzzed()
@given(
    st.sampled_from([list(map(event, chunks)) for chunks in WHOLE.values()])
    | st.lists(st.sampled_from(NOISE)),
    st.lists(st.integers(0, 2000) | st.integers(0, 60), max_size=30),
)
def test_events_are_the_same_wherever_packets_end(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    cuts = sorted(min(cut, len(stream)) for cut in cuts)
    reader, read = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        read += reader.feed(stream[start:end])
    assert read == EventReader().feed(stream)
    for chunks in WHOLE.values():
        assert read == chunks or pieces != list(map(event, chunks))


@fuzzed()
@given(
    st.sampled_from([b"".join(map(event, stream)) for stream in WHOLE.values()]).flatmap(
        damaged_bytes
    )
    | st.binary(max_size=300).map(event)
    | json_text(END).map(event)
)
@example(event(b'{"choices": [{"text": "\xff"}]}'))
@example(event(b'{"choices": ' + b"[" * 100_000))
def test_no_bytes_raise_anything_but_a_decode_error(stream: bytes) -> None:
    for payload in EventReader().feed(stream):
        for read in (read_chunk, read_signs):
            with contextlib.suppress(msgspec.DecodeError):
                read(payload)


@pytest.mark.parametrize("moved", [False, True], ids=["at first", "moved"])
@fuzzed()
@given(damaged_streams(), st.booleans(), st.none() | st.integers(0, 3))
@example((False, [b'{"id": "\xff", "choices": [{"text": "", "token_ids": [1]}]}']), False, 0)
@example((False, [b'{"id": "cmpl-1"}']), False, None)
@example((False, [b'{"choices": [], "usage": [1]}']), False, None)
@example((False, [b'{"choices": [{"token_ids": [-1]}]}']), False, 0)
@example((False, [b'{"choices": [{"token_ids": [1], "logprobs": {"a": 1}}]}']), False, None)
@example((False, [b'{"choices": [{"token_ids": [1], "logprobs": {"text_offset": []}}]}']), True, 0)
def test_a_damaged_chunk_is_spliced_or_refused(
    tokenizer: Tokenizer,
    moved: bool,
    stream: tuple[bool, Payloads],
    keeps_token_ids: bool,
    frozen_at: int | None,
) -> None:
    chat, payloads = stream
    request = client_request(chat, keeps_token_ids)
    splicer, collector = StreamSplicer(request, tokenizer), ResponseCollector(request)
    if moved:
        splicer.prompt_token_ids, splicer.output_token_ids = list(PROMPT), [260, 8970]
        splicer.cut()
    with contextlib.suppress(msgspec.DecodeError):
        for i, payload in enumerate(payloads):
            chunk = read_chunk(payload)
            if chunk.error is not None:
                return
            taken = splicer.pass_on_frozen if i == frozen_at else splicer.pass_on
            out = taken(payload, chunk)
            if out is not None:
                collector.add(out)
    json.loads(collector.response())
