"""Prompts, conversations and transcripts of files, and what the model is given of them."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from recorded_dataset import ended, new_session, record, step_rows
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.capture.requests import FinishedRequest, Replay, as_recorded, parse_request_id
from data_collection.dataset.dataset_commands import export_transcripts
from data_collection.dataset.dataset_schema import DatasetError, requests_files
from data_collection.dataset.validate_dataset import validate
from data_collection.workload.engine_options import Sampling
from data_collection.workload.engine_requests import prompt_requests, transcript_requests
from data_collection.workload.prompts import PromptError, load_prompts, load_transcripts


def write(path: Path, *lines: object) -> str:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def test_the_bundled_starter_set_never_changes() -> None:
    prompts = load_prompts("starter")
    assert {prompt.source for prompt in prompts} == {"starter"}
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == len(prompts) == 606
    fields = [[p.id, p.task, p.source, p.messages] for p in prompts]
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    assert digest == "85270962a1b7eacc36fa1ec9627391c84be0f822af061ab5037b27fccb3195a4"
    tasks = [prompt.task for prompt in prompts]
    for start in range(len(tasks) - 100):  # every stretch of 100 covers most tasks
        assert len(set(tasks[start : start + 100])) > 0.8 * len(set(tasks))


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz"])
def test_jsonl_is_read_in_order_with_defaults_and_sampling(tmp_path: Path, name: str) -> None:
    source = write(
        tmp_path / name,
        {"id": "x", "prompt": "Hello", "source": "me", "task": "greet", "temperature": 0},
        "",
        {"prompt": "Grüß dich", "top_p": 0.9, "temperature": None, "max_tokens": 64},
        {"id": None, "prompt": "Bye", "task": None},
    )
    first, second, third = load_prompts(source)
    assert len({first.id, second.id, third.id}) == 3
    assert (first.id, first.source, first.task) == ("x", "me", "greet")
    assert first.messages == [{"role": "user", "content": "Hello"}]
    assert (second.source, second.task) == (name, "")
    assert second.messages[0]["content"] == "Grüß dich"
    assert third.task == ""
    assert (first.sampling, third.sampling) == ({"temperature": 0}, {})
    assert second.sampling == {"top_p": 0.9, "max_tokens": 64}


def names(source: str) -> dict[str, str]:
    """The id of every prompt, by what is asked."""
    prompts = load_prompts(source)
    named = {prompt.messages[0]["content"]: prompt.id for prompt in prompts}
    assert len(named) == len(prompts) == len({prompt.id for prompt in prompts})
    return named


def test_prompts_without_an_id_keep_theirs_when_lines_are_inserted_or_moved(tmp_path: Path) -> None:
    lines = [{"prompt": f"Number {i}"} for i in range(20)]
    before = names(write(tmp_path / "mine.jsonl", *lines))
    changed = [{"prompt": "New"}, *reversed(lines[5:])]
    after = names(write(tmp_path / "mine.jsonl", *changed))
    assert {text: before[text] for text in after if text != "New"} == {
        text: name for text, name in after.items() if text != "New"
    }
    assert after["New"] not in before.values()


def test_equal_prompts_each_have_an_id(tmp_path: Path) -> None:
    same = {"prompt": "Again"}
    source = write(tmp_path / "mine.jsonl", same, {"prompt": "b"}, same, same)
    ids = [prompt.id for prompt in load_prompts(source)]
    assert len(set(ids)) == 4
    more = [p.id for p in load_prompts(write(tmp_path / "more.jsonl", same, same, same, same))]
    assert more[:3] == [ids[0], ids[2], ids[3]], "by occurrence, wherever they stand"


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 5},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "system", "content": "a"}]},
    ],
)
def test_whatever_changes_the_answer_changes_the_id(tmp_path: Path, change: object) -> None:
    assert isinstance(change, dict)
    source = write(tmp_path / "mine.jsonl", {"prompt": "a"}, {"prompt": "a"} | change)
    first, second = load_prompts(source)
    assert second.id != f"{first.id}-2"


def test_transcripts_without_an_id_keep_theirs_when_lines_are_moved(tmp_path: Path) -> None:
    lines = [{"prompt": "Same", "answer": f"Number {i}"} for i in range(5)]

    def ids(*lines: object) -> dict[str, str]:
        path = Path(write(tmp_path / "mine.jsonl", *lines))
        return {str(one.answer): one.request_id for one in load_transcripts(path).transcripts}

    before = ids(*lines)
    assert len(set(before.values())) == 5
    assert ids(*reversed(lines)) == before


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_conversations_keep_all_that_a_chat_template_reads(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, "brief."], "name": None},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "Two.", "tool_calls": []},
    ]
    line = {"messages": messages, "tools": tools, "chat_template_kwargs": {"date": "today"}}
    (prompt,) = load_prompts(write(tmp_path / "mine.jsonl", line))
    call = CALL | {"function": {"name": "add", "arguments": {"a": 1}}}
    thought = {"reasoning": "Hm", "reasoning_content": "Hm"}
    assert prompt.messages == [
        {"role": "system", "content": "Be\nbrief."},
        messages[1],
        {"role": "assistant", "content": "", "tool_calls": [call], **thought},
        messages[3],
        {"role": "assistant", "content": "Two."},
    ]
    assert prompt.template == {"tools": tools, "date": "today"}
    assert prompt.text.splitlines()[1:] == ["Be", "brief.", "Hi", "", json.dumps(call), "2", "Two."]
    for packed in (json.dumps(tools), [json.dumps(tools[0])]):  # as tables have it
        (other,) = load_prompts(write(tmp_path / "packed.jsonl", line | {"tools": packed}))
        assert other.template == prompt.template
    transcript = {"answer": "Yes"} | line
    (read,) = load_transcripts(Path(write(tmp_path / "t.jsonl", transcript))).transcripts
    assert (read.prompt, read.template) == (prompt.messages, prompt.template)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    source = write(tmp_path / "mine.jsonl", {"prompt": "a"}, {"prompt": "b"}, "not JSON")
    assert len(load_prompts(source, limit=2)) == 2
    with pytest.raises(PromptError, match="at least 1, not 0"):
        load_prompts(source, limit=0)


def calling(calls: object) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not JSON", "not JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ({"text": "Hello"}, "needs 'prompt'.*it has 'text'"),
        ({"prompt": "  "}, "needs 'prompt'"),
        ({"prompt": 3}, "needs 'prompt'"),
        ({"messages": []}, "needs 'prompt'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content: expected a text or a list"),
        ({"messages": [{"role": "user", "content": None}]}, r"\.content: .* found null"),
        ({"messages": ["Hi"]}, r"messages\[0\]: expected an object with 'role'"),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\]: expected an object with 'role'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            r"messages\[0\]\.content\[0\]: expected a part of text.* found {'type': 'image_url'",
        ),
        (calling([{"id": "c1"}]), r"\.tool_calls\[0\]: expected an object with 'function'"),
        (calling("add"), r"messages\[0\]\.tool_calls: not JSON"),
        (
            calling([{"function": {"name": "add", "arguments": '{"a": '}}]),
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: not JSON",
        ),
        ({"prompt": "a", "tools": {"name": "f"}}, "tools: expected a list of objects, found {"),
        ({"prompt": "a", "tools": '["\\ud800"]'}, "tools: not text: half of a surrogate pair"),
        ({"prompt": "a", "functions": [{"name": "f"}]}, "give them as 'tools'"),
        ({"prompt": "a", "chat_template_kwargs": [1]}, "chat_template_kwargs: expected an object"),
        ({"prompt": "a", "chat_template_kwargs": {"tokenize": False}}, "leave out tokenize"),
        ("[" * 100_000, "not JSON"),
        ({}, "it has nothing"),
        ('{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "id": "\\udc00"}', "half of a surrogate pair"),
        ({"prompt": "a", "id": "first"}, "the id 'first' appeared before"),
        ({"prompt": "a", "max_tokens": 1 << 31}, "max_tokens: 2147483648 is invalid"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens: 1.5 is invalid; expected a whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: True is invalid; expected a whole"),
        ({"prompt": "a", "temperature": -1}, "temperature: -1 is invalid; expected 0 or more"),
        ('{"prompt": "a", "temperature": NaN}', "temperature: nan is invalid; expected 0 or more"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: 'hot' is invalid; expected a number"),
        ({"prompt": "a", "top_p": 0}, "top_p: 0 is invalid; expected above 0, at most 1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    source = write(tmp_path / "mine.jsonl", {"prompt": "fine", "id": "first"}, "", line)
    with pytest.raises(PromptError, match=rf"mine\.jsonl, line 3: .*{message}"):
        load_prompts(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.jsonl", b"", r"mine\.jsonl: no prompts in it"),
        ("mine.jsonl", None, r"mine\.jsonl: cannot be read: No such file"),
        ("prompts.txt", b"Hello", "prompt files are JSON Lines"),
        ("mine.jsonl.gz", b"no gzip", r"mine\.jsonl\.gz(:|, line )1: "),
        ("mine.json", b'[\n {"prompt": "a"}\n]', "JSON Lines have one object a line, as `jq -c`"),
    ],
)
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        load_prompts(str(path))


# What the model's chat template makes of them.

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
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


def sent(folder: Path, tokenizer: Any, *lines: dict[str, Any]) -> list[str]:
    """The text that the engine would be given for each line."""
    prompts = load_prompts(write(folder / "mine.jsonl", *lines))
    requests = prompt_requests(prompts, Sampling())(tokenizer)
    return [tokenizer.decode(request.token_ids) for request in requests]


def test_tools_and_tool_calls_are_part_of_the_prompt_and_of_transcripts(
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
    file = load_transcripts(Path(write(tmp_path / "t.jsonl", lines[0] | {"answer": "Two"})))
    (request,) = transcript_requests(file.transcripts)(with_tools)
    text = with_tools.decode(request.token_ids)
    assert text.startswith("[tools]add[user]One") and "[calls]add(a=1)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "Hi", "tools": TOOLS}, "ignores 'tools'"),
        ({"messages": CONVERSATION[:2]}, "ignores 'tool_calls' of messages"),
        ({"messages": [{"role": "assistant", "refusal": "No"}]}, "ignores 'refusal' of messages"),
    ],
)
def test_a_template_that_would_drop_it_in_silence_is_an_error(
    tmp_path: Path, smollm2: Path, change: dict[str, Any], message: str
) -> None:
    """SmolLM2's template knows neither tools nor calls."""
    without_tools = AutoTokenizer.from_pretrained(smollm2)
    assert len(sent(tmp_path, without_tools, {"prompt": "Hi"})) == 1
    with pytest.raises(PromptError, match=rf"mine\.jsonl, line 2: the model's .* {message}"):
        sent(tmp_path, without_tools, {"prompt": "Hi"}, change)


