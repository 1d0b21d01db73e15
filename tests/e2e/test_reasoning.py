"""Answers with reasoning and tool calls, through the proxy and from the engine directly.

The tiny model's weights are random: a grammar makes it say what a reasoning model says.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from proxying import served
from running_deployment import ENGINE, RunningDeployment, running
from transformers import AutoTokenizer

from benchmarks.equality.cases import CHAT, MESSAGES, TOOL, Case
from benchmarks.equality.comparing import Server, compare
from benchmarks.support.tiny_models import tiny_model
from rescheduler.engines.launch_local import local_deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
UNUSED = ["<repo_name>", "<reponame>", "<file_sep>", "<filename>"]
"""Tokens of SmolLM2 whose places they take."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "assistant: {% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""As Qwen3's does, it ends a reasoning that is not wanted before it has begun."""
THOUGHT = "<think>[a-z ]{3,12}</think>"
SAID = "[a-z ]{3,12}"
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[a-z]{2,6}"\}\}\n</tool_call>'
FLAGS = [
    *("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"enable_in_reasoning": true}'),
]
BODIES: dict[str, dict[str, Any]] = {
    "reasoning": {"regex": THOUGHT + SAID},
    "reasoning without an end": {"regex": THOUGHT + SAID, "max_tokens": 2},
    "reasoning that is not to be shown": {"regex": THOUGHT + SAID, "include_reasoning": False},
    "no reasoning": {"regex": SAID, "chat_template_kwargs": {"enable_thinking": False}},
    "a call": {"regex": THOUGHT + CALL, "tools": [TOOL], "tool_choice": "auto"},
    "a call without reasoning": {
        "regex": CALL,
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model("qwen3", smollm2, tmp_path_factory.mktemp("models") / "qwen3")
    for file in folder.glob("token*.json"):
        text = file.read_text()
        for unused, token in zip(UNUSED, TOKENS, strict=True):
            text = text.replace(f'"{unused}"', f'"{token}"')
        written = json.loads(text)
        for one in (
            *written.get("added_tokens", ()),
            *written.get("added_tokens_decoder", {}).values(),
        ):
            one["special"] = one["special"] and one["content"] not in TOKENS
        file.write_text(json.dumps(written))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def deployment(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDeployment]:
    folder = tmp_path_factory.mktemp("reasoning")
    options = replace(ENGINE, checkpoint=None, arguments=FLAGS)
    described = replace(
        local_deployment(str(model), options, decode=1, prefill=1), served_model_name="smollm2"
    )
    with running(described, folder) as engines:
        yield engines


def body(model: Path, stream: bool, regex: str, **fields: Any) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return {
        "model": "smollm2",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 120,
        "structured_outputs": {"regex": regex},
        "logit_bias": {str(tokenizer.convert_tokens_to_ids(token)): 100 for token in TOKENS},
        "stream": stream,
        **fields,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_the_proxy_answers_as_the_engine_does(
    deployment: RunningDeployment, model: Path, stream: bool, tmp_path: Path
) -> None:
    cases = [Case(name, CHAT, body(model, stream, **fields)) for name, fields in BODIES.items()]
    with served(deployment, tmp_path) as proxy:
        engine = proxy.deployment.decode[0].url
        assert asyncio.run(compare(cases, engine, proxy.deployment.proxy_url)) == []


def test_the_engine_thinks_and_calls(deployment: RunningDeployment, model: Path) -> None:
    """What is compared above is what it is called."""

    async def asked() -> dict[str, Any]:
        server, said = Server(deployment.deployment.decode[0].url), {}
        for name, fields in BODIES.items():
            answer = await server.ask(Case(name, CHAT, body(model, False, **fields)))
            assert answer["status"] == 200, answer
            said[name] = answer["body"]["choices"][0]["message"]
        await server.close()
        return said

    said = asyncio.run(asked())
    assert said["reasoning"]["reasoning"] and said["reasoning"]["content"]
    assert not said["reasoning without an end"]["content"]
    assert said["no reasoning"]["content"] and not said["no reasoning"]["reasoning"]
    for name in ("a call", "a call without reasoning"):
        (call,) = said[name]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"]
    assert said["a call"]["reasoning"]
