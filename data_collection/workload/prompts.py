"""What is driven: prompts to be answered, and transcripts, which are prompts with answers."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_collection.dataset.dataset_commands import TRANSCRIPTS_SCHEMA
from data_collection.files import text_lines
from data_collection.parquet_file import UnusableParquetError, open_parquet, parquet_batches
from data_collection.workload.engine_options import LARGEST, Sampling

_STARTER = Path(__file__).with_name("starter_prompts.jsonl")
"""Templates filled with topics, whose answers run from one word to the usual cap of 1,024 tokens.

Length is what a predictor learns, so the set mixes kinds of answers: any stretch of it covers
most tasks.
"""

_DIGEST = "sha256-"
"""What the id of a prompt that has none starts with; a digest of what is sent follows."""

_SAMPLING = ("temperature", "top_p", "max_tokens")
_DIGITS = 20
_LONGEST_SHOWN = 80
_TEXT_PARTS = ("text", "input_text", "output_text")
_SAID_OTHERWISE = {"tool_calls", "function_call", "reasoning_content", "refusal"}
"""Fields of a message that may have no content."""
_OURS = {"add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
"""Arguments of a chat template that are the same for all prompts."""
_JSONL = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson")


class PromptError(ValueError):
    """A prompt source cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to drive.

    Attributes:
        id: unique within the source; a resumed collection knows done prompts by it.
        messages: with all their fields; ``content`` is a text.
        sampling: the settings of `Sampling` that this request has of its own.
        template: further arguments of the chat template: ``tools``, and those of
            ``chat_template_kwargs``.
        where: file and line, or row.
    """

    id: str
    messages: list[dict[str, Any]]
    source: str
    task: str
    sampling: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def text(self) -> str:
        """Tools, contents and tool calls, a line each, without a chat template."""
        said: list[Any] = list(self.template.get("tools", []))
        for message in self.messages:
            said += [message["content"], *message.get("tool_calls", [])]
        texts = (one if isinstance(one, str) else json.dumps(one, default=str) for one in said)
        return "\n".join(texts)


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """Load prompts, in the order of their source.

    Args:
        source: ``starter`` (bundled), a JSONL file (``.jsonl``, also gzipped) whose lines have
            ``prompt`` or ``messages`` and optionally ``tools``, ``chat_template_kwargs``, ``id``,
            ``source``, ``task``, ``temperature``, ``top_p`` and ``max_tokens``, or the id of a
            Hugging Face dataset with such columns, optionally ``OWNER/NAME:SPLIT``.
        limit: keep only so many.

    A prompt without an id gets a digest of what is sent, and the number of its occurrence where
    equal ones came before. So it keeps its id when lines are inserted or reordered.

    Raises:
        PromptError: the source does not exist, is empty, or has a malformed line, or an id
            appears twice.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"the number of prompts must be at least 1, not {limit}")
    if source == "starter":
        records = read_json_lines(_STARTER)
    elif source.endswith(_JSONL):
        records = read_json_lines(Path(source))
    elif Path(source).exists():
        raise PromptError(f"{source}: prompt files are JSON Lines ({', '.join(_JSONL)})")
    else:
        records = _hub_records(source)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    digests: Counter[str] = Counter()
    for where, record in records:
        prompt = parse_prompt(where, record, default_source=Path(source).name)
        if not prompt.id:
            content = [prompt.messages, prompt.template, prompt.sampling]
            prompt = replace(prompt, id=_content_id(content, digests))
        if prompt.id in seen:
            raise PromptError(f"{where}: the id {prompt.id!r} appeared before")
        seen.add(prompt.id)
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise PromptError(f"{source}: no prompts in it")
    return prompts


