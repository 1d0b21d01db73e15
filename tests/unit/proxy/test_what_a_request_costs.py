"""What a request costs its client: each answer, and the tokens that its engine counted."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from clients import BODY
from scripted_cluster import Cluster, cluster, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.coordination.messages import Ended, Report, decode, encode
from rescheduler.openai.openai_request import COMPLETIONS, MOST_ANSWERS
from rescheduler.openai.openai_response import read_usage
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.placeable import Placeable


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"n": 3}, 3),
        ({"n": "064"}, MOST_ANSWERS),
        ({"n": "6_4"}, MOST_ANSWERS),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": ["x" * 300_000, "y" * 300_000]}, 2),
        ({"prompt": [[1] * 100_000, [2] * 100_000, [3]]}, 3),
        ({"n": 10**9}, MOST_ANSWERS),
    ],
)
def test_each_answer_is_counted(fields: dict[str, Any], answers: int) -> None:
    """Where an engine may read a number that the proxy does not, as many as there may be."""
    assert read_request(COMPLETIONS, json.dumps({**BODY, **fields}).encode()).answers == answers


@pytest.mark.parametrize(
    ("path", "fields", "answers"),
    [
        ("/v1/chat/completions/batch", {"messages": [[{"content": "a"}]] * 5, "n": 2}, 10),
        ("/v1/chat/completions/batch", {"messages": [[]], "n": "6_4"}, MOST_ANSWERS),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
        ("/v1/embeddings", {"input": "a, b"}, 1),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 4}, 1),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 4}, 1),
        ("/rerank", {"query": "a", "documents": [{"text": "b"}] * 7}, 7),
        ("/score", {"text_1": [], "text_2": ["a", "b"]}, 2),
        ("/generative_scoring", {"query": "a", "items": [[1], [2]]}, 2),
    ],
)
def test_each_item_of_a_forwarded_request_is_counted(
    path: str, fields: dict[str, Any], answers: int
) -> None:
    body = json.dumps({"model": "m", **fields}).encode()
    assert read_forwarded(path, body).answers == answers


def counting(it: Cluster, usage: Any) -> None:
    """Have the engines answer as a whole, and say what it took."""

    async def script(http: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": usage})

    it.set_decodes(script=script)


@pytest.mark.parametrize(
    ("path", "usage", "service"),
    [
        ("/v1/completions", {"prompt_tokens": 9, "completion_tokens": 4000}, 8009),
        ("/v1/chat/completions/batch", {"prompt_tokens": 90, "completion_tokens": 50_000}, 100_090),
        ("/v1/messages", {"input_tokens": 9, "output_tokens": 700}, 1409),
        (
            "/v1/messages",
            {"input_tokens": 0, "output_tokens": 1, "cache_read_input_tokens": 90},
            92,
        ),
        ("/v1/embeddings", {"prompt_tokens": 9000, "completion_tokens": None}, 9000),
    ],
)
@pytest.mark.cluster(decodes=1)
async def test_an_answer_that_comes_whole_costs_what_its_engine_counted(
    it: Cluster, path: str, usage: dict[str, Any], service: float
) -> None:
    counting(it, usage)
    body = {**BODY, "n": 2, "messages": [], "input": "a"}
    status, _, _ = await it.post(body, path)
    assert status == 200
    assert it.proxy.cluster.accounts.named("127.0.0.1").served(frozenset()) == service


@pytest.mark.cluster(decodes=1)
async def test_embeddings_as_bytes_come_with_what_describes_and_counts_them(it: Cluster) -> None:
    items = [{"index": i, "start": 0, "end": 4, "shape": [2]} for i in range(2_000)]
    metadata = json.dumps({"data": items, "usage": {"prompt_tokens": 9000, "total_tokens": 9000}})

    async def script(http: web.Request) -> web.StreamResponse:
        kind = "application/octet-stream"
        return web.Response(body=b"\0\1\2\3", content_type=kind, headers={"metadata": metadata})

    it.set_decodes(script=script)
    body = {"model": BODY["model"], "input": "a", "encoding_format": "bytes"}
    relaxed = {"max_field_size": 1 << 20}
    async with (
        aiohttp.ClientSession(**relaxed) as session,
        session.post(it.url + "/v1/embeddings", json=body) as response,
    ):
        assert (response.status, await response.read()) == (200, b"\0\1\2\3")
        assert response.headers["metadata"] == metadata
    assert it.proxy.cluster.accounts.named("127.0.0.1").served(frozenset()) == 9000


@pytest.mark.cluster(decodes=1)
async def test_an_answer_that_is_too_large_to_be_kept_costs_the_time_that_it_took(
    it: Cluster,
) -> None:
    it.proxy.cluster.step.seconds = 0.001

    async def script(http: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        usage = {"prompt_tokens": 9, "completion_tokens": 500}
        return web.json_response({"choices": [{"text": "a" * (9 << 20)}], "usage": usage})

    it.set_decodes(script=script)
    async with it.session.post(it.url + "/v1/completions", json={**BODY, "n": 2}) as response:
        assert len(await response.read()) > 9 << 20
    account = it.proxy.cluster.accounts.named("127.0.0.1")
    await until(lambda: not account.charges)
    assert account.served(frozenset()) >= 2 * 2 * BODY["max_tokens"]  # both answers in full


@pytest.mark.parametrize(("interval", "most"), [(100, 900), (10**12, 900), (100, None)])
async def test_chunks_of_several_tokens_cost_what_they_may_hold(
    tokenizer: Tokenizer, interval: int, most: int | None
) -> None:
    """Else an answer of thousands of tokens would cost as many as it has chunks."""
    async with cluster(tokenizer, 1) as it:
        it.decodes[0].token_seconds = 0.001
        body = {**BODY, "n": 2, "stream": True, "stream_interval": interval, "max_tokens": most}
        async with it.session.post(it.url + "/v1/completions", json=body) as response:
            for _ in range(20):
                await response.content.readline()
        await until(lambda: not it.proxy.cluster.accounts.named("127.0.0.1").charges)
        served = it.proxy.cluster.accounts.named("127.0.0.1").served(frozenset())
        assert 2 * 100 < served <= 2 * 2 * (most or 4_096) + 100


async def test_who_leaves_before_its_answers_are_counted_has_its_forecasts_corrected(
    tokenizer: Tokenizer,
) -> None:
    order = {"name": "shortest", "fairness": 1.0}
    async with cluster(tokenizer, 1, order=order) as it:
        it.decodes[0].token_seconds = 0.001
        body = {**BODY, "n": 2, "stream": True, "stream_interval": 100, "max_tokens": 3_000}
        async with it.session.post(it.url + "/v1/completions", json=body) as response:
            for _ in range(60):
                await response.content.readline()
        account = it.proxy.cluster.accounts.named("127.0.0.1")
        await until(lambda: not account.charges)
        assert account.correction > 1.1


class HidesItsTokens(ScriptedEngine):
    """Reasons for half a second, of which its client sees nothing."""

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n')
        await asyncio.sleep(0.5)
        await response.write(b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": ')
        await response.write(b'"stop"}]}\n\ndata: [DONE]\n\n')
        return response


async def test_reasoning_that_is_not_shown_is_not_free(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, 1, kind=HidesItsTokens) as it:
        it.proxy.cluster.step.seconds = 0.001
        hidden = {"messages": [{"role": "user", "content": "a"}], "include_reasoning": False}
        body = {"model": "m", "stream": True, "max_tokens": 2000, **hidden}
        async with it.session.post(it.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200 and await response.read()
        await until(lambda: not it.proxy.cluster.accounts.named("127.0.0.1").charges)
        assert it.proxy.cluster.accounts.named("127.0.0.1").served(frozenset()) > 2 * 300


class FailsOnce(ScriptedEngine):
    """Answers 500 after a while, and at once the next time."""

    failed = 0

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        FailsOnce.failed += 1
        if FailsOnce.failed == 1:
            await asyncio.sleep(0.3)
            return web.json_response({"error": {"message": "broken"}}, status=500)
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 9}})


async def test_what_an_engine_did_wrong_costs_its_client_nothing(tokenizer: Tokenizer) -> None:
    FailsOnce.failed = 0
    async with cluster(tokenizer, 2, kind=FailsOnce) as it:
        it.proxy.cluster.step.seconds = 0.001
        status, _, _ = await it.post({**BODY, "n": 64, "max_tokens": 2000})
        assert (status, FailsOnce.failed) == (200, 2)
        assert it.proxy.cluster.accounts.named("127.0.0.1").served(frozenset()) <= 50, "a place"


class NeverEnds(ScriptedEngine):
    async def _generate(self, http: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError


async def test_who_leaves_before_the_end_pays_for_what_was_computed(tokenizer: Tokenizer) -> None:
    """Sixty-four answers to a prompt that looks like a short one, and none of them read."""
    async with cluster(tokenizer, 1, kind=NeverEnds) as it:
        cluster_of = it.proxy.cluster
        cluster_of.step.seconds = 0.001
        account = cluster_of.accounts.named("127.0.0.1")
        asking = asyncio.create_task(it.post({**BODY, "n": 64, "max_tokens": 2000}))
        await until(lambda: bool(account.charges))
        await asyncio.sleep(0.3)
        asking.cancel()
        await until(lambda: not account.charges)
        assert account.served(frozenset()) > 2 * 64 * 200


def test_the_largest_counts_fit_into_a_report() -> None:
    most = 1 << 38
    usage = dict.fromkeys(("input_tokens", "output_tokens", "cache_read_input_tokens"), most)
    counted = read_usage(json.dumps({"usage": usage}))
    assert counted is not None
    request = Placeable("r")
    request.was_counted(*counted)
    assert request.counted is not None
    ended = Ended(1, True, 1, False, request.counted)
    report = Report("s", 1, "i", 0, "d", ended=[ended])
    assert decode(encode(report), Report) == report


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": -1}, {"prompt_tokens": 2**60}, {"prompt_tokens": "9"}, []]
)
@pytest.mark.cluster(decodes=1)
async def test_counts_that_cannot_be_are_not_believed(it: Cluster, usage: Any) -> None:
    counting(it, usage)
    status, answer, _ = await it.post({**BODY, "n": 2})
    assert (status, answer["usage"]) == (200, usage)
    assert 0 < it.proxy.cluster.accounts.named("127.0.0.1").served(frozenset()) < 10_000


@pytest.mark.cluster(decodes=1)
async def test_a_prompt_of_token_ids_costs_its_length_from_the_start(it: Cluster) -> None:
    placed: list[Placeable] = []
    accounts = it.proxy.cluster.accounts
    asking = asyncio.create_task(it.post({**BODY, "prompt": [1] * 14_000, "n": 2}))
    await until(lambda: bool(placed.extend(accounts.named("127.0.0.1").charges) or placed))
    assert accounts.named("127.0.0.1").served(frozenset()) >= 14_000
    asking.cancel()
