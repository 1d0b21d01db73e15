"""Chats with tools on real engines: what moves, or loses its engine, is told as what stays.

The small model calls no tools by itself: a grammar makes it.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from proxying import CHAT, served
from running_deployment import ENGINE, RunningDeployment, patient, running

from rescheduler.engines.launch_local import local_deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[a-z ]{20,40}"\}\}\n</tool_call>'
ASKED = {
    "messages": [{"role": "user", "content": "How is the weather in the towns by the sea?"}],
    "tools": [TOOL],
    "temperature": 0,
    "max_tokens": 300,
    "structured_outputs": {"regex": f"[A-Z][a-z ]{{10,30}}: {CALL}\\n{CALL}"},
    "logprobs": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDeployment]:
    folder = tmp_path_factory.mktemp("tools")
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options = replace(ENGINE, checkpoint=None, arguments=flags)
    with running(patient(local_deployment("smollm2", options)), folder) as engines:
        yield engines


def said(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client reads in a stream, the ids of calls aside."""
    content, logprobs, calls, end = "", [], {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            logprobs += (choice.get("logprobs") or {}).get("content") or []
            end = choice.get("finish_reason") or end
            for call in choice["delta"].get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                known["id"] += call.get("id") or ""
                known["name"] += call["function"].get("name") or ""
                known["arguments"] += call["function"].get("arguments") or ""
    assert len({call.pop("id") for call in calls.values()}) == len(calls)
    tokens = [(one["token"], pytest.approx(one["logprob"], abs=1e-3)) for one in logprobs]
    return {
        "content": content,
        "calls": calls,
        "tokens": tokens,
        "end": end,
        "usage": chunks[-1]["usage"],
        "heads": {(chunk["id"], chunk["created"]) for chunk in chunks[:1]},
    }


def without_heads(read: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in read.items() if key != "heads"}


async def test_a_stream_of_calls_moves_and_stays_the_same(
    deployment: RunningDeployment, tmp_path: Path
) -> None:
    with served(deployment, tmp_path) as proxy:
        async with proxy.client() as client:
            direct = await client.stream(ASKED, CHAT, url=client.direct)
            stays = await client.stream(ASKED, CHAT)
            cuts = iter((8, 30, 60))
            due = next(cuts)

            async def at(chunks: int) -> None:
                nonlocal due
                if chunks >= due:
                    due = next(cuts, 10_000)
                    await client.leave()

            moved = await client.stream(ASKED, CHAT, at)
        assert proxy.moves(moved[0]["id"]) >= 2
    expected = said(direct)
    assert len(expected["calls"]) == 2 and expected["end"] == "tool_calls"
    assert without_heads(said(stays)) == without_heads(expected)
    assert without_heads(said(moved)) == without_heads(expected)
    assert len({(chunk["id"], chunk["created"]) for chunk in moved}) == 1


async def test_a_whole_answer_with_calls_moves_and_stays_the_same(
    deployment: RunningDeployment, tmp_path: Path
) -> None:
    asked = {key: value for key, value in ASKED.items() if key != "stream_options"}
    with served(deployment, tmp_path) as proxy:
        async with proxy.client() as client:
            _, direct, _ = await client.post(asked, CHAT, client.direct)
            answer = asyncio.create_task(client.post(asked, CHAT))
            while await client.busy() is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            await client.leave()
            moved = (await answer)[1]
        assert proxy.moves(moved["id"]) == 1
    for answer in (direct, moved):
        (choice,) = answer["choices"]
        for call in choice["message"]["tool_calls"]:
            del call["id"]
            assert json.loads(call["function"]["arguments"])["city"]
        for one in choice["logprobs"]["content"]:
            one["logprob"] = round(one["logprob"], 3)
            one["top_logprobs"] = []
        for drawn in ("id", "created", "system_fingerprint", "kv_transfer_params"):
            del answer[drawn]
    assert moved == direct


async def test_a_stream_of_calls_outlives_its_engine(
    deployment: RunningDeployment, tmp_path: Path
) -> None:
    killed: list[str] = []
    with served(deployment, tmp_path) as proxy:
        async with proxy.client() as client:
            stays = await client.stream(ASKED, CHAT)

            async def at(chunks: int) -> None:
                if chunks == 40:
                    name = await client.busy()
                    assert name is not None
                    killed.append(name)
                    await asyncio.to_thread(deployment.launched.kill, name)

            resumed = await client.stream(ASKED, CHAT, at)
            await asyncio.to_thread(deployment.launched.restart, *killed)
    assert killed
    assert without_heads(said(resumed)) == without_heads(said(stays))