def parse_prompt(where: str, record: Any, default_source: str) -> Prompt:
    """Return the prompt of a record; its id is empty where it has none.

    Raises:
        PromptError: it is malformed; names its place.
    """
    if not isinstance(record, dict):
        raise PromptError(f"{where}: expected a JSON object, found {type(record).__name__}")
    messages = record.get("messages")
    text = record.get("prompt")
    if messages is None and isinstance(text, str) and text.strip():
        messages = [{"role": "user", "content": text}]
    if not isinstance(messages, list) or not messages:
        raise PromptError(
            f"{where}: needs 'prompt' (a text that is not empty) or 'messages' "
            "(a list of objects with 'role' and 'content'); it has "
            f"{', '.join(map(repr, record)) or 'nothing'}"
        )
    return Prompt(
        id=_text(record, "id", ""),
        messages=[_message(f"{where}: messages[{i}]", one) for i, one in enumerate(messages)],
        source=_text(record, "source", default_source),
        task=_text(record, "task", ""),
        sampling=_sampling(where, record),
        template=_template_arguments(where, record),
        where=where,
    )


def _content_id(content: Any, digests: Counter[str]) -> str:
    """Return a digest of what is sent, with its occurrence number from the second one on."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    digest = _DIGEST + hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    digests[digest] += 1
    return digest if digests[digest] == 1 else f"{digest}-{digests[digest]}"


def _message(where: str, message: Any) -> dict[str, Any]:
    """Return a message in the form that chat templates read, as vLLM's server makes it.

    Fields that are null are left out: tables have all of them in every row. The content becomes
    a text, and the arguments of tool calls objects.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"{where}: expected an object with 'role', a text, and 'content'")
    kept = {name: value for name, value in message.items() if value is not None}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = _tool_calls(f"{where}.tool_calls", calls)
    else:
        kept.pop("tool_calls", None)
    if "reasoning" in kept:
        kept.setdefault("reasoning_content", kept["reasoning"])
    content = kept.get("content")
    if content is None and not _SAID_OTHERWISE.isdisjoint(kept):
        content = ""
    elif isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise PromptError(
            f"{where}.content: expected a text or a list of text parts (null only beside "
            f"{', '.join(sorted(_SAID_OTHERWISE))}), found {_shown(content)}"
        )
    return kept | {"content": content}


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise PromptError(
            f"{where}: expected a part of text, {{'type': 'text', 'text': ...}}, found "
            f"{_shown(part)}; images and sound are not collected"
        )
    return text


