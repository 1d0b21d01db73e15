"""What a gateway says, damaged or out of order: nothing is left behind, and the next is served."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc
import pytest
from fuzzing import damaged_bytes, fuzzed
from gateway_calls import Asked, asked_picker, request_head, said
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

BODY = b'{"model": "m", "prompt": "a river", "max_tokens": 3}'
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


def answer_head(status: bytes, kind: bytes, ends: bool = False) -> Any:
    headers = [{"key": ":status", "raw_value": status}, {"key": "content-type", "raw_value": kind}]
    return said(response_headers={"headers": {"headers": headers}, "end_of_stream": ends})


EXCHANGE = [
    request_head(),
    said(request_body={"body": BODY[:20]}),
    said(request_body={"body": BODY[20:], "end_of_stream": True}),
    answer_head(b"200", b"text/event-stream"),
    said(response_body={"body": EVENT}),
    said(response_body={"body": EVENT, "end_of_stream": True}),
]
MESSAGES = [
    *EXCHANGE,
    request_head("/v1/models", ends=True),
    request_head("/v1/chat/completions", ends=True),
    request_head("/v1/completions", **{"content-length": "9" * 30}),
    said(request_body={"end_of_stream": True}),
    said(request_trailers={}),
    answer_head(b"", b""),
    answer_head(b"500", b"application/json"),
    answer_head(b"200", b"application/json", ends=True),
    said(response_body={"body": b"\xff" * 70_000}),
    said(response_body={"end_of_stream": True}),
    said(response_trailers={}),
    said(),
    said(protocol_config={"request_body_mode": -1}),
]
WHOLE = [message.SerializeToString() for message in EXCHANGE]
messages = st.sampled_from([message.SerializeToString() for message in MESSAGES])


@st.composite
def exchanges(draw: st.DrawFn) -> list[bytes]:
    """A valid exchange with something missing, twice there, added, or damaged."""
    said = list(WHOLE)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(said)))
        how = draw(st.sampled_from(["cut", "remove", "insert", "damage", "noise"]))
        if how == "cut":
            del said[at:]
        elif how == "remove":
            del said[at : at + 1]
        elif how == "insert":
            said.insert(at, draw(messages))
        elif how == "damage" and at < len(said):
            said[at] = draw(damaged_bytes(said[at]))
        else:
            said.insert(at, draw(st.binary(max_size=30)))
    return said


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture
def asked(loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer) -> Iterator[Asked]:
    context = asked_picker(tokenizer)
    yield loop.run_until_complete(context.__aenter__())
    loop.run_until_complete(context.__aexit__(None, None, None))


def test_no_exchange_leaves_anything_behind(asked: Asked, loop: asyncio.AbstractEventLoop) -> None:
    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(work)

    @fuzzed()
    @given(exchanges(), st.booleans())
    @example([], False)
    @example(WHOLE[:4], True)
    def holds(said: list[bytes], leaves: bool) -> None:
        run(asked.exchange(said, leaves))
        run(asked.idle())

    holds()
    answers, code = run(asked.exchange(WHOLE))
    assert code is grpc.StatusCode.OK
    assert [answer.WhichOneof("kind") for answer in answers] == [
        *("request_headers", "request_body", "request_body"),
        *("response_headers", "response_body", "response_body"),
    ]
