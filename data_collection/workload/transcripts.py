"""Transcripts to replay: prompts with their answers, as token ids or as text."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_collection.dataset.export_transcripts import TRANSCRIPTS_SCHEMA
from data_collection.workload.engine_options import LARGEST
from data_collection.workload.prompts import PromptError, parse_prompt, read_json_lines

__all__ = ["Transcript", "TranscriptFile", "load_transcripts"]

_REASONS = ("stop", "length", "repetition", "abort")
_NUMBERED = re.compile(r"^cmpl-.*-\d+$")


@dataclass(frozen=True, slots=True)
class Transcript:
    """A prompt and its answer.

    Attributes:
        id: the client's name of the request; splits keep what shares it together.
        sample_index: which of the answers to this prompt it is.
        prompt: token ids, or chat messages for the model's own template.
        answer: token ids, the end-of-sequence token included where the model ended it; or text.
        finish_reason: ``stop``, ``length`` (the cap was reached), ``repetition`` or ``abort`` (the
            client left); all but ``stop`` make censored rows.
        max_tokens: the cap the request asked for; 0 when unknown.
        temperature: with which the answer was sampled; None when unknown.
        top_p: nucleus of the sampling; None when unknown.
        source: where it comes from.
        task: what kind of request it is.
    """

    id: str
    sample_index: int
    prompt: list[int] | list[dict[str, str]]
    answer: list[int] | str
    finish_reason: str
    max_tokens: int
    temperature: float | None
    top_p: float | None
    source: str
    task: str

    @property
    def request_id(self) -> str:
        """The id to send it with, which `parse_request_id` takes apart again."""
        return f"{self.sample_index}_{self.id}"


@dataclass(frozen=True)
class TranscriptFile:
    """What a file of transcripts holds.

    Attributes:
        transcripts: in the order of the file.
        model: whose token ids they are; None where the file does not tell.
        revision: of the model.
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
            ``id``, ``sample_index``, ``max_tokens``, ``temperature``, ``top_p``, ``source``,
            ``task``.
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
    for where, record in records[:limit]:
        transcript = _parse(where, record, len(transcripts), path.name)
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
        table = pq.read_table(path)
        rows = table.to_pylist()
    except FileNotFoundError as error:
        raise PromptError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise PromptError(f"{path}: not a whole Parquet file: {error}") from error
    missing = [name for name in TRANSCRIPTS_SCHEMA.names if name not in table.column_names]
    if missing:
        raise PromptError(f"{path}: not a file of transcripts: it has no {', '.join(missing)}")
    described = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (table.schema.metadata or {}).items()
    }
    return described, [(f"{path}, row {i}", row) for i, row in enumerate(rows)]


def _parse(where: str, record: Any, index: int, default_source: str) -> Transcript:
    if not isinstance(record, dict):
        raise PromptError(f"{where}: expected a JSON object, found {type(record).__name__}")
    record = record | {"max_tokens": record.get("max_tokens") or None}
    prompt: list[int] | list[dict[str, str]]
    if record.get("prompt_token_ids") is not None:
        prompt = _token_ids(where, record, "prompt_token_ids")
        record = record | {"prompt": "(token ids)", "messages": None}
        described = parse_prompt(where, record, index, default_source)
    else:
        described = parse_prompt(where, record, index, default_source)
        prompt = described.messages
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
        prompt=prompt,
        answer=answer,
        finish_reason=reason,
        max_tokens=described.sampling.get("max_tokens", 0),
        temperature=described.sampling.get("temperature"),
        top_p=described.sampling.get("top_p"),
        source=described.source,
        task=described.task,
    )


def _token_ids(where: str, record: dict[str, Any], name: str) -> list[int]:
    ids = record[name]
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise PromptError(f"{where}: {name}: expected token ids, a list of whole numbers")
    return ids