def _tool_calls(where: str, given: Any) -> list[dict[str, Any]]:
    calls = _objects(where, given)
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PromptError(f"{where}[{i}]: expected an object with 'function', which has a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _decoded(f"{where}[{i}].function.arguments", arguments)
        if not isinstance(arguments, dict):
            raise PromptError(
                f"{where}[{i}].function.arguments: expected an object, or the text of one, found "
                f"{_shown(arguments)}"
            )
        kept = {name: value for name, value in call.items() if value is not None}
        calls[i] = kept | {"function": function | {"arguments": arguments}}
    return calls


def _template_arguments(where: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return what a chat template reads in addition to the messages."""
    given: dict[str, Any] = record.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise PromptError(f"{where}: chat_template_kwargs: expected an object")
    if wrong := _OURS.intersection(given):
        raise PromptError(f"{where}: chat_template_kwargs: leave out {', '.join(sorted(wrong))}")
    if tools := record.get("tools"):
        given = given | {"tools": _objects(f"{where}: tools", tools)}
    if record.get("functions"):
        raise PromptError(f"{where}: functions: OpenAI's old form; give them as 'tools'")
    return given


def _objects(where: str, value: Any) -> list[dict[str, Any]]:
    """Return a list of objects; tables often have it, or each of them, as a text of JSON."""
    if isinstance(value, str):
        value = _decoded(where, value)
    if isinstance(value, list):
        objects: list[dict[str, Any]] = [
            _decoded(where, one) if isinstance(one, str) else one for one in value
        ]
        if all(isinstance(one, dict) for one in objects):
            return objects
    raise PromptError(f"{where}: expected a list of objects, found {_shown(value)}")


def _decoded(where: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON: {error}") from error
    if "\\u" in text:
        _refuse_half_characters(where, value)
    return value


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _sampling(where: str, record: dict[str, Any]) -> dict[str, Any]:
    given = {name: record[name] for name in _SAMPLING if record.get(name) is not None}
    for name, value in given.items():
        whole = name == "max_tokens"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            expected = "a whole number" if whole else "a number"
            raise PromptError(f"{where}: {name}: {value!r} is invalid; expected {expected}")
    try:
        replace(Sampling(), **given)
    except ValueError as error:
        raise PromptError(f"{where}: {error}") from error
    return given


def _text(record: dict[str, Any], key: str, default: str) -> str:
    value = record.get(key)
    return default if value is None else str(value)


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of every line.

    Raises:
        PromptError: the file cannot be read, or a line is not JSON.
    """
    try:
        for number, line in enumerate(text_lines(path), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                hint = "JSON Lines have one object a line, as `jq -c` writes them; "
                hint = hint if line.strip() in ("[", "{") else ""
                raise PromptError(f"{where}: {hint}not JSON: {error}") from error
            if "\\u" in line:
                _refuse_half_characters(where, value)
            yield where, value
    except PromptError:
        raise
    except ValueError as error:  # what cannot be read
        raise PromptError(str(error)) from error


def _refuse_half_characters(where: str, value: Any) -> None:
    """Refuse half of a surrogate pair, which JSON can escape, but no tokenizer or Parquet takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: not text: half of a surrogate pair: {error}") from error


def _hub_records(source: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    name, _, split = source.partition(":")
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the hub client raises many kinds
        raise PromptError(
            f"{source}: not 'starter', not a file, and no Hugging Face dataset could be "
            f"loaded by this name: {error}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{source}, row {number}", row


_REASONS = ("stop", "length", "repetition", "abort")
_NUMBERED = re.compile(r"^cmpl-.*-\d+$")


@dataclass(frozen=True, slots=True)
class Transcript:
    """A prompt and its answer.

    Attributes:
        id: the client's name of the request; splits keep what shares it together.
        sample_index: which of the answers to this prompt it is.
        answer: token ids, the end-of-sequence token included where the model ended it; or text.
        template: further arguments of the chat template, as of `Prompt`.
        where: file and line, or row.
        finish_reason: ``stop``, ``length`` (the cap was reached), ``repetition`` or ``abort`` (the
            client left); all but ``stop`` make censored rows.
        max_tokens: the cap the request asked for; 0 when unknown.
    """

    id: str
    sample_index: int
    prompt: list[int] | list[dict[str, Any]]
    answer: list[int] | str
    finish_reason: str
    max_tokens: int
    temperature: float | None
    top_p: float | None
    source: str
    task: str
    template: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def request_id(self) -> str:
        """The id to send it with, which `parse_request_id` takes apart again."""
        return f"{self.sample_index}_{self.id}"


@dataclass(frozen=True)
class TranscriptFile:
    """What a file of transcripts holds.

    Attributes:
        model: whose token ids they are; None where the file does not tell.
    """

    transcripts: list[Transcript] = field(repr=False)
    model: str | None = None
    revision: str | None = None


def load_transcripts(path: Path, limit: int | None = None) -> TranscriptFile:
    """Load transcripts.

    Args:
        path: what ``headway dataset transcripts`` wrote (``.parquet``), or JSON Lines (also
            gzipped) with ``prompt``, ``messages`` or ``prompt_token_ids``; ``answer`` (text) or
            ``output_token_ids``; ``finish_reason`` (``stop`` unless given); and optionally
            ``tools``, ``chat_template_kwargs``, ``id``, ``sample_index``, ``max_tokens``,
            ``temperature``, ``top_p``, ``source``, ``task``.
        limit: keep only so many, from the first.

    Raises:
        PromptError: the file cannot be read, a line is malformed, or an answer appears twice.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"the number of transcripts must be at least 1, not {limit}")
    described: dict[str, str] = {}
    if path.suffix == ".parquet":
        described, records = _read_parquet(path)
    else:
        records = list(read_json_lines(path))
    transcripts: list[Transcript] = []
    seen: set[str] = set()
    digests: Counter[str] = Counter()
    for where, record in records[:limit]:
        transcript = _parse(where, record, path.name)
        if not transcript.id:
            transcript = replace(transcript, id=_content_id(_content(transcript), digests))
        if transcript.request_id in seen:
            raise PromptError(
                f"{where}: answer {transcript.sample_index} to {transcript.id!r} appeared before; "
                "number the answers to a prompt by sample_index"
            )
        seen.add(transcript.request_id)
        transcripts.append(transcript)
    if not transcripts:
        raise PromptError(f"{path}: no transcripts in it")
    return TranscriptFile(
        transcripts, described.get("headway.model"), described.get("headway.revision")
    )


def _read_parquet(path: Path) -> tuple[dict[str, str], list[tuple[str, Any]]]:
    try:
        with open_parquet(path) as file:
            schema = file.schema_arrow
        missing = [name for name in TRANSCRIPTS_SCHEMA.names if name not in schema.names]
        if missing:
            raise PromptError(f"{path}: not a file of transcripts: it has no {', '.join(missing)}")
        batches = parquet_batches(path, TRANSCRIPTS_SCHEMA.names)
        rows = [row for batch in batches for row in batch.to_pylist()]
    except UnusableParquetError as error:
        raise PromptError(str(error)) from error
    except FileNotFoundError as error:
        raise PromptError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise PromptError(f"{path}: not a whole Parquet file: {error}") from error
    described = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (schema.metadata or {}).items()
    }
    return described, [(f"{path}, row {i}", row) for i, row in enumerate(rows)]


def _content(transcript: Transcript) -> list[Any]:
    one = transcript
    settings = [one.finish_reason, one.max_tokens, one.temperature, one.top_p]
    return [one.prompt, one.template, one.answer, one.sample_index, *settings]


def _parse(where: str, record: Any, default_source: str) -> Transcript:
    if not isinstance(record, dict):
        raise PromptError(f"{where}: expected a JSON object, found {type(record).__name__}")
    record = record | {"max_tokens": record.get("max_tokens") or None}
    prompt: list[int] | list[dict[str, Any]] = []
    if record.get("prompt_token_ids") is not None:
        prompt = _token_ids(where, record, "prompt_token_ids")
        record = record | {"prompt": "(token ids)", "messages": None}
    described = parse_prompt(where, record, default_source)
    answer: list[int] | str
    if record.get("output_token_ids") is not None:
        answer = _token_ids(where, record, "output_token_ids")
    elif isinstance(record.get("answer"), str):
        answer = record["answer"]
    else:
        raise PromptError(f"{where}: needs 'answer' (a text) or 'output_token_ids'")
    reason = record.get("finish_reason") or "stop"
    if reason not in _REASONS:
        raise PromptError(
            f"{where}: finish_reason: {reason!r} is invalid; expected one of {', '.join(_REASONS)}"
        )
    sample_index = record.get("sample_index") or 0
    if type(sample_index) is not int or not 0 <= sample_index <= LARGEST:
        raise PromptError(
            f"{where}: sample_index: {sample_index!r} is invalid; expected 0 to {LARGEST}"
        )
    name = described.id
    return Transcript(
        id=f"{name}-0" if name.startswith("cmpl-") and not _NUMBERED.match(name) else name,
        sample_index=sample_index,
        prompt=prompt or described.messages,
        answer=answer,
        finish_reason=reason,
        max_tokens=described.sampling.get("max_tokens", 0),
        temperature=described.sampling.get("temperature"),
        top_p=described.sampling.get("top_p"),
        source=described.source,
        task=described.task,
        template=described.template,
        where=where,
    )


def _token_ids(where: str, record: dict[str, Any], name: str) -> list[int]:
    ids = record[name]
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise PromptError(f"{where}: {name}: expected token ids, a list of whole numbers")
    return ids
