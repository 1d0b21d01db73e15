"""A slow engine is no dead one, and only a request that kills is refused; all others go on."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx
import pytest
from httpx_sse import ServerSentEvent, aconnect_sse
from openai import AsyncOpenAI
from scripted_cluster import PROMPT, Cluster, cluster, text_of, tokens_of, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.openai.openai_request import ClientRequest
from rescheduler.openai.openai_stream import EventReader
from rescheduler.placement.live_request import LiveRequest

IMPATIENT = {"first_token_seconds": 0.2, "token_seconds": 0.2, "prefill_seconds": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    "moves": {},
    "pinned": {"watermarking": True},
    "direct": {"n": 2},
}


async def read(it: Cluster, **body: Any) -> tuple[int, bytes]:
    """Return the status of a stream, and all of its bytes."""
    return await it.read({"model": "m", "prompt": PROMPT, "stream": True, **body})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cluster(**IMPATIENT)
async def test_a_stream_whose_engine_holds_it_back_waits(it: Cluster, kind: str) -> None:
    """As vLLM's tool parsers do, and an engine with a long ``--stream-interval``."""
    it.set_decodes(holds_from=2, token_seconds=0.02)
    body = {"max_tokens": 60, "return_token_ids": True, **KINDS[kind]}
    answers = await asyncio.gather(*(read(it, **body) for _ in range(3)))
    for status, answer in answers:
        assert status == 200 and b"error" not in answer
        events = [json.loads(line[6:]) for line in answer.splitlines() if b"{" in line]
        assert tokens_of(events) == it.expected(60)
    assert it.in_service
    assert len(it.asked) == 3, "none was computed again"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cluster(**IMPATIENT)
async def test_a_stream_waits_behind_a_queue(it: Cluster, kind: str) -> None:
    it.set_decodes(queue_seconds=1.0)
    answers = await asyncio.gather(*(read(it, max_tokens=5, **KINDS[kind]) for _ in range(4)))
    assert all(status == 200 and b"error" not in answer for status, answer in answers)
    assert it.in_service
    assert len(it.asked) == 4


@pytest.mark.cluster(**IMPATIENT)
async def test_a_prompt_that_takes_long_is_computed_once(it: Cluster) -> None:
    prefill = it.engines["prefill-0"]
    prefill.answers_late = True
    asking = asyncio.create_task(read(it, max_tokens=5))
    for _ in range(20):
        await asyncio.sleep(0.05)
        prefill.steps += 1
    prefill.answers_late = False
    assert (await asking)[0] == 200
    assert len(prefill.bodies) == 1 and it.in_service


@pytest.mark.cluster(**IMPATIENT)
async def test_a_whole_answer_comes_as_late_as_it_likes(it: Cluster) -> None:
    it.set_decodes(token_seconds=0.02)
    status, answer, _ = await it.post({"model": "m", "prompt": PROMPT, "max_tokens": 50, "n": 2})
    assert status == 200 and len(answer["choices"]) == 2
    assert it.in_service and len(it.asked) == 1


@pytest.mark.cluster(**IMPATIENT)
async def test_a_stream_goes_on_elsewhere_when_its_engine_has_it_no_more(it: Cluster) -> None:
    async def forget(engine: ScriptedEngine) -> None:
        engine.stalls_at = 10
        engine.running.clear()
        engine.names.clear()

    _, engine = await it.answered_despite(30, forget)
    assert it.in_service, "its engine lives"
    engine.stalls_at = 0


async def test_streams_leave_an_engine_that_ends_without_closing_them(it: Cluster) -> None:
    """As vLLM does after SIGTERM, for as long as its grace period lasts."""

    async def leave(engine: ScriptedEngine) -> None:
        engine.stalls_at = 10
        await engine.stop_listening()

    async with asyncio.timeout(20):
        _, engine = await it.answered_despite(30, leave)
    engine.stalls_at = 0


