"""The demonstration's load and figures; the whole of it is in the end-to-end tests."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from scripted_cluster import names, scripted
from tokenizers import Tokenizer

from rescheduler.demo import comparison
from rescheduler.demo.comparison import skewed_load
from rescheduler.demo.fleet import FleetLoad
from rescheduler.demo.load import (
    LoadRequest,
    StreamedAnswer,
    answer_figures,
    chat_body,
    metric_total,
    serve_answers,
)
from rescheduler.engines.launch_local import free_ports
from rescheduler.serving import serve

Answer = StreamedAnswer[LoadRequest]


def request(seed: int = 3, arrives: float = 0.0) -> LoadRequest:
    return LoadRequest(f"long-{seed}", "Tell me.", max_tokens=7, seed=seed, arrives=arrives)


def served(times: list[float], sent: float = 0.0, error: str = "") -> Answer:
    """A request whose n-th token came at the n-th time."""
    answer = Answer(request(), sent=sent, error=error)
    for tokens, now in enumerate(times, 1):
        delta = {"choices": [{"delta": {"content": "w"}}], "usage": {"completion_tokens": tokens}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.monotonic", lambda now=now: now)
            answer.take(delta)
    return answer


def test_times_are_those_that_the_client_saw() -> None:
    answer = served([1.5, 1.6, 1.7, 2.9], sent=1.0)
    assert (answer.sent, answer.first, answer.last, answer.tokens) == (1.0, 1.5, 2.9, 4)
    assert answer.tpot == pytest.approx(1.4 / 3)
    assert answer.longest_gap == pytest.approx(1.2)
    assert answer.text == "wwww"
    nothing = Answer(request())
    assert (nothing.first, nothing.longest_gap, nothing.tokens) == (math.inf, 0, 0)


def test_goodput_counts_what_was_in_time() -> None:
    every = [
        served([0.5, 0.6, 0.7]),
        served([0.5, 0.6, 1.1]),  # 0.3 s a token
        served([1.5, 1.6, 1.7]),  # 1.5 s to the first
        served([0.5]),  # no second token that could be late
        served([0.5, 0.6], error="HTTP 503"),
        Answer(request(), error="refused"),
    ]
    figures = answer_figures(every, 1.0, ttft_s=1.0, tpot_s=0.2)
    assert figures["seconds"] == pytest.approx(1.7)
    assert figures["goodput"] == pytest.approx(2 / 1.7)
    assert figures["met"] == pytest.approx(2 / 6)
    assert figures["failed"] == 2
    assert figures["tokens_per_s"] == pytest.approx(10 / 1.7)
    assert figures["tpot"] == pytest.approx(0.5 / 3)
    assert figures["ttft"] == pytest.approx(0.75)


def test_the_load_puts_all_long_answers_on_every_second_place() -> None:
    load = skewed_load(10)
    assert load == skewed_load(10), "the same in both phases"
    assert len({one.name for one in load}) == len(load)
    assert len({one.prompt for one in load[::2]}) == len(load) // 2
    assert {one.max_tokens for one in load[::2]} == {400}
    assert {one.max_tokens for one in load[1::2]} == {40}
    assert [one.arrives for one in load] == sorted(one.arrives for one in load)


async def test_both_phases_are_served_and_compared(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "load_tokenizer", lambda model: tokenizer)
    monkeypatch.setattr(comparison, "preemptions", lambda deployment: 3.0)  # of real engines
    for name in ("_ALONE_SECONDS", "_APART_SECONDS"):
        monkeypatch.setattr(comparison, name, 0.1)
    planner = {"name": "star", "prediction": False, "interval_seconds": 0.1}
    engines, deployment = await scripted(tokenizer, names(2), migration=planner)
    port, admin_port = free_ports(2)
    proxy = replace(deployment.proxy, port=port, admin_port=admin_port)
    try:
        table = await comparison.compared(replace(deployment, proxy=proxy), skewed_load(2))
    finally:
        for engine in engines.values():
            await engine.stop()
    label, still, moving = ([*column.cells] for column in table.columns)
    assert label[0] == "goodput, in time per minute" and len(label) == len(still) == len(moving)
    assert still[-3:] == ["0", "0", "0"], "preemptions, migrations, failures"
    assert (moving[-3], moving[-1]) == ("0", "0")


def server(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> TestServer:
    """An OpenAI-compatible server that answers like this."""
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer), web.get("/metrics", answer)])
    return TestServer(app)


async def test_a_load_is_sent_as_it_says_and_its_tokens_are_counted() -> None:
    asked: list[dict[str, Any]] = []

    async def answer(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        asked.append({**body, "name": http.headers["X-Request-Id"]})
        if body["seed"] == 9:
            return web.Response(status=503, text="no room")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        chunks: list[dict[str, Any]] = [
            {"choices": [{"delta": {"role": "assistant"}}], "usage": {"completion_tokens": 0}},
            {"choices": [{"delta": {"content": "Once"}}], "usage": {"completion_tokens": 1}},
            {"choices": [{"delta": {"content": ""}}], "usage": {"completion_tokens": 2}},
            {"choices": [{"delta": {"content": " é"}}], "usage": {"completion_tokens": 3}},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 3}},
        ]
        if body["seed"] == 8:
            del chunks[3:]
        for chunk in chunks:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    good, refused, broken = (Answer(request(seed, 0.05 * i)) for i, seed in enumerate((1, 9, 8)))
    async with server(answer) as there:
        url = str(there.make_url("")).rstrip("/")
        body = partial(chat_body, "smollm2", salt="salt")
        await serve_answers(url, [good, refused, broken], body)
    assert (good.text, good.tokens, good.finish_reason, good.error) == ("Once é", 3, "stop", "")
    assert "503: no room" in refused.error
    assert broken.error == "the stream ended before its request"
    assert broken.tokens == 2
    assert [one["name"] for one in asked] == ["long-1", "long-9", "long-8"]
    first = asked[0]
    assert first["messages"] == [{"role": "user", "content": "Tell me."}]
    assert (first["max_tokens"], first["seed"], first["cache_salt"]) == (7, 1, "salt")


async def test_a_fleets_clients_ask_for_one_answer_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_RAMP_SECONDS", "_BREATH_SECONDS"):
        monkeypatch.setattr(f"rescheduler.demo.fleet.{name}", 0.0)
    prompts: list[list[int]] = []
    together, enough = asyncio.Barrier(8), asyncio.Event()

    async def answer(http: web.Request) -> web.StreamResponse:
        prompts.append((await http.json())["prompt"])
        number = len(prompts)
        await together.wait()  # all eight ask at the same time
        if len(prompts) >= 40:
            enough.set()
        return web.Response(status=503 if number % 4 == 0 else 200, text="no room")

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer)])
    async with TestServer(app) as there:
        load = FleetLoad(str(there.make_url("")).rstrip("/"), "smollm2", 100, clients=8)
        serving = asyncio.create_task(load.run())
        await asyncio.wait(
            [serving, asyncio.create_task(enough.wait())], return_when="FIRST_COMPLETED"
        )
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert load.running == 0
    assert load.answered > 0 and load.failed > 0
    assert 40 - 8 <= load.answered + load.failed <= len(prompts)
    assert load.error == "HTTP 503: no room"
    assert all(100 <= len(prompt) <= 1_500 for prompt in prompts)
    assert {type(token) for prompt in prompts for token in prompt} == {int}
    assert max(map(max, prompts)) == 99


async def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    answer = Answer(request())
    await serve_answers("http://127.0.0.1:1", [answer], partial(chat_body, "smollm2", salt=""))
    assert "ClientConnectorError" in answer.error


async def test_a_metric_is_summed_over_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for through the proxy of the environment, which is not there."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    text = (
        "# TYPE vllm:num_preemptions_total counter\n"
        'vllm:num_preemptions_total{engine="0"} 3.0\n'
        'vllm:num_preemptions_total{engine="1"} 4.0\n'
        "vllm:num_preemptions_total_other 9.0\n"
    )

    async def answer(http: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    async with server(answer) as there:
        given = str(there.make_url("/metrics")), "vllm:num_preemptions_total"
        assert await asyncio.to_thread(metric_total, *given) == 7.0
        assert await asyncio.to_thread(metric_total, *given, engine="1") == 4.0
