"""A slow engine is no dead one: what is late waits, and what is dead goes on elsewhere."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx
import pytest
from httpx_sse import aconnect_sse
from openai import AsyncOpenAI
from scripted_cluster import PROMPT, Cluster, cluster, text_of, tokens_of, until
from tokenizers import Tokenizer

from rescheduler.openai.openai_stream import EventReader

IMPATIENT = {"first_token_seconds": 0.2, "token_seconds": 0.2, "prefill_seconds": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    "moves": {},
    "pinned": {"watermarking": True},
    "direct": {"n": 2},
}


def in_service(it: Cluster) -> bool:
    return all(instance.breaker.closed for instance in it.proxy.cluster.all)


async def read(it: Cluster, body: dict[str, Any]) -> tuple[int, bytes]:
    """Return the status of an answer, and all of its bytes."""
    asked = {"model": "m", "prompt": PROMPT, "stream": True, **body}
    async with it.session.post(it.url + "/v1/completions", json=asked) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_whose_engine_holds_it_back_waits(tokenizer: Tokenizer, kind: str) -> None:
    """As vLLM's tool parsers do, and an engine with a long ``--stream-interval``."""
    async with cluster(tokenizer, **IMPATIENT) as it:
        for engine in it.decodes:
            engine.holds_from, engine.token_seconds = 2, 0.02
        body = {"max_tokens": 60, "return_token_ids": True, **KINDS[kind]}
        answers = await asyncio.gather(*(read(it, body) for _ in range(3)))
        for status, answer in answers:
            assert status == 200 and b"error" not in answer
            events = [json.loads(line[6:]) for line in answer.splitlines() if b"{" in line]
            assert tokens_of(events) == it.expected(60)
        assert in_service(it)
        assert sum(len(engine.bodies) for engine in it.decodes) == 3, "none was computed again"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_waits_behind_a_queue(tokenizer: Tokenizer, kind: str) -> None:
    async with cluster(tokenizer, **IMPATIENT) as it:
        for engine in it.decodes:
            engine.queue_seconds = 1.0
        answers = await asyncio.gather(
            *(read(it, {"max_tokens": 5, **KINDS[kind]}) for _ in range(4))
        )
        assert all(status == 200 and b"error" not in answer for status, answer in answers)
        assert in_service(it)
        assert sum(len(engine.bodies) for engine in it.decodes) == 4


async def test_a_prompt_that_takes_long_is_computed_once(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, **IMPATIENT) as it:
        prefill = it.engines["prefill-0"]
        prefill.answers_late = True
        asking = asyncio.create_task(read(it, {"max_tokens": 5}))
        for _ in range(20):
            await asyncio.sleep(0.05)
            prefill.steps += 1
        prefill.answers_late = False
        assert (await asking)[0] == 200
        assert len(prefill.bodies) == 1 and in_service(it)


async def test_a_whole_answer_comes_as_late_as_it_likes(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, **IMPATIENT) as it:
        for engine in it.decodes:
            engine.token_seconds = 0.02
        status, answer, _ = await it.post(
            {"model": "m", "prompt": PROMPT, "max_tokens": 50, "n": 2}
        )
        assert status == 200 and len(answer["choices"]) == 2
        assert in_service(it) and sum(len(engine.bodies) for engine in it.decodes) == 1


async def test_a_stream_goes_on_elsewhere_when_its_engine_has_it_no_more(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, **IMPATIENT) as it:

        async def at(tokens: int) -> None:
            if tokens == 10 and not lost:
                engine = next(engine for engine in it.decodes if engine.running)
                lost.append(engine)
                engine.stalls_at = 10
                engine.running.clear()
                engine.names.clear()

        lost: list[Any] = []
        await it.answered(30, at)
        assert in_service(it), "its engine lives"
        lost[0].stalls_at = 0


async def test_streams_leave_an_engine_that_ends_without_closing_them(
    tokenizer: Tokenizer,
) -> None:
    """As vLLM does after SIGTERM, for as long as its grace period lasts."""
    async with cluster(tokenizer, decodes=2) as it:

        async def at(tokens: int) -> None:
            if tokens == 10 and not left:
                engine = next(engine for engine in it.decodes if engine.running)
                left.append(engine)
                engine.stalls_at = 10
                await engine.stop_listening()

        left: list[Any] = []
        async with asyncio.timeout(20):
            await it.answered(30, at)
        left[0].stalls_at = 0


@pytest.mark.parametrize("kind", ["moves", "direct"])
@pytest.mark.parametrize("kills_at", [0, 2])
async def test_a_request_that_kills_is_refused_after_two_engines(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, kind: str, kills_at: int
) -> None:
    async with cluster(tokenizer, decodes=4, control_seconds=1.0) as it:
        for engine in it.decodes:
            engine.kills, engine.kills_at = "KILLS", kills_at
        body = {"prompt": f"{PROMPT} KILLS", "max_tokens": 40, **KINDS[kind]}
        status, answer = await read(it, body)
        if kind == "direct" and kills_at:  # what its client has got cannot go on elsewhere
            assert b'"code":502' in answer
        else:
            assert b'"code":422' in answer and b"UnprocessableEntityError" in answer
        assert status == (422 if kills_at == 0 else 200)
        if kind == "moves":
            assert sum(engine.lives for engine in it.decodes) == 4 + 2
            assert any("were lost" in record.getMessage() for record in caplog.records)
        await until(lambda: all(engine.lives and engine._control for engine in it.decodes))
        await until(lambda: in_service(it))
        assert (await read(it, {"max_tokens": 5}))[0] == 200


