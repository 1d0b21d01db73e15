"""What one engine, or what stands before it, answers: no other engine and no client suffers."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from broken_engine import BrokenEngine, Script
from scripted_cluster import PROMPT, Cluster, cluster
from tokenizers import Tokenizer

from rescheduler.openai.openai_stream import EventReader, read_signs

BODY: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
PINNED = {"thinking_token_budget": 100}
CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}
KINDS = {
    "moves, streamed": BODY | {"stream": True},
    "moves, whole": BODY,
    "pinned, streamed": BODY | PINNED | {"stream": True},
    "direct, streamed": BODY | {"n": 2, "stream": True},
}


@asynccontextmanager
async def broken(
    tokenizer: Tokenizer, script: Script | None, pulls: bool = True, **options: Any
) -> AsyncIterator[tuple[Cluster, BrokenEngine]]:
    """A cluster, and the decode engine that a lone request goes to, which has a script."""
    async with cluster(tokenizer, kind=BrokenEngine, **options) as it:
        engine = it.engines["decode-0"]
        assert isinstance(engine, BrokenEngine)
        engine.script, engine.pulls = script, pulls
        yield it, engine


def events(*sent: bytes, pause: float = 0.0, forever: bytes = b"") -> Script:
    """A stream that begins well, as vLLM's does before it has looked at the request.

    What is sent ``forever`` follows again and again.
    """

    async def script(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for one in chain(sent, repeat(forever) if forever else ()):
            await response.write(one)
            await asyncio.sleep(pause)
        return response

    return script


def chunk(**more: Any) -> bytes:
    """A piece of a text; without token ids, or with."""
    return (
        b"data: " + json.dumps({"choices": [{"index": 0, "text": "a", **more}]}).encode() + b"\n\n"
    )


IDS = {"token_ids": [1], "prompt_token_ids": [1, 2]}


def reported(code: int) -> bytes:
    error = {"message": "scripted", "type": "BadRequestError", "param": None, "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"


async def ask(it: Cluster, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    """Status and whole body."""
    async with it.session.post(it.url + path, json=body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("comment", [b"", b": ping\n\n"])
async def test_a_stream_that_begins_with_a_refusal_is_refused_and_nothing_stays_prefilled(
    tokenizer: Tokenizer, kind: str, comment: bytes
) -> None:
    async with broken(tokenizer, events(comment, reported(400)), pulls=False) as (it, _):
        status, body = await ask(it, KINDS[kind])
        assert status == 400
        assert json.loads(body)["error"]["message"] == "scripted"
        await it.idle()  # what the prefill instance kept has been released


@pytest.mark.parametrize("code", [408, 429, 500, 503])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_begins_with_an_engines_own_trouble_begins_again_elsewhere(
    tokenizer: Tokenizer, kind: str, code: int
) -> None:
    async with broken(tokenizer, events(reported(code)), pulls=False) as (it, engine):
        status, body = await ask(it, KINDS[kind])
        assert status == 200 and engine.asked == 1 and b"error" not in body
        await it.idle()


async def test_a_target_that_refuses_in_its_stream_leaves_nothing_at_the_source(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, kind=BrokenEngine, prefix_caching=False) as it:
        outcome: list[str] = []

        async def at(tokens: int) -> None:
            if tokens == 3 and not outcome:
                _, target = it.source_and_target()
                assert isinstance(target, BrokenEngine)
                target.script, target.pulls = events(reported(400)), False
                outcome.append(await it.move())
                target.script = None

        await it.answered(60, at)
        assert outcome == ["rolled_back"]
        await it.idle()


async def test_an_error_late_in_a_pinned_stream_is_a_failure_and_its_last_event(
    tokenizer: Tokenizer,
) -> None:
    async with broken(tokenizer, events(chunk(), reported(500))) as (it, _):
        status, body = await ask(it, KINDS["pinned, streamed"])
        assert status == 200
        assert body == chunk() + reported(500), "byte for byte, and nothing after it"
        counted = 'headway_proxy_requests_total{outcome="failed",path="/v1/completions"} 1'
        assert counted in await it.text("/metrics")


@pytest.mark.parametrize("status", [201, 204, 206, 301, 302, 307, 308])
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_but_200_is_an_answer_and_no_redirect_is_followed(
    tokenizer: Tokenizer, status: int, kind: str
) -> None:
    async with broken(tokenizer, None, pulls=False) as (it, engine):
        elsewhere = it.engines["decode-1"]

        async def script(http: web.Request) -> web.StreamResponse:
            location = f"http://127.0.0.1:{elsewhere.port}/v1/models"
            return web.Response(status=status, headers={"Location": location})

        engine.script = script
        assert (await ask(it, KINDS[kind]))[0] == 200
        assert engine.asked == 1


async def test_a_prompt_is_not_posted_where_an_engine_redirects(tokenizer: Tokenizer) -> None:
    posted = []

    async def collect(http: web.Request) -> web.Response:
        posted.append(await http.read())
        return web.Response()

    stranger = web.Application()
    stranger.router.add_route("*", "/{path:.*}", collect)
    runner = web.AppRunner(stranger)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with cluster(tokenizer, kind=BrokenEngine) as it:

            async def script(http: web.Request) -> web.StreamResponse:
                raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{port}/")

            for engine in it.engines.values():
                assert isinstance(engine, BrokenEngine)
                engine.script = engine.prefill_script = script
                engine.pulls = False
            assert (await ask(it, BODY))[0] == 502
            for engine in it.decodes:
                assert isinstance(engine, BrokenEngine)
                engine.script = None
            assert (await ask(it, BODY))[0] == 200
    finally:
        await runner.cleanup()
    assert posted == []


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_what_a_sidecar_compresses_is_unpacked(tokenizer: Tokenizer, path: str) -> None:
    whole = {"choices": [{"index": 0, "text": "a"}] * 2}

    async def script(http: web.Request) -> web.StreamResponse:
        assert http.headers["Accept-Encoding"] == "identity"
        packed = gzip.compress(json.dumps(whole).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=packed, headers=headers)

    async with broken(tokenizer, script) as (it, engine):
        engine._respond = script  # type: ignore[method-assign]
        async with it.session.post(it.url + path, json=BODY | {"n": 2}) as response:
            assert "Content-Encoding" not in response.headers
            if path == "/v1/completions":
                assert await response.json() == whole


def test_an_event_without_an_end_is_refused() -> None:
    reader, part, fed = EventReader(), b"data: " + b"x" * 65_000, 0
    with pytest.raises(msgspec.DecodeError, match="more than 16 MiB"):
        while fed < 64 << 20:
            fed += len(part)
            assert reader.feed(part) == []
    assert fed < 17 << 20


@pytest.mark.parametrize(("padding", "size"), [(2 << 20, "1 MiB"), (4 << 20, "2 MiB")])
async def test_events_that_are_larger_than_a_request_can_hold_are_not_read(
    tokenizer: Tokenizer, padding: int, size: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tokenizer) as it:
        it.engines["decode-1"].padding = padding
        answers = await asyncio.gather(*(it.post(BODY) for _ in range(4)))
        assert [status for status, _, _ in answers] == [200] * 4
    assert f"decode-1: its stream broke: DecodeError: an event of more than {size}" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_without_an_end_to_its_event_is_left(
    tokenizer: Tokenizer, kind: str
) -> None:
    async with broken(tokenizer, events(forever=b"x" * 65_000)) as (it, engine):
        assert (await ask(it, KINDS[kind]))[0] == 200
        assert engine.asked == 1


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_is_read_no_further_than_anyone_would(
    tokenizer: Tokenizer, status: int
) -> None:
    sent = 0

    async def script(http: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(http)
        while True:
            await response.write(b"x" * 65_536)
            sent += 65_536

    async with broken(tokenizer, script) as (it, _):
        assert (await ask(it, BODY))[0] == 200
    assert sent < 32 << 20


async def test_a_prefill_without_an_end_is_left(tokenizer: Tokenizer) -> None:
    async with broken(tokenizer, None) as (it, _):
        prefill = it.engines["prefill-0"]
        assert isinstance(prefill, BrokenEngine)
        prefill.prefill_script = events(forever=b" " * 65_536)
        assert (await ask(it, BODY))[0] == 200
        assert prefill.asked > 0


async def test_an_error_that_is_none_of_an_engine_still_has_openais_shape(
    tokenizer: Tokenizer,
) -> None:
    async def script(http: web.Request) -> web.StreamResponse:
        return web.Response(status=413, text="<html>nginx</html>", content_type="text/html")

    async with broken(tokenizer, script) as (it, _):
        status, body = await ask(it, BODY)
        assert status == 413
        assert json.loads(body)["error"]["code"] == 413


PING = b'data: {"type":"ping"}\n\n'
"""No event of the endpoints whose requests move."""


@pytest.mark.parametrize(
    ("kind", "kept_alive"),
    [
        (kind, kept_alive)
        for kind in KINDS
        for kept_alive in (b": ping\n\n", b'data: {"choices":[]}\n\n', PING)
        if kept_alive != PING or not kind.startswith("moves")
    ],
)
async def test_what_is_no_token_is_no_sign_of_life(
    tokenizer: Tokenizer, kind: str, kept_alive: bytes
) -> None:
    async with broken(
        tokenizer, events(pause=0.01, forever=kept_alive), first_token_seconds=0.5
    ) as (it, engine):
        status, body = await ask(it, KINDS[kind])
        assert engine.asked == 1
        if kept_alive.startswith(b":") or kind.startswith("moves"):
            assert status == 200 and b"error" not in body
        else:
            assert b"error" in body, "it has got an event already"


@pytest.mark.parametrize("kind", ["moves, streamed", "pinned, streamed"])
async def test_a_stream_that_only_lives_on_after_a_token_is_left(
    tokenizer: Tokenizer, kind: str
) -> None:
    script = events(chunk(**IDS), pause=0.01, forever=b": ping\n\n")
    async with broken(tokenizer, script, token_seconds=0.5) as (it, engine):
        status, body = await ask(it, KINDS[kind])
        assert status == 200 and engine.asked == 1
        assert (b"error" in body) is kind.startswith("pinned")


async def test_an_engine_that_does_not_stop_is_left(tokenizer: Tokenizer) -> None:
    async with broken(tokenizer, events(forever=chunk(**IDS))) as (it, engine):
        status, body = await ask(it, KINDS["moves, streamed"])
        assert status == 200 and engine.asked == 1
        assert body.count(b'"text"') == BODY["max_tokens"]
        assert b"the engines failed to serve it" in body


async def test_a_stream_whose_lines_end_otherwise_is_read(tokenizer: Tokenizer) -> None:
    token = b'{"choices":[{"index":0,"text":"a"}]}'
    for line, end in ((b"data: ", b"\r\n\r\n"), (b"data:", b"\n\n")):
        sent = line + token + end + line + b"[DONE]" + end
        async with broken(tokenizer, events(sent)) as (it, engine):
            status, body = await ask(it, KINDS["direct, streamed"])
            assert (status, body, engine.asked) == (200, sent, 1)


async def test_text_without_tokens_is_a_sign_of_life(tokenizer: Tokenizer) -> None:
    end = chunk(text="", finish_reason="stop") + b"data: [DONE]\n\n"
    async with broken(
        tokenizer, events(*[chunk()] * 6, end, pause=0.25), first_token_seconds=1.0
    ) as (it, engine):
        status, body = await ask(it, KINDS["moves, streamed"])
        assert status == 200 and engine.asked == 1 and b"error" not in body


async def test_no_limit_of_a_completion_is_that_of_the_context(tokenizer: Tokenizer) -> None:
    async with broken(
        tokenizer, events(*[chunk(**IDS)] * 29, chunk(**IDS, finish_reason="stop"))
    ) as (it, engine):
        status, body = await ask(it, BODY | {"max_tokens": None, "stream": True})
        assert status == 200 and engine.asked == 1
        assert body.count(b'"text"') == 30 and b"error" not in body


async def test_a_guessed_prompt_is_no_reason_to_leave_an_engine(tokenizer: Tokenizer) -> None:
    script = events(*[chunk(**IDS)] * 4, chunk(**IDS, finish_reason="length"))
    async with broken(tokenizer, script) as (it, engine):
        it.engines["prefill-0"].fails = 500
        body = BODY | {"prompt": "\u4e2d" * 9000, "stream": True}
        status, answer = await ask(it, body)
        assert status == 200 and engine.asked == 1 and b"error" not in answer


@pytest.mark.parametrize("complete", [True, False])
async def test_a_large_answer_passes_without_being_kept(
    tokenizer: Tokenizer, complete: bool
) -> None:
    size = 20 << 20

    async def script(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = size
        await response.prepare(http)
        for _ in range(size // (1 << 20) - (not complete)):
            await response.write(b" " * (1 << 20))
        if not complete:
            assert http.transport is not None
            http.transport.abort()
        return response

    async with broken(tokenizer, script) as (it, _):
        if complete:
            status, body = await ask(it, BODY | {"n": 2})
            assert status == 200 and len(body) == size
        else:
            with pytest.raises(aiohttp.ClientError):
                await ask(it, BODY | {"n": 2})


@pytest.mark.parametrize(
    ("event", "output"),
    [
        (b"[DONE]", False),
        (b'{"choices":[]}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', True),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', True),
        (b'{"choices":[{"text":"","finish_reason":null}]}', True),  # held back for a stop string
        (b'{"choices":[{"delta":{},"token_ids":[7]}]}', True),  # held back for a tool call
        (b'{"choices":[{"text":"","finish_reason":"stop"}]}', True),
        (b'{"type":"ping"}', False),
        (b'{"type":"response.output_text.delta","delta":"a"}', True),
    ],
)
def test_which_events_bring_something_that_the_model_generated(event: bytes, output: bool) -> None:
    assert read_signs(event).output is output
