"""What engines and gateways stream, damaged: it is read or refused, and the next is served."""

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc
import msgspec
import pytest
from aiohttp import web
from fuzzing import damaged_bytes, fuzzed, json_text
from gateway_calls import Asked, asked_picker, request_head, said
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_cluster import PROMPT, cluster, tokens_of
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

PROMPT_IDS = [1504, 282, 253]
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
    choice |= {"finish_reason": finish_reason, "stop_reason": None, "prompt_token_ids": PROMPT_IDS}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "choices": [choice]}


def chat_chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    logprobs = {"content": [{"token": "word", "logprob": -1.0}]}
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if "content" in delta:
        choice |= {"token_ids": [1200], "logprobs": logprobs}
    return {"id": "chatcmpl-1", "created": 1, "prompt_token_ids": PROMPT_IDS, "choices": [choice]}


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
        splicer.prompt_token_ids, splicer.output_token_ids = list(PROMPT_IDS), [260, 8970]
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


GATEWAY_BODY = b'{"model": "m", "prompt": "a river", "max_tokens": 3}'
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


def answer_head(status: bytes, kind: bytes, ends: bool = False) -> Any:
    headers = [{"key": ":status", "raw_value": status}, {"key": "content-type", "raw_value": kind}]
    return said(response_headers={"headers": {"headers": headers}, "end_of_stream": ends})


EXCHANGE = [
    request_head(),
    said(request_body={"body": GATEWAY_BODY[:20]}),
    said(request_body={"body": GATEWAY_BODY[20:], "end_of_stream": True}),
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
EXCHANGED = [message.SerializeToString() for message in EXCHANGE]
messages = st.sampled_from([message.SerializeToString() for message in MESSAGES])


@st.composite
def exchanges(draw: st.DrawFn) -> list[bytes]:
    """A valid exchange with something missing, twice there, added, or damaged."""
    said = list(EXCHANGED)
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
    @example(EXCHANGED[:4], True)
    def holds(said: list[bytes], leaves: bool) -> None:
        run(asked.exchange(said, leaves))
        run(asked.idle())

    holds()
    answers, code = run(asked.exchange(EXCHANGED))
    assert code is grpc.StatusCode.OK
    assert [answer.WhichOneof("kind") for answer in answers] == [
        *("request_headers", "request_body", "request_body"),
        *("response_headers", "response_body", "response_body"),
    ]


BATCH = 50
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
BODY: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
KINDS = (BODY, BODY | {"stream": True}, BODY | TOOLS | {"stream": True}, BODY | {"n": 2})
ALIVE = [b": ping\n\n", b'data: {"choices":[]}\n\n', b'data: {"type":"ping"}\n\n']
ERRORS = [
    b"data: " + json.dumps({"error": {"message": "no", "code": code}}).encode() + b"\n\n"
    for code in (400, 429, 500, 2**70, -1, "400", None)
]
PIECES = [
    *ALIVE,
    *ERRORS,
    b'data: {"error": "no"}\n\n',
    b'event: error\ndata: {"type": "error", "error": {"message": "no"}}\n\n',
    b"data: [DONE]\n\n",
    b"data: \xff\n\n",
    b"data: {\n\n",
    b"data: " + b"[" * 5000 + b"\n\n",
    b'data: {"choices":[{"index":0,"text":"a","token_ids":[-1]}]}\n\n',
    b'data: {"choices":[{"index":0,"finish_reason":"abort"}]}\n\n',
    b"x" * 70_000,
    b"\n\n\n\n",
    b'{"choices": []}',
]
HEADERS = [
    {},
    {"Content-Type": "text/event-stream"},
    {"Content-Type": "text/html"},
    {"Content-Encoding": "gzip"},
    {"Retry-After": "9" * 40, "Set-Cookie": "a=b", "Location": "/elsewhere"},
]
Answer = tuple[int, dict[str, str], list[bytes], str]
answers = st.tuples(
    st.sampled_from([200, 200, 200, 201, 204, 302, 400, 404, 408, 413, 429, 500, 503]),
    st.sampled_from(HEADERS),
    st.lists(st.sampled_from(PIECES) | st.binary(max_size=40), max_size=5),
    st.sampled_from(["ends", "breaks", "stalls", "lives on"]),
)


async def give(http: web.Request, answer: Answer) -> web.StreamResponse:
    status, headers, pieces, how = answer
    response = web.StreamResponse(status=status, headers=headers)
    await response.prepare(http)
    for piece in pieces:
        await response.write(piece)
    if how == "breaks":
        http.transport.abort()
    while how in ("stalls", "lives on"):
        await asyncio.sleep(0.02)
        if how == "lives on":
            await response.write(b": ping\n\n")
    return response


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@fuzzed(batch=BATCH)
@given(batch=st.lists(st.tuples(answers, st.sampled_from(KINDS)), min_size=BATCH, max_size=BATCH))
@example(batch=[((200, HEADERS[1], [error], "lives on"), KINDS[2]) for error in ERRORS])
async def test_every_client_has_its_answer_and_honest_engines_serve_on(
    tokenizer: Tokenizer, batch: list[tuple[Answer, dict[str, Any]]]
) -> None:
    short = {"first_token_seconds": 1.0, "token_seconds": 1.0, "control_seconds": 1.0}
    short |= {"breaker_failures": 10_000}
    async with cluster(tokenizer, **short) as it:
        engine, url = it.engines["decode-0"], it.url + "/v1/completions"

        async def script(http: web.Request) -> web.StreamResponse:
            return await give(http, batch[int(http.headers["X-Request-Id"])][0])

        async def ask(number: int, answer: Answer, body: dict[str, Any]) -> None:
            name = {"X-Request-Id": str(number)}
            async with it.session.post(url, json=body, headers=name) as response:
                told = await response.read()
            assert response.status in (200, 400, 404, 413, 429, 502), answer
            if response.status != 200:
                assert "error" in json.loads(told), answer
            assert b"decode-0" not in told

        engine.script = script
        asked = {asyncio.create_task(ask(number, *one)): one for number, one in enumerate(batch)}
        done, waiting = await asyncio.wait(asked, timeout=60)
        assert not waiting, [asked[one] for one in waiting]
        for one in done:
            one.result()
        engine.script = None
        assert tokens_of(await it.stream(BODY)) == it.expected(5)
        for one in it.engines.values():
            one.kept.clear()  # what a real engine has accepted, it sees to itself
