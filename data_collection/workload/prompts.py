"""Prompts to drive: the starter set, JSONL, chat messages, a Hugging Face dataset."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_collection.text_file import text_lines
from data_collection.workload.engine_options import Sampling

__all__ = ["Prompt", "PromptError", "load_prompts", "parse_prompt", "read_json_lines"]

_STARTER = Path(__file__).with_name("starter_prompts.jsonl")
"""Templates filled with topics, whose answers run from one word to the usual cap of 1,024 tokens.

Length is what a predictor learns, so the set mixes kinds of answers: any stretch of it covers
most tasks.
"""

_SAMPLING = ("temperature", "top_p", "max_tokens")

_JSONL = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson")


class PromptError(ValueError):
    """A prompt source cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to drive.

    Attributes:
        id: unique within the source; a resumed collection knows done prompts by it.
        messages: the conversation so far, as chat messages.
        source: where it comes from.
        task: what kind of request it is.
        sampling: the settings of `Sampling` that this request has of its own.
    """

    id: str
    messages: list[dict[str, str]]
    source: str
    task: str
    sampling: dict[str, Any] = field(default_factory=dict)


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """Load prompts, in the order of their source.

    Args:
        source: ``starter`` (bundled), a JSONL file (``.jsonl``, also gzipped) whose lines have
            ``prompt`` or ``messages`` and optionally ``id``, ``source``, ``task``,
            ``temperature``, ``top_p`` and ``max_tokens``, or the id of a Hugging Face dataset
            with such columns, optionally ``OWNER/NAME:SPLIT``.
        limit: keep only so many.

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
    for where, record in records:
        prompt = parse_prompt(where, record, len(prompts), default_source=Path(source).name)
        if prompt.id in seen:
            raise PromptError(f"{where}: the id {prompt.id!r} appeared before")
        seen.add(prompt.id)
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise PromptError(f"{source}: no prompts in it")
    return prompts


def parse_prompt(where: str, record: Any, index: int, default_source: str) -> Prompt:
    """Return the prompt of a record.

    Args:
        where: the record's place, for messages.
        record: what was read.
        index: its number, which is its id where it has none.
        default_source: its source where it names none.

    Raises:
        PromptError: it is malformed.
    """
    if not isinstance(record, dict):
        raise PromptError(f"{where}: expected a JSON object, found {type(record).__name__}")
    messages = record.get("messages")
    text = record.get("prompt")
    if messages is None and isinstance(text, str) and text.strip():
        messages = [{"role": "user", "content": text}]
    if not _is_conversation(messages):
        raise PromptError(
            f"{where}: needs 'prompt' (a text that is not empty) or 'messages' "
            "(a list of objects with 'role' and 'content'); it has "
            f"{', '.join(map(repr, record)) or 'nothing'}"
        )
    return Prompt(
        id=_text(record, "id", str(index)),
        messages=[{"role": m["role"], "content": m["content"]} for m in messages or []],
        source=_text(record, "source", default_source),
        task=_text(record, "task", ""),
        sampling=_sampling(where, record),
    )


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


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    )


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
            except json.JSONDecodeError as error:
                raise PromptError(f"{where}: {_no_line(line)}not JSON: {error}") from error
            if "\\u" in line:
                _refuse_half_characters(where, value)
            yield where, value
    except PromptError:
        raise
    except ValueError as error:  # what cannot be read
        raise PromptError(str(error)) from error


def _no_line(line: str) -> str:
    """Return what to do about JSON that is not in lines."""
    if line.strip() in ("[", "{"):
        return "JSON Lines have one object a line, as `jq -c` writes them; "
    return ""


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