async def test_a_request_that_kills_late_is_refused_after_three_engines(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, decodes=4, control_seconds=1.0) as it:
        for engine in it.decodes:
            engine.kills, engine.kills_at = "KILLS", 40
        _, answer = await read(it, {"prompt": f"{PROMPT} KILLS", "max_tokens": 400})
        assert b'"code":422' in answer
        assert sum(engine.lives for engine in it.decodes) == 4 + 3
        await until(lambda: all(engine.lives and engine._control for engine in it.decodes))
        await until(lambda: in_service(it))


async def test_requests_that_share_an_engine_with_one_that_kills_are_served(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, decodes=4, control_seconds=1.0) as it:
        for engine in it.decodes:
            engine.kills, engine.token_seconds = "KILLS", 0.01
        killer = read(it, {"prompt": f"{PROMPT} KILLS", "max_tokens": 40})
        others = [it.answered(40, prompt=f"{PROMPT} {i}") for i in range(5)]
        answers = await asyncio.gather(*others, killer)
        assert answers[-1][0] == 422
        await until(lambda: in_service(it))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_silent_stream_gets_comments(tokenizer: Tokenizer, kind: str) -> None:
    async with cluster(tokenizer, keep_alive_seconds=0.1) as it:
        for engine in it.decodes:
            engine.queue_seconds = 1.0
        status, answer = await read(it, {"max_tokens": 5, **KINDS[kind]})
        assert status == 200
        first = answer.index(b"data: ")
        assert answer[:first].count(b": keep-alive\n\n") >= 3
        assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", KINDS)
async def test_comments_of_engines_are_passed_on(tokenizer: Tokenizer, kind: str) -> None:
    async with cluster(tokenizer) as it:
        for engine in it.decodes:
            engine.queue_seconds, engine.comment_seconds = 1.0, 0.1
        _, answer = await read(it, {"max_tokens": 5, **KINDS[kind]})
        assert answer[: answer.index(b"data: ")].count(b": engine\n\n") >= 3


async def test_an_error_within_the_first_seconds_has_its_status(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, keep_alive_seconds=0.5) as it:
        assert (await read(it, {"model": "other"}))[0] == 404
        for engine in it.decodes:
            engine.fails, engine.queue_seconds = 500, 0.0
        assert (await read(it, {}))[0] == 502


async def test_an_error_after_a_comment_is_an_event(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, decodes=1, keep_alive_seconds=0.1, pool_seconds=1.0) as it:
        engine = it.decodes[0]
        engine.says, engine.token_seconds = {"max_num_seqs": 1}, 0.05
        await until(lambda: it.proxy.cluster.decodes[0].slots == 1)
        occupying = asyncio.create_task(it.answered(100))
        await until(lambda: bool(engine.running))
        status, answer = await read(it, {})
        assert status == 200 and answer.startswith(b": keep-alive")
        assert b'"code":503' in answer and answer.endswith(b"data: [DONE]\n\n")
        await occupying


async def test_clients_of_messages_see_an_error_after_a_comment(tokenizer: Tokenizer) -> None:
    """They go by the names of events."""
    late = {"keep_alive_seconds": 0.05, "backoff_seconds": 1.0, "pool_seconds": 0.5}
    async with cluster(tokenizer, **late) as it:
        for engine in it.decodes:
            engine.fails = 500
        asked = {"model": "m", "max_tokens": 5, "messages": [], "stream": True}
        async with (
            httpx.AsyncClient() as plain,
            aconnect_sse(plain, "POST", it.url + "/v1/messages", json=asked) as source,
        ):
            events = [(event.event, json.loads(event.data)) async for event in source.aiter_sse()]
        ((name, data),) = events
        assert name == data["type"] == "error" and data["error"]["code"] in (502, 503)


