"""Conversations reach the model as its chat template has them, or the line is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_collection.workload.engine_options import Sampling
from data_collection.workload.engine_requests import prompt_requests, transcript_requests
from data_collection.workload.prompts import PromptError, load_prompts, load_transcripts

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "One and"}, {"text": "one?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
]

TEMPLATE = """\
{%- if tools %}[tools]{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif -%}
{%- for message in messages -%}
{%- if message.role == "robot" %}{{ raise_exception("no robots here") }}{% endif -%}
[{{ message.role }}]{{ message.content }}
{%- if message.reasoning_content %}[thinks]{{ message.reasoning_content }}{% endif -%}
{%- for call in message.tool_calls or [] %}[calls]{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}({{ key }}={{ value }}){% endfor %}
{%- endfor -%}
{%- if message.tool_call_id %}[answers]{{ message.tool_call_id }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def with_tools(tokenizer: Tokenizer) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def without_tools(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sent(folder: Path, tokenizer: Any, *lines: dict[str, Any]) -> list[str]:
    """The text that the engine would be given for each line."""
    prompts = load_prompts(str(write(folder / "mine.jsonl", *lines)))
    requests = prompt_requests(prompts, Sampling())(tokenizer)
    return [tokenizer.decode(request.token_ids) for request in requests]


def test_tools_and_tool_calls_are_part_of_the_prompt(
    tmp_path: Path, with_tools: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"messages": CONVERSATION, "tools": TOOLS}, {"prompt": "Hi"}]
    whole, plain = sent(tmp_path, with_tools, *lines)
    assert whole == (
        "[tools]add[user]One and\none?[assistant][thinks]Hm[calls]add(a=1)[tool]2[answers]c1"
        "[assistant]"
    )
    assert plain == "[user]Hi[assistant]"
    said = capsys.readouterr().err
    assert f"ignores 'name' in 1 prompts, the first in {tmp_path / 'mine.jsonl'}, line 1" in said
    assert "'reasoning_content'" not in said and "'tool" not in said


def test_transcripts_have_their_tools_too(tmp_path: Path, with_tools: Any) -> None:
    line = {"messages": CONVERSATION, "tools": TOOLS, "answer": "Two"}
    file = load_transcripts(write(tmp_path / "mine.jsonl", line))
    (request,) = transcript_requests(file.transcripts)(with_tools)
    text = with_tools.decode(request.token_ids)
    assert text.startswith("[tools]add[user]One") and "[calls]add(a=1)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "Hi", "tools": TOOLS}, "ignores 'tools'"),
        ({"messages": CONVERSATION[:2]}, "ignores 'tool_calls' of messages"),
        (
            {"messages": [{"role": "assistant", "content": None, "refusal": "No"}]},
            "ignores 'refusal' of messages",
        ),
    ],
)
def test_a_template_that_would_drop_it_in_silence_is_an_error(
    tmp_path: Path, without_tools: Any, change: dict[str, Any], message: str
) -> None:
    """SmolLM2's template knows neither tools nor calls."""
    assert len(sent(tmp_path, without_tools, {"prompt": "Hi"})) == 1
    with pytest.raises(PromptError, match=rf"mine\.jsonl, line 2: the model's .* {message}"):
        sent(tmp_path, without_tools, {"prompt": "Hi"}, change)


def test_what_the_template_refuses_is_named(tmp_path: Path, with_tools: Any) -> None:
    robot = {"messages": [{"role": "robot", "content": "Beep"}]}
    with pytest.raises(PromptError, match=r"mine\.jsonl, line 2: .* take this: no robots here"):
        sent(tmp_path, with_tools, {"prompt": "Hi"}, robot)