@pytest.mark.parametrize(
    ("kind", "kills_at", "code", "lost"),
    [
        ("moves", 0, 422, 2),
        ("moves", 2, 422, 2),
        ("moves", 40, 422, 3),  # late
        ("direct", 0, 422, None),
        ("direct", 2, 502, None),  # what its client has got cannot go on elsewhere
    ],
)
@pytest.mark.cluster(decodes=4, control_seconds=1.0)
async def test_a_request_that_kills_is_refused_after_two_or_three_engines(
    it: Cluster,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    kills_at: int,
    code: int,
    lost: int | None,
) -> None:
    it.set_decodes(kills="KILLS", kills_at=kills_at)
    status, answer = await read(it, prompt=f"{PROMPT} KILLS", max_tokens=400, **KINDS[kind])
    assert f'"code":{code}'.encode() in answer
    assert (b"UnprocessableEntityError" in answer) is (code == 422)
    assert status == (422 if kills_at == 0 else 200)
    if lost is not None:
        assert sum(engine.lives for engine in it.decodes) == 4 + lost
        assert any("were lost" in record.getMessage() for record in caplog.records)
    await until(lambda: all(engine.lives and engine._control for engine in it.decodes))
    await until(lambda: it.in_service)
    assert (await read(it, max_tokens=5))[0] == 200


@pytest.mark.cluster(decodes=4, control_seconds=1.0)
async def test_requests_that_share_an_engine_with_one_that_kills_are_served(it: Cluster) -> None:
    it.set_decodes(kills="KILLS", token_seconds=0.01)
    killer = read(it, prompt=f"{PROMPT} KILLS", max_tokens=40)
    others = [it.answered(40, prompt=f"{PROMPT} {i}") for i in range(5)]
    answers = await asyncio.gather(*others, killer)
    assert answers[-1][0] == 422
    await until(lambda: it.in_service)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cluster(keep_alive_seconds=0.1)
async def test_a_silent_stream_gets_comments(it: Cluster, kind: str) -> None:
    it.set_decodes(queue_seconds=1.0)
    status, answer = await read(it, max_tokens=5, **KINDS[kind])
    assert status == 200
    first = answer.index(b"data: ")
    assert answer[:first].count(b": keep-alive\n\n") >= 3
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", KINDS)
async def test_comments_of_engines_are_passed_on(it: Cluster, kind: str) -> None:
    it.set_decodes(queue_seconds=1.0, comment_seconds=0.1)
    _, answer = await read(it, max_tokens=5, **KINDS[kind])
    assert answer[: answer.index(b"data: ")].count(b": engine\n\n") >= 3


@pytest.mark.cluster(keep_alive_seconds=0.5)
async def test_an_error_within_the_first_seconds_has_its_status(it: Cluster) -> None:
    assert (await read(it, model="other"))[0] == 404
    it.set_decodes(fails=500, queue_seconds=0.0)
    assert (await read(it))[0] == 502


@pytest.mark.cluster(decodes=1, keep_alive_seconds=0.1, pool_seconds=1.0)
async def test_an_error_after_a_comment_is_an_event(it: Cluster) -> None:
    engine = it.decodes[0]
    engine.token_seconds = 0.05
    await it.resized(1)
    occupying = asyncio.create_task(it.answered(100))
    await until(lambda: bool(engine.running))
    status, answer = await read(it)
    assert status == 200 and answer.startswith(b": keep-alive")
    assert b'"code":503' in answer and answer.endswith(b"data: [DONE]\n\n")
    await occupying


async def sse_of(url: str, **asked: Any) -> list[ServerSentEvent]:
    """Return the events of a stream, as a client reads them."""
    body = {"model": "m", "max_tokens": 5, "stream": True, **asked}
    async with httpx.AsyncClient() as plain, aconnect_sse(plain, "POST", url, json=body) as source:
        return [event async for event in source.aiter_sse()]


@pytest.mark.cluster(keep_alive_seconds=0.05, backoff_seconds=1.0, pool_seconds=0.5)
async def test_clients_of_messages_see_an_error_after_a_comment(it: Cluster) -> None:
    """They go by the names of events."""
    it.set_decodes(fails=500)
    (event,) = await sse_of(it.url + "/v1/messages", messages=[])
    data = json.loads(event.data)
    assert event.event == data["type"] == "error" and data["error"]["code"] in (502, 503)