def test_what_the_template_refuses_is_named(tmp_path: Path, with_tools: Any) -> None:
    robot = {"messages": [{"role": "robot", "content": "Beep"}]}
    with pytest.raises(PromptError, match=r"mine\.jsonl, line 2: .* take this: no robots here"):
        sent(tmp_path, with_tools, {"prompt": "Hi"}, robot)


class Words:
    """A tokenizer of whole numbers, with a template of one token before and after."""

    eos_token_id = 2

    def __len__(self) -> int:
        return 1000

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "an answer goes on from its prompt"
        return [int(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [7, *(int(word) for m in messages for word in m["content"].split()), 8]


def finished(request: Any, reason: str = "length") -> FinishedRequest:
    """What the engine says of a request that replays: one token was generated."""
    name, ids = f"{request.id}-0123abcd", request.token_ids
    return FinishedRequest(name, reason, len(ids), 1, 1, ids, [5], request.extra_args, 0.0, 1.0)


def test_a_dataset_survives_as_its_transcripts(tmp_path: Path) -> None:
    record(tmp_path / "dataset")
    export_transcripts(tmp_path / "dataset", tmp_path / "mine.parquet")
    file = load_transcripts(tmp_path / "mine.parquet")
    session = new_session()
    assert (file.model, file.revision) == (session.model, session.revision)

    config = RecordConfig(path=str(tmp_path / "again"), replays=True, flush_seconds=60)
    recorder = Recorder(config, new_session(name="again", dtype=config.dtype))
    requests = transcript_requests(file.transcripts)(Words())
    recorder.on_finished([finished(request) for request in requests])
    recorder.close()

    def entries(dataset: Path) -> list[dict[str, Any]]:
        rows = [row for f in requests_files(dataset) for row in pq.read_table(f).to_pylist()]
        for row in rows:
            del row["request_id"], row["rows"]
        return sorted(rows, key=lambda row: row["external_id"])

    assert entries(tmp_path / "again") == entries(tmp_path / "dataset")


def test_requests_without_token_ids_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(RecordConfig(path=str(tmp_path / "d"), dtype="float32"), new_session())
    recorder.on_rows(step_rows(1, {"open-00000001": 0}))
    recorder.on_finished([ended("a-00000002", 3), ended("a-00000003", 4)])
    recorder.on_finished([ended("left-00000004", 3, "abort")])
    recorder.close()
    validate(tmp_path / "d")
    export_transcripts(tmp_path / "d", tmp_path / "mine.parquet")
    names = [t.request_id for t in load_transcripts(tmp_path / "mine.parquet").transcripts]
    assert names == ["0_a", "1_a", "0_left"], "two answers to one prompt are numbered"
    assert "left out: 1 requests without token ids" in capsys.readouterr().out


def test_answers_of_adapters_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model would compute other rows from them."""
    record(tmp_path / "d")
    record(tmp_path / "d", new_session("20250102T000000-2"), prefix="b", adapter="poet")
    export_transcripts(tmp_path / "d", tmp_path / "mine.parquet")
    assert "20 answers" in (said := capsys.readouterr().out)
    assert "left out: 20 requests of LoRA adapters" in said


def test_a_dataset_without_transcripts_cannot_be_exported(tmp_path: Path) -> None:
    mine = tmp_path / "mine.parquet"
    record(tmp_path / "poet's", adapter="poet")
    with pytest.raises(DatasetError, match="all of its requests are of LoRA adapters"):
        export_transcripts(tmp_path / "poet's", mine)
    recorder = Recorder(RecordConfig(path=str(tmp_path / "d"), tokens=False), new_session())
    recorder.on_finished([ended("a-00000002", 3)])
    recorder.close()
    with pytest.raises(DatasetError, match="none of 1 requests has token ids"):
        export_transcripts(tmp_path / "d", mine)
    with pytest.raises(DatasetError, match="name the file"):
        export_transcripts(tmp_path / "d", mine.with_suffix(".csv"))


def test_text_is_put_into_the_template_and_ended_where_the_model_ended_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write(
        path,
        {"id": "5_x", "prompt": "10 11", "answer": "20 21 22"},
        {"prompt": "10", "answer": "20 21", "finish_reason": "length", "temperature": 0.5},
        {"prompt": "10", "answer": ""},
    )
    requests = transcript_requests(load_transcripts(path).transcripts)(Words())
    assert requests[0].token_ids == [7, 10, 11, 8, 20, 21, 22], "of the last one no state is needed"
    recorded = [as_recorded(finished(request)) for request in requests]
    whole, cut, empty = (one for one in recorded if one is not None)
    assert whole.output_token_ids == [20, 21, 22, Words.eos_token_id]
    assert (whole.prompt_tokens, whole.total_tokens) == (4, 4)
    assert parse_request_id(whole.request_id) == ("5_x", 0, 0)
    assert cut.output_token_ids == [20, 21]
    assert (cut.finish_reason, cut.temperature) == ("length", 0.5)
    assert empty.output_token_ids == [Words.eos_token_id]
    assert as_recorded(finished(requests[0], "abort")) is None, "a replay that was cut short"


def test_clients_of_a_recording_server_cannot_forge_lengths(tmp_path: Path) -> None:
    config = RecordConfig(path=str(tmp_path / "d"), dtype="float32")
    recorder = Recorder(config, new_session())
    replay = Replay(1, 9, 10_000, "stop").extra_args()
    recorder.on_finished([FinishedRequest("a-00000001", "stop", 3, 2, 9, [1] * 3, [4, 5], replay)])
    recorder.close()
    (file,) = requests_files(tmp_path / "d")
    (row,) = pq.read_table(file).to_pylist()
    assert (row["prompt_tokens"], row["total_tokens"], row["max_tokens"]) == (3, 2, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "1"}, "line 1: needs 'answer' .a text. or 'output_token_ids'"),
        ({"answer": "1"}, "line 1: needs 'prompt'"),
        ({"prompt": "1", "output_token_ids": []}, "output_token_ids: expected token ids"),
        ({"prompt": "1", "output_token_ids": [1, -1]}, "output_token_ids: expected token ids"),
        ({"prompt_token_ids": "1", "answer": "1"}, "prompt_token_ids: expected token ids"),
        ({"prompt": "1", "answer": "1", "finish_reason": "error"}, "finish_reason: 'error'"),
        ({"prompt": "1", "answer": "1", "sample_index": "a"}, "sample_index: 'a' is invalid"),
        ({"prompt": "1", "answer": "1", "sample_index": 1 << 31}, "sample_index: 2147483648 is"),
        ({"prompt": "1", "answer": "1", "temperature": -1}, "temperature: -1 is invalid"),
    ],
)
def test_malformed_transcripts_are_refused_by_line(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        load_transcripts(Path(write(tmp_path / "mine.jsonl", line)))


def test_files_that_hold_no_transcripts_are_refused(tmp_path: Path) -> None:
    line = {"id": "a", "prompt": "1", "answer": "1"}
    with pytest.raises(PromptError, match="answer 0 to 'a' appeared before"):
        load_transcripts(Path(write(tmp_path / "twice.jsonl", line, line)))
    with pytest.raises(PromptError, match="no transcripts in it"):
        load_transcripts(Path(write(tmp_path / "empty.jsonl")))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(PromptError, match="not a whole Parquet file"):
        load_transcripts(tmp_path / "torn.parquet")
    record(tmp_path / "dataset")
    with pytest.raises(PromptError, match="not a file of transcripts: it has no id"):
        load_transcripts(requests_files(tmp_path / "dataset")[0])
    with pytest.raises(PromptError, match="cannot be read"):
        load_transcripts(tmp_path / "absent.jsonl")
    with pytest.raises(PromptError, match=r"absent\.parquet: no such file"):
        load_transcripts(tmp_path / "absent.parquet")


def test_tokens_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write(path, {"id": "x", "prompt": "1", "output_token_ids": [1000]})
    with pytest.raises(PromptError, match="x: token 1000 is outside the model's vocabulary"):
        transcript_requests(load_transcripts(path).transcripts)(Words())
