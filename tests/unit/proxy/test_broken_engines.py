"""What one engine, or what stands before it, answers: no other engine and no client suffers."""

import asyncio
import gzip
import json
from itertools import chain, repeat
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from scripted_cluster import PROMPT, Cluster
from scripted_engine import Script, ScriptedEngine

from rescheduler.openai.openai_stream import EventReader, read_signs

BODY: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
PINNED = {"thinking_token_budget": 100}
KINDS = {
    "moves, streamed": BODY | {"stream": True},
    "moves, whole": BODY,
    "pinned, streamed": BODY | PINNED | {"stream": True},
    "direct, streamed": BODY | {"n": 2, "stream": True},
}


def broken(it: Cluster, script: Script, pulls: bool = True) -> ScriptedEngine:
    """Return the decode engine that a lone request goes to, which has a script now."""
    engine = it.engines["decode-0"]
    engine.script, engine.pulls = script, pulls
    return engine


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
    choice = {"index": 0, "text": "a", **more}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


IDS = {"token_ids": [1], "prompt_token_ids": [1, 2]}


def reported(code: int) -> bytes:
    error = {"message": "scripted", "type": "BadRequestError", "param": None, "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("comment", [b"", b": ping\n\n"])
async def test_a_stream_that_begins_with_a_refusal_is_refused_and_nothing_stays_prefilled(
    it: Cluster, kind: str, comment: bytes
) -> None:
    broken(it, events(comment, reported(400)), pulls=False)
    status, body = await it.read(KINDS[kind])
    assert status == 400
    assert json.loads(body)["error"]["message"] == "scripted"
    await it.idle()  # what the prefill instance kept has been released


@pytest.mark.parametrize("code", [408, 429, 500, 503])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_begins_with_an_engines_own_trouble_begins_again_elsewhere(
    it: Cluster, kind: str, code: int
) -> None:
    engine = broken(it, events(reported(code)), pulls=False)
    status, body = await it.read(KINDS[kind])
    assert status == 200 and engine.asked == 1 and b"error" not in body
    await it.idle()


@pytest.mark.cluster(prefix_caching=False)
async def test_a_target_that_refuses_in_its_stream_leaves_nothing_at_the_source(
    it: Cluster,
) -> None:
    outcome: list[str] = []

    async def at(tokens: int) -> None:
        if tokens == 3 and not outcome:
            _, target = it.source_and_target()
            target.script, target.pulls = events(reported(400)), False
            outcome.append(await it.move())
            target.script = None

    await it.answered(60, at)
    assert outcome == ["rolled_back"]
    await it.idle()


async def test_an_error_late_in_a_pinned_stream_is_a_failure_and_its_last_event(
    it: Cluster,
) -> None:
    broken(it, events(chunk(), reported(500)))
    status, body = await it.read(KINDS["pinned, streamed"])
    assert status == 200
    assert body == chunk() + reported(500), "byte for byte, and nothing after it"
    counted = 'headway_proxy_requests_total{outcome="failed",path="/v1/completions"} 1'
    assert counted in await it.text("/metrics")


@pytest.mark.parametrize("status", [201, 204, 206, 301, 302, 307, 308])
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_but_200_is_an_answer_and_no_redirect_is_followed(
    it: Cluster, status: int, kind: str
) -> None:
    async def script(http: web.Request) -> web.StreamResponse:
        location = f"http://127.0.0.1:{it.engines['decode-1'].port}/v1/models"
        return web.Response(status=status, headers={"Location": location})

    engine = broken(it, script, pulls=False)
    assert (await it.read(KINDS[kind]))[0] == 200
    assert engine.asked == 1


async def test_a_prompt_is_not_posted_where_an_engine_redirects(it: Cluster) -> None:
    posted = []

    async def collect(http: web.Request) -> web.Response:
        posted.append(await http.read())
        return web.Response()

    stranger = web.Application()
    stranger.router.add_route("*", "/{path:.*}", collect)
    async with TestServer(stranger) as server:

        async def script(http: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(server.make_url("/"))

        it.set_engines(script=script, prefill_script=script, pulls=False)
        assert (await it.read(BODY))[0] == 502
        it.set_decodes(script=None)
        assert (await it.read(BODY))[0] == 200
    assert posted == []


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_what_a_sidecar_compresses_is_unpacked(it: Cluster, path: str) -> None:
    whole = {"choices": [{"index": 0, "text": "a"}] * 2}

    async def script(http: web.Request) -> web.StreamResponse:
        assert http.headers["Accept-Encoding"] == "identity"
        packed = gzip.compress(json.dumps(whole).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=packed, headers=headers)

    broken(it, script)
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
    it: Cluster, padding: int, size: str, caplog: pytest.LogCaptureFixture
) -> None:
    it.engines["decode-1"].padding = padding
    answers = await asyncio.gather(*(it.post(BODY) for _ in range(4)))
    assert [status for status, _, _ in answers] == [200] * 4
    assert f"decode-1: its stream broke: DecodeError: an event of more than {size}" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_without_an_end_to_its_event_is_left(it: Cluster, kind: str) -> None:
    engine = broken(it, events(forever=b"x" * 65_000))
    assert (await it.read(KINDS[kind]))[0] == 200
    assert engine.asked == 1


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_is_read_no_further_than_anyone_would(it: Cluster, status: int) -> None:
    sent = 0

    async def script(http: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(http)
        while True:
            await response.write(b"x" * 65_536)
            sent += 65_536

    broken(it, script)
    assert (await it.read(BODY))[0] == 200
    assert sent < 32 << 20


async def test_a_prefill_without_an_end_is_left(it: Cluster) -> None:
    prefill = it.engines["prefill-0"]
    prefill.prefill_script = events(forever=b" " * 65_536)
    assert (await it.read(BODY))[0] == 200
    assert prefill.asked > 0


async def test_an_error_that_is_none_of_an_engine_still_has_openais_shape(it: Cluster) -> None:
    async def script(http: web.Request) -> web.StreamResponse:
        return web.Response(status=413, text="<html>nginx</html>", content_type="text/html")

    broken(it, script)
    status, body = await it.read(BODY)
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
@pytest.mark.cluster(first_token_seconds=0.5)
async def test_what_is_no_token_is_no_sign_of_life(
    it: Cluster, kind: str, kept_alive: bytes
) -> None:
    engine = broken(it, events(pause=0.01, forever=kept_alive))
    status, body = await it.read(KINDS[kind])
    assert engine.asked == 1
    if kept_alive.startswith(b":") or kind.startswith("moves"):
        assert status == 200 and b"error" not in body
    else:
        assert b"error" in body, "it has got an event already"


@pytest.mark.parametrize("kind", ["moves, streamed", "pinned, streamed"])
@pytest.mark.cluster(token_seconds=0.5)
async def test_a_stream_that_only_lives_on_after_a_token_is_left(it: Cluster, kind: str) -> None:
    engine = broken(it, events(chunk(**IDS), pause=0.01, forever=b": ping\n\n"))
    status, body = await it.read(KINDS[kind])
    assert status == 200 and engine.asked == 1
    assert (b"error" in body) is kind.startswith("pinned")


async def test_an_engine_that_does_not_stop_is_left(it: Cluster) -> None:
    engine = broken(it, events(forever=chunk(**IDS)))
    status, body = await it.read(KINDS["moves, streamed"])
    assert status == 200 and engine.asked == 1
    assert body.count(b'"text"') == BODY["max_tokens"]
    assert b"the engines failed to serve it" in body


@pytest.mark.parametrize(("line", "end"), [(b"data: ", b"\r\n\r\n"), (b"data:", b"\n\n")])
async def test_a_stream_whose_lines_end_otherwise_is_read(
    it: Cluster, line: bytes, end: bytes
) -> None:
    sent = line + b'{"choices":[{"index":0,"text":"a"}]}' + end + line + b"[DONE]" + end
    engine = broken(it, events(sent))
    assert await it.read(KINDS["direct, streamed"]) == (200, sent)
    assert engine.asked == 1


@pytest.mark.cluster(first_token_seconds=1.0)
async def test_text_without_tokens_is_a_sign_of_life(it: Cluster) -> None:
    end = chunk(text="", finish_reason="stop") + b"data: [DONE]\n\n"
    engine = broken(it, events(*[chunk()] * 6, end, pause=0.25))
    status, body = await it.read(KINDS["moves, streamed"])
    assert status == 200 and engine.asked == 1 and b"error" not in body


async def test_no_limit_of_a_completion_is_that_of_the_context(it: Cluster) -> None:
    engine = broken(it, events(*[chunk(**IDS)] * 29, chunk(**IDS, finish_reason="stop")))
    status, body = await it.read(BODY | {"max_tokens": None, "stream": True})
    assert status == 200 and engine.asked == 1
    assert body.count(b'"text"') == 30 and b"error" not in body


async def test_a_guessed_prompt_is_no_reason_to_leave_an_engine(it: Cluster) -> None:
    engine = broken(it, events(*[chunk(**IDS)] * 4, chunk(**IDS, finish_reason="length")))
    it.engines["prefill-0"].fails = 500
    status, answer = await it.read(BODY | {"prompt": "\u4e2d" * 9000, "stream": True})
    assert status == 200 and engine.asked == 1 and b"error" not in answer


@pytest.mark.parametrize("complete", [True, False])
async def test_a_large_answer_passes_without_being_kept(it: Cluster, complete: bool) -> None:
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

    broken(it, script)
    if complete:
        status, body = await it.read(BODY | {"n": 2})
        assert status == 200 and len(body) == size
    else:
        with pytest.raises(aiohttp.ClientError):
            await it.read(BODY | {"n": 2})


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