async def test_real_clients_read_streams_with_comments(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, keep_alive_seconds=0.1) as it:
        for engine in it.decodes:
            engine.queue_seconds = 0.5
        expected = tokenizer.decode(it.expected(5))
        async with AsyncOpenAI(base_url=it.url + "/v1", api_key="-") as client:
            stream = await client.completions.create(
                model="m", prompt=PROMPT, max_tokens=5, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == expected
        asked = {"model": "m", "prompt": PROMPT, "max_tokens": 5, "stream": True}
        async with (
            httpx.AsyncClient() as plain,
            aconnect_sse(plain, "POST", it.url + "/v1/completions", json=asked) as source,
        ):
            events = [event.data async for event in source.aiter_sse()]
        assert events.pop() == "[DONE]"
        assert text_of([json.loads(data) for data in events]) == expected


@pytest.mark.parametrize("interval", [2, 7, 4000])
async def test_chunks_come_as_often_as_the_client_asks(tokenizer: Tokenizer, interval: int) -> None:
    async with cluster(tokenizer, **IMPATIENT) as it:
        for engine in it.decodes:
            engine.token_seconds = 0.01
        chunks = await it.stream(
            {
                "prompt": PROMPT,
                "max_tokens": 50,
                "stream_interval": interval,
                "stream_options": {"include_usage": True},
            }
        )
        assert tokens_of(chunks) == it.expected(50)
        assert text_of(chunks) == tokenizer.decode(it.expected(50))
        counts = [len(tokens_of([chunk])) for chunk in chunks if chunk["choices"]]
        assert counts[0] == 1 and all(count == interval for count in counts[1:-1])
        assert chunks[-1]["usage"]["completion_tokens"] == 50
        assert all("stream_interval" not in body for e in it.decodes for body in e.bodies)
        assert in_service(it)


async def test_joined_chunks_are_complete_after_a_failure(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        for engine in it.decodes:
            engine.breaks_at = 0
        it.decodes[0].breaks_at = it.decodes[1].breaks_at = 20

        async def heal() -> None:
            await until(lambda: any(request.generated_tokens >= 19 for request in it.requests()))
            await asyncio.sleep(0.05)
            for engine in it.decodes:
                engine.breaks_at = 0

        healing = asyncio.create_task(heal())
        chunks = await it.stream({"prompt": PROMPT, "max_tokens": 50, "stream_interval": 8})
        await healing
        assert tokens_of(chunks) == it.expected(50)


@pytest.mark.parametrize("kind", ["pinned", "direct"])
async def test_a_stream_without_its_end_is_a_failure(tokenizer: Tokenizer, kind: str) -> None:
    async with cluster(tokenizer) as it:
        for engine in it.decodes:
            engine.cuts_the_end = True
        _, answer = await read(it, {"max_tokens": 5, **KINDS[kind]})
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


async def test_an_engine_that_makes_no_step_fails(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, token_seconds=1.0, control_seconds=1.0) as it:

        async def at(tokens: int) -> None:
            if tokens == 10 and not hung:
                engine = next(engine for engine in it.decodes if engine.running)
                hung.append(engine)
                engine.hangs = True

        hung: list[Any] = []
        await it.answered(30, at)
        assert "no step" in it.proxy.cluster.instances[hung[0].name].evidence.why
        hung[0].hangs = False


async def test_an_engine_of_which_nothing_is_heard_gets_requests_last(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer) as it:
        silent = it.proxy.cluster.instances["decode-0"]
        silent.evidence._heard = silent.evidence._answered = -1e9
        assert silent.silent
        assert [one.name for one in it.proxy.cluster.dispatcher.usable] == ["decode-1"]
        for one in it.proxy.cluster.decodes:
            one.evidence._heard = one.evidence._answered = -1e9
        assert len(it.proxy.cluster.dispatcher.usable) == 2


class TestWithoutControlSockets:
    """Engines that somebody else started."""

    async def test_a_stream_that_is_held_back_waits_while_its_metrics_go_on(
        self, tokenizer: Tokenizer
    ) -> None:
        async with cluster(tokenizer, decodes=1, **IMPATIENT) as it:
            it.proxy.cluster.decodes[0].control = None
            engine = it.decodes[0]
            engine.holds_from, engine.token_seconds = 2, 0.02
            status, answer = await read(it, {"max_tokens": 60})
            assert status == 200 and b"error" not in answer
            assert len(engine.bodies) == 1 and in_service(it)

    async def test_streams_that_are_asked_for_one_after_the_other_wait(
        self, tokenizer: Tokenizer
    ) -> None:
        """Between two looks at the metrics there may be no step, which proves nothing."""
        async with cluster(tokenizer, decodes=1) as it:
            instance, engine, watch = (
                it.proxy.cluster.decodes[0],
                it.decodes[0],
                it.proxy.flow.watch,
            )
            instance.control, engine.stalls_at = None, 5
            asking = [asyncio.create_task(read(it, {"max_tokens": 8})) for _ in range(2)]
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
            assert len(engine.bodies) == 2 and in_service(it)

    async def test_a_stream_without_any_sign_ends_after_its_allowance(
        self, tokenizer: Tokenizer
    ) -> None:
        async with cluster(tokenizer, decodes=1, attempts=2, **IMPATIENT) as it:
            it.proxy.cluster.decodes[0].control = None
            engine = it.decodes[0]
            engine.metrics, engine.stalls_at = False, 5
            async with asyncio.timeout(30):
                _, answer = await read(it, {"max_tokens": 60})
            assert b"the engines failed to serve it" in answer
            engine.stalls_at = 0


async def test_a_vanished_machine_is_noticed_by_the_kernel(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        for engine in it.decodes:
            engine.token_seconds = 0.05
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
    from rescheduler.openai.openai_request import ClientRequest
    from rescheduler.placement.live_request import LiveRequest

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
