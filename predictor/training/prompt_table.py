"""Requests as rows of one prompt each, to train what forecasts before prefill."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_collection.dataset.dataset_schema import (
    DatasetError,
    Session,
    read_columns,
    read_sessions,
    requests_files,
    split_requests,
)
from data_collection.workload.prompts import PromptError, Transcript, load_transcripts
from predictor.models.hidden_state_mlp import PROMPT_LAYER
from predictor.prompts.prompt_predictor import PromptEmbedding, PromptEmbeddingError
from predictor.training.row_table import HiddenStates, Requests, RowTable


class _Answer(NamedTuple):
    id: str
    prompt: list[int]
    tokens: int
    finish_reason: str
    max_tokens: int
    temperature: float | None
    task: str


def load_prompt_rows(dataset: Path, split_seed: int) -> tuple[RowTable, PromptEmbedding]:
    """Load a row a request: its prompt's vector, and how long its answer was.

    The embedding is fitted to the training part. Requests without token ids are left out.

    Args:
        dataset: folder of a dataset; or transcripts, a file or a pattern such as
            ``transcripts/round-*.parquet``.
        split_seed: of the split.

    Raises:
        DatasetError: there is nothing to read, or no token ids are in it.
    """
    session, answers = _of_dataset(dataset) if dataset.is_dir() else _of_transcripts(dataset)
    answers = [one for one in answers if one.prompt and one.tokens > 0]
    if not answers:
        raise DatasetError(
            f"{dataset}: no request has token ids, so that there is no prompt to read"
        )
    _, group = np.unique(np.array([one.id for one in answers]), return_inverse=True)
    prompts = [one.prompt for one in answers]
    training = split_requests(group, split_seed)["train"]
    try:
        embedding = PromptEmbedding.fit(
            session.model, [prompts[i] for i in training], revision=_commit(session.revision)
        )
    except PromptEmbeddingError as error:
        raise DatasetError(f"{dataset}: {error}") from error
    own = [embedding.own_tokens(prompt) for prompt in prompts]
    vectors = np.stack([embedding.vector(tokens) for tokens, _ in own])
    tokens = np.array([one.tokens for one in answers], dtype=np.int64)
    censored = np.array([one.finish_reason != "stop" for one in answers])
    # vLLM's default where it is unknown
    temperature = np.array([1.0 if one.temperature is None else one.temperature for one in answers])
    n = len(answers)
    table = RowTable(
        hidden_states=HiddenStates([vectors]),
        vector=np.arange(n),
        request=np.arange(n),
        prompt_tokens=np.array([length for _, length in own], dtype=np.int64),
        generated_tokens=np.zeros(n, dtype=np.int64),
        remaining_tokens=tokens,
        censored=censored,
        max_tokens=np.array([one.max_tokens for one in answers], dtype=np.int64),
        requests=Requests(
            request_id=[one.id for one in answers],
            group=group,
            total_tokens=tokens,
            censored=censored,
            finish_reason=[one.finish_reason for one in answers],
            task=[one.task for one in answers],
            temperature=temperature,
            prompt_token_ids=[*prompts],
            output_token_ids=[None] * n,
        ),
        session=replace(
            session,
            hidden_size=embedding.size,
            layer=PROMPT_LAYER,
            normalisation="none",
            dtype="float32",
            k=1,
        ),
    )
    return table, embedding


def _commit(revision: str) -> str | None:
    """Return a revision that the hub knows; those of folders and files are ours."""
    return revision if re.fullmatch("[0-9a-f]{40}", revision) else None


def _of_dataset(dataset: Path) -> tuple[Session, list[_Answer]]:
    session, files = read_sessions(dataset)[-1], requests_files(dataset)
    columns = ["external_id", "prompt_token_ids", "total_tokens", "finish_reason", "max_tokens"]
    requests = read_columns(files, [*columns, "temperature", "task"]).to_pylist()
    return session, list(map(_answer, requests))


def _answer(request: dict[str, Any]) -> _Answer:
    return _Answer(
        id=request["external_id"],
        prompt=request["prompt_token_ids"] or [],
        tokens=request["total_tokens"],
        finish_reason=request["finish_reason"],
        max_tokens=request["max_tokens"],
        temperature=request["temperature"],
        task=request["task"],
    )


def _of_transcripts(pattern: Path) -> tuple[Session, list[_Answer]]:
    files = [pattern] if pattern.is_file() else sorted(pattern.parent.glob(pattern.name or "."))
    if not files or not files[0].is_file():
        raise DatasetError(f"{pattern}: no such dataset, and no such file of transcripts")
    try:
        found = [load_transcripts(file) for file in files]
    except PromptError as error:
        raise DatasetError(str(error)) from error
    models = {(one.model, one.revision or "") for one in found}
    if len(models) > 1 or found[0].model is None:
        raise DatasetError(
            f"{pattern}: the transcripts must name one model, and the same: they name "
            f"{', '.join(sorted(name or 'none' for name, _ in models))}"
        )
    answers = [answer for one in found for answer in _answers(one.transcripts)]
    return _session(found[0].model, found[0].revision or "", files[0]), answers


def _answers(transcripts: list[Transcript]) -> Iterator[_Answer]:
    """Yield those with token ids: a text would need a chat template."""
    for one in transcripts:
        prompt = [token for token in one.prompt if isinstance(token, int)]
        yield _Answer(
            one.id,
            prompt,
            len(one.answer) if isinstance(one.answer, list) else 0,
            one.finish_reason,
            one.max_tokens,
            one.temperature,
            one.task,
        )


def _session(model: str, revision: str, file: Path) -> Session:
    return Session(
        name=file.stem,
        model=model,
        revision=revision,
        hidden_size=1,
        dtype="float32",
        k=1,
        engine="unknown",
        runner="unknown",
        headway="unknown",
        model_dtype="unknown",
        started="",
    )