@pytest.mark.cluster(keep_alive_seconds=0.1)
async def test_real_clients_read_streams_with_comments(it: Cluster) -> None:
    it.set_decodes(queue_seconds=0.5)
    expected = it.tokenizer.decode(it.expected(5))
    async with AsyncOpenAI(base_url=it.url + "/v1", api_key="-") as client:
        stream = await client.completions.create(
            model="m", prompt=PROMPT, max_tokens=5, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == expected
    events = [event.data for event in await sse_of(it.url + "/v1/completions", prompt=PROMPT)]
    assert events.pop() == "[DONE]"
    assert text_of([json.loads(data) for data in events]) == expected


@pytest.mark.parametrize("interval", [2, 7, 4000])
@pytest.mark.cluster(**IMPATIENT)
async def test_chunks_come_as_often_as_the_client_asks(it: Cluster, interval: int) -> None:
    it.set_decodes(token_seconds=0.01)
    chunks = await it.stream(
        {
            "prompt": PROMPT,
            "max_tokens": 50,
            "stream_interval": interval,
            "stream_options": {"include_usage": True},
        }
    )
    assert tokens_of(chunks) == it.expected(50)
    assert text_of(chunks) == it.tokenizer.decode(it.expected(50))
    counts = [len(tokens_of([chunk])) for chunk in chunks if chunk["choices"]]
    assert counts[0] == 1 and all(count == interval for count in counts[1:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 50
    assert all("stream_interval" not in body for e in it.decodes for body in e.bodies)
    assert it.in_service


async def test_joined_chunks_are_complete_after_a_failure(it: Cluster) -> None:
    it.set_decodes(breaks_at=20)

    async def heal() -> None:
        await until(lambda: any(request.generated_tokens >= 19 for request in it.requests()))
        await asyncio.sleep(0.05)
        it.set_decodes(breaks_at=0)

    healing = asyncio.create_task(heal())
    chunks = await it.stream({"prompt": PROMPT, "max_tokens": 50, "stream_interval": 8})
    await healing
    assert tokens_of(chunks) == it.expected(50)


@pytest.mark.parametrize("kind", ["pinned", "direct"])
async def test_a_stream_without_its_end_is_a_failure(it: Cluster, kind: str) -> None:
    it.set_decodes(cuts_the_end=True)
    _, answer = await read(it, max_tokens=5, **KINDS[kind])
    assert b"the engines failed to serve it" in answer


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_read_however_their_lines_end(end: bytes, size: int) -> None:
    sent = b"".join([b": hello", end, b'data: {"a": 1}', end, b"data: [DONE]", end])
    reader, events, comments = EventReader(), [], []
    for i in range(0, len(sent), size):
        events += reader.feed(sent[i : i + size])
        comments += reader.comments
    assert events == [b'{"a": 1}', b"[DONE]"]
    assert comments == [b": hello\n\n"]


@pytest.mark.cluster(token_seconds=1.0, control_seconds=1.0)
async def test_an_engine_that_makes_no_step_fails(it: Cluster) -> None:
    async def hang(engine: ScriptedEngine) -> None:
        engine.hangs = True

    _, engine = await it.answered_despite(30, hang)
    assert "no step" in it.proxy.cluster.instances[engine.name].evidence.why
    engine.hangs = False


async def test_an_engine_of_which_nothing_is_heard_gets_requests_last(it: Cluster) -> None:
    silent = it.proxy.cluster.instances["decode-0"]
    silent.evidence._heard = silent.evidence._answered = -1e9
    assert silent.silent
    assert [one.name for one in it.proxy.cluster.dispatcher.usable] == ["decode-1"]
    for one in it.proxy.cluster.decodes:
        one.evidence._heard = one.evidence._answered = -1e9
    assert len(it.proxy.cluster.dispatcher.usable) == 2


class TestWithoutControlSockets:
    """Engines that somebody else started."""

    @pytest.mark.cluster(decodes=1, **IMPATIENT)
    async def test_a_stream_that_is_held_back_waits_while_its_metrics_go_on(
        self, it: Cluster
    ) -> None:
        it.proxy.cluster.decodes[0].control = None
        engine = it.decodes[0]
        engine.holds_from, engine.token_seconds = 2, 0.02
        status, answer = await read(it, max_tokens=60)
        assert status == 200 and b"error" not in answer
        assert len(engine.bodies) == 1 and it.in_service

    @pytest.mark.cluster(decodes=1)
    async def test_streams_that_are_asked_for_one_after_the_other_wait(self, it: Cluster) -> None:
        """Between two looks at the metrics there may be no step, which proves nothing."""
        instance, engine, watch = it.proxy.cluster.decodes[0], it.decodes[0], it.proxy.flow.watch
        instance.control, engine.stalls_at = None, 5
        asking = [asyncio.create_task(read(it, max_tokens=8)) for _ in range(2)]
        await until(lambda: sum(one.generated_tokens for one in it.requests()) == 10)
        await watch._by_metrics(instance)
        engine.steps += 1
        for wait in watch._waits:
            wait.evidence.held(-1000.0)  # nothing has come for so long
        for wait in list(watch._waits):
            await watch._ask(instance, [wait])
        engine.stalls_at = 0
        for status, answer in await asyncio.gather(*asking):
            assert status == 200 and b'"error"' not in answer
        assert len(engine.bodies) == 2 and it.in_service

    @pytest.mark.cluster(decodes=1, attempts=2, **IMPATIENT)
    async def test_a_stream_without_any_sign_ends_after_its_allowance(self, it: Cluster) -> None:
        it.proxy.cluster.decodes[0].control = None
        engine = it.decodes[0]
        engine.metrics, engine.stalls_at = False, 5
        async with asyncio.timeout(30):
            _, answer = await read(it, max_tokens=60)
        assert b"the engines failed to serve it" in answer
        engine.stalls_at = 0


async def test_a_vanished_machine_is_noticed_by_the_kernel(it: Cluster) -> None:
    it.set_decodes(token_seconds=0.05)
    asking = asyncio.create_task(it.answered(20))
    await until(lambda: any(engine.running for engine in it.decodes))
    connector = it.proxy.cluster.upstream._session.connector
    assert isinstance(connector, aiohttp.TCPConnector)
    held = [protocol.transport for protocol in connector._acquired]
    assert held
    for transport in held:
        assert transport is not None
        connection = transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    await asking


async def test_many_that_wait_for_one_engine_are_judged_at_once(tokenizer: Tokenizer) -> None:
    """What is ahead of them is counted once for all."""
    counted = 0

    class Counting(LiveRequest):
        @property
        def context_tokens(self) -> int:
            nonlocal counted
            counted += 1
            return 1

    async with cluster(tokenizer, decodes=1) as it, AsyncExitStack() as stack:
        instance, placements = it.proxy.cluster.decodes[0], it.proxy.cluster.placements
        client = ClientRequest("/v1/completions", {}, 1, None, True, 5)
        requests = [
            Counting(str(i), str(i), client, {}, 0.0, tokenizer, placements) for i in range(300)
        ]
        for request in requests:
            placements.put(request, instance)
            await stack.enter_async_context(it.proxy.flow.watch.over(request, instance, 0.2))
        await until(lambda: not any(one.evidence.is_due(0.0) for one in it.proxy.flow.watch._waits))
        counted = 0
        await it.proxy.flow.watch._ask(instance, list(it.proxy.flow.watch._waits))
        assert 0 < counted < 20 * len(requests)
        for request in requests:
            placements.put(request, None)


async def served_beside_a_killer(it: Cluster, others: int, **body: Any) -> None:
    """Refuse a request that kills, and serve all others that come with it."""
    it.set_decodes(kills="KILLS", kills_at=2, token_seconds=0.01)
    killer = read(it, max_tokens=40, prompt=f"{PROMPT} KILLS", **body)
    innocent = [read(it, max_tokens=40, prompt=f"{PROMPT} {i}", **body) for i in range(others)]
    refused, *answers = await asyncio.gather(killer, *innocent)
    assert b'"code":422' in refused[1]
    for status, answer in answers:
        assert status == 200 and b'"error"' not in answer


@pytest.mark.cluster(decodes=3, control_seconds=1.0)
async def test_an_adapter_on_a_single_engine_is_tried_apart_there(it: Cluster) -> None:
    having = [it.engines["decode-1"], it.engines["prefill-0"]]
    for engine in having:
        engine.models = ["m", "lora"]
    instances = it.proxy.cluster.instances
    await until(
        lambda: all(
            one.models is not None and one.serves("lora") is (it.engines[name] in having)
            for name, one in instances.items()
        )
    )
    await served_beside_a_killer(it, 1, model="lora")


@pytest.mark.cluster(control_seconds=1.0, breaker_seconds=2.0)
async def test_requests_are_tried_apart_on_an_engine_that_drains(it: Cluster) -> None:
    """It takes them while no other one is in service."""
    it.proxy.cluster.instances["decode-0"].drained = True
    await served_beside_a_killer(it, 8)


@pytest.mark.cluster(control_seconds=1.0, pool_seconds=1.5)
async def test_suspects_are_not_refused_for_being_many(it: Cluster) -> None:
    """Each has its turn, however long that takes."""
    it.set_decodes(token_seconds=0.2)  # none ends before so many run
    lost = it.engines["decode-1"]
    asking = [
        asyncio.create_task(read(it, max_tokens=40, prompt=f"{PROMPT} {i}")) for i in range(24)
    ]
    await until(lambda: len(lost.running) >= 8)
    it.set_decodes(token_seconds=0.01)
    await lost.stop()
    for status, answer in await asyncio.gather(*asking):
        assert status == 200 and b'"error"' not in answer
    await lost.start()


@pytest.mark.cluster(decodes=3, control_seconds=1.0)
async def test_a_suspect_that_is_turned_away_is_tried_elsewhere(it: Cluster) -> None:
    it.set_decodes(kills="KILLS", token_seconds=0.01)
    it.engines["decode-1"].kills = it.engines["decode-2"].kills = ""
    it.engines["decode-1"].fails = 429
    for name in ("decode-1", "decode-2"):
        it.proxy.cluster.instances[name].drained = True
    asking = asyncio.create_task(read(it, max_tokens=40, prompt=f"{PROMPT} KILLS"))
    await until(lambda: len(it.engines["decode-0"].bodies) > 0)
    for name in ("decode-1", "decode-2"):
        it.proxy.cluster.instances[name].drained = False
    assert (await asking)[0] == 200


@pytest.mark.cluster(decodes=4, control_seconds=1.0, token_seconds=0.5)
async def test_a_request_that_hangs_engines_is_refused_after_two(it: Cluster) -> None:
    hung: list[str] = []

    async def hang() -> None:
        while True:
            for engine in it.decodes:
                contexts = [running.context for running in engine.running.values()]
                if any("KILLS" in it.tokenizer.decode(context) for context in contexts):
                    engine.hangs = True
                    hung.append(engine.name)
            await asyncio.sleep(0.001)

    hanging = asyncio.create_task(hang())
    status, answer = await read(it, max_tokens=40, prompt=f"{PROMPT} KILLS")
    hanging.cancel()
    it.set_decodes(hangs=False)
    assert status in (200, 422) and b'"code":422' in answer
    assert len(set(hung)) == 2


@pytest.mark.cluster(control_seconds=0.3, silent_seconds=1.0, token_seconds=0.5)
async def test_an_engine_that_is_stopped_behind_its_http_server_fails(it: Cluster) -> None:
    stopped, instance = it.decodes[0], it.proxy.cluster.instances["decode-0"]
    await until(lambda: instance.evidence.steps >= 0)
    stopped.deaf = True
    await until(lambda: not instance.breaker.closed)
    assert "only its HTTP server answers" in instance.evidence.why
    stopped.deaf = False
    await until(lambda: instance.breaker.closed)
