"""Chats with tool calls or reasoning, cut at any token: the client is told what one engine tells.

Parsers, detokenizer and server are vLLM's; what its engine would generate is given.
"""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from parsing_server import ParsingServer, answered, joined, spliced
from transformers import AutoTokenizer

from data_collection.vllm_adapter.support import TELLS_CUT_CALLS
from rescheduler.openai.openai_request import RequestRefusedError

pytestmark = pytest.mark.skipif(not TELLS_CUT_CALLS, reason="needs vLLM 0.31")

CITY = {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": CITY}}
ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [{"type": "function", "function": WEATHER}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
CALLS = (
    "I look — 天気 🌦️ — it up.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n'
    '</tool_call>\n<tool_call>{"name": "weather", "arguments": {"city": "京都"}}</tool_call>'
)
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
)
LISTED = '{"name": "weather", "parameters": {"city": "Zürich", "days": [1, 2]}}'
NAMED = {"type": "function", "function": {"name": "weather"}}
THOUGHT = "<think>Hm 🌦️, so</think>"
TAGS = ["<|python_tag|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@dataclass(frozen=True)
class Case:
    """What a model says, and what reads it."""

    text: str
    tools: str | None = "hermes"
    reasoning: str = ""
    calls: int = 1
    end: str = "tool_calls"
    asked: dict[str, Any] = field(default_factory=dict)


def asks(**fields: Any) -> dict[str, Any]:
    return {"asked": fields}


CASES = {
    "hermes": Case(CALLS, calls=2),
    "llama3_json": Case(LISTED, "llama3_json"),
    "pythonic": Case(
        '[weather(city="Zürich", days=[1]), weather(city="京都")]', "pythonic", calls=2
    ),
    "qwen3_coder": Case("See:\n" + XML, "qwen3_coder"),
    "required": Case(f"[{LISTED}, {LISTED}]", "pythonic", "", 2, **asks(tool_choice="required")),
    "named": Case('{"city": "Zürich"}', "pythonic", "", 1, "stop", **asks(tool_choice=NAMED)),
    "none": Case("See:\n" + XML, "qwen3_coder", "", 0, "stop", {"tool_choice": "none"}),
    "one at a time": Case(CALLS, asked={"parallel_tool_calls": False}),
    "stop": Case(CALLS + "And STOP here.", calls=2, asked={"stop": ["STOP h"]}),
    "log-probabilities": Case(CALLS, calls=2, asked={"logprobs": True, "top_logprobs": 1}),
    "token ids": Case(CALLS, calls=2, asked={"return_token_ids": True}),
    "reasoning": Case(THOUGHT + CALLS, "hermes", "deepseek_r1", calls=2),
    "reasoning alone": Case(THOUGHT + "It is.", None, "qwen3", 0, "stop", {"tools": None}),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.add_tokens(TAGS)
    return tokenizer


def grouped(tokenizer: Any, text: str, most: int) -> list[list[int]]:
    """The tokens of a text and their end, up to so many at a time."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    draw, groups = random.Random(most), []
    while tokens:
        size = draw.randint(1, most)
        groups.append(tokens[:size])
        tokens = tokens[size:]
    return groups


def told(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return joined(asyncio.run(spliced(*args, **kwargs)))


@pytest.mark.parametrize("name", CASES)
def test_a_cut_changes_nothing_that_a_client_is_told(tokenizer: Any, name: str) -> None:
    case = CASES[name]
    asked = {**ASKED, **case.asked}
    alone = ParsingServer(tokenizer, case.tools, case.reasoning, resumes=False)
    servers = [ParsingServer(tokenizer, case.tools, case.reasoning) for _ in range(2)]
    for most in (1, 3):
        groups = grouped(tokenizer, case.text, most)
        whole = told([alone], asked, groups)
        assert len(whole["calls"]) == whole["ids"] == case.calls
        assert whole["end"] == case.end
        for cut in range(2, len(groups), 2):
            cuts = [cut] if cut % 4 else range(cut, len(groups), 9)
            froze = (cut // 2) % 3 > 0
            assert told(servers, asked, groups, cuts, froze=froze) == whole, (most, cuts, froze)


def test_a_cut_at_any_token_of_two_calls(tokenizer: Any) -> None:
    servers = [ParsingServer(tokenizer, "hermes") for _ in range(2)]
    groups = grouped(tokenizer, CALLS, 1)[:-3]
    whole = told(servers[:1], ASKED, groups, end="length")
    assert whole["end"] == "length"
    for cut in range(2, len(groups)):
        assert told(servers, ASKED, groups, [cut], end="length") == whole, cut


def test_no_chunk_comes_for_token_ids_that_the_client_has_not_asked_for(tokenizer: Any) -> None:
    """The proxy has the engine tell them, and so also chunks while its parser holds text back."""
    stream = spliced([ParsingServer(tokenizer, "hermes")], ASKED, grouped(tokenizer, CALLS, 1))
    deltas = [choice["delta"] for chunk in asyncio.run(stream) for choice in chunk["choices"]]
    assert [delta for delta in deltas[:-1] if not delta] == []


def test_the_first_engine_s_names_stay(tokenizer: Any) -> None:
    servers = [ParsingServer(tokenizer, "hermes") for _ in range(2)]
    asked = {**ASKED, "stream_options": None}
    chunks = asyncio.run(spliced(servers, asked, grouped(tokenizer, CALLS, 1), [20]))
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    roles = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("role")]
    assert roles == chunks[:1]
    assert all(choice.get("token_ids") is None for one in chunks for choice in one["choices"])


def test_an_engine_that_cannot_parse_again_does_not_go_on(tokenizer: Any) -> None:
    servers = [ParsingServer(tokenizer, "hermes", resumes=resumes) for resumes in (True, False)]
    with pytest.raises(ValueError, match="it begins an answer, instead of going on with it"):
        told(servers, ASKED, grouped(tokenizer, CALLS, 1), [20])


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer but for what every run draws."""
    message = answer["choices"][0]["message"]
    for call in message.get("tool_calls") or ():
        assert call.pop("id")
    return {
        key: value for key, value in answer.items() if key not in ("created", "system_fingerprint")
    }


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].asked != {"tools": None}])
def test_a_whole_answer_is_vllm_s(tokenizer: Any, name: str) -> None:
    case = CASES[name]
    asked = {**ASKED, **case.asked, "stream": False}
    del asked["stream_options"]
    server = ParsingServer(tokenizer, case.tools, case.reasoning)
    groups = grouped(tokenizer, case.text, 2)
    whole = without_ids(asyncio.run(server.whole(asked, groups, "stop")))
    assert len(whole["choices"][0]["message"].get("tool_calls", ())) == case.calls
    for cuts in [(), (2,), (2, 3)]:
        for froze in (True, False):
            answer = asyncio.run(answered([server], asked, groups, cuts, froze=froze))
            assert without_ids(answer) == whole, (cuts, froze)


def test_a_whole_answer_that_its_engine_has_not_parsed_is_none(tokenizer: Any) -> None:
    server = ParsingServer(tokenizer, "hermes", resumes=False)
    asked = {**ASKED, "stream": False, "stream_options": None}
    with pytest.raises(RequestRefusedError, match="has not parsed its answer"):
        asyncio.run(answered([server], asked, grouped(tokenizer, CALLS, 1)))
