"""The demonstration's load and figures; the whole of it is in the end-to-end tests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rescheduler.demo.demo import FleetLoad, skewed_load
from rescheduler.demo.demo_load import (
    LoadRequest,
    LoadRun,
    Objectives,
    ServedRequest,
    StreamChunk,
    load_figures,
    metric_total,
)


def request() -> LoadRequest:
    return LoadRequest("long-0", "Tell me.", max_tokens=4, seed=3, arrives=0.0)


def served(times: list[float], sent: float = 0.0, error: str = "") -> ServedRequest:
    """A request whose n-th token came at the n-th time."""
    pieces = [StreamChunk(n, f"w{n} ", time) for n, time in enumerate(times, 1)]
    return ServedRequest(request(), sent, pieces, "" if error else "stop", error)


def test_times_are_those_that_the_client_saw() -> None:
    one = served([1.5, 1.6, 1.7, 2.9], sent=1.0)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(1.4 / 3)
    assert one.longest_gap == pytest.approx(1.2)
    nothing = ServedRequest(request(), 0.0)
    assert (nothing.ttft, nothing.tpot, nothing.longest_gap, nothing.tokens) == (None, None, 0, 0)


def test_goodput_counts_what_was_in_time() -> None:
    every = [
        served([0.5, 0.6, 0.7]),
        served([0.5, 0.6, 1.1]),  # 0.3 s a token
        served([1.5, 1.6, 1.7]),  # 1.5 s to the first
        served([0.5]),  # no second token that could be late
        served([0.5, 0.6], error="HTTP 503"),
        ServedRequest(request(), 0.0, error="refused"),
    ]
    figures = load_figures(every, 10.0, Objectives(ttft_s=1.0, tpot_s=0.2))
    assert figures["goodput"] == pytest.approx(0.2)
    assert figures["met"] == pytest.approx(2 / 6)
    assert figures["failed"] == 2
    assert figures["throughput"] == pytest.approx(12 / 10)
    assert figures["tpot_p50"] == pytest.approx(0.1)
    assert figures["ttft_p50"] == pytest.approx(0.5)


def test_the_load_puts_all_long_answers_on_every_second_place() -> None:
    load = skewed_load()
    assert load == skewed_load(), "the same in both phases"
    assert len({one.name for one in load}) == len(load)
    assert len({one.prompt for one in load[::2]}) == len(load) // 2
    assert {one.max_tokens for one in load[::2]} == {400}
    assert {one.max_tokens for one in load[1::2]} == {40}
    assert [one.arrives for one in load] == sorted(one.arrives for one in load)


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

    load = [
        LoadRequest("a", "Hello", 7, 1, 0.0),
        LoadRequest("b", "Hello", 7, 9, 0.05),
        LoadRequest("c", "Hello", 7, 8, 0.1),
    ]
    async with server(answer) as there:
        url = str(there.make_url("")).rstrip("/")
        good, refused, broken = await LoadRun(url, "smollm2", load, "salt").run()
    assert (good.text, good.tokens, good.finish_reason, good.error) == ("Once é", 3, "stop", "")
    assert "503: no room" in refused.error
    assert broken.error == "the stream ended before its request"
    assert broken.tokens == 2
    assert [one["name"] for one in asked] == ["a", "b", "c"]
    first = asked[0]
    assert first["messages"] == [{"role": "user", "content": "Hello"}]
    assert (first["max_tokens"], first["seed"], first["cache_salt"]) == (7, 1, "salt")


async def test_a_fleets_clients_ask_for_one_answer_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_RAMP_SECONDS", "_BREATH_SECONDS"):
        monkeypatch.setattr(f"rescheduler.demo.demo.{name}", 0.0)
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
    run = LoadRun("http://127.0.0.1:1", "smollm2", [request()], "salt")
    (answer,) = await run.run()
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
