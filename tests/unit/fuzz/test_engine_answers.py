"""What one engine answers, in any order and to its end or not: its clients are served elsewhere."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_cluster import PROMPT, cluster, tokens_of
from tokenizers import Tokenizer

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
        assert http.transport is not None
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
