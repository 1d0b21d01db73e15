"""Requests as rows of one prompt each, to train what forecasts before prefill."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_collection.dataset.dataset_schema import (
    REQUESTS_SCHEMA,
    DatasetError,
    Session,
    open_shard,
    read_sessions,
    requests_files,
    split_requests,
)
from data_collection.dataset.export_transcripts import TRANSCRIPTS_SCHEMA
from predictor.models.hidden_state_mlp import PROMPT_LAYER
from predictor.prompts.prompt_embedding import PromptEmbedding, PromptEmbeddingError
from predictor.training.row_table import HiddenStates, Requests, RowTable

__all__ = ["load_prompt_rows"]


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
    session, records = _of_dataset(dataset) if dataset.is_dir() else _of_transcripts(dataset)
    records = [one for one in records if one["prompt_token_ids"] and one["tokens"] > 0]
    if not records:
        raise DatasetError(
            f"{dataset}: no request has token ids, so that there is no prompt to read"
        )
    _, group = np.unique(np.array([one["id"] for one in records]), return_inverse=True)
    prompts = [one["prompt_token_ids"] for one in records]
    training = split_requests(group, split_seed)["train"]
    try:
        embedding = PromptEmbedding.fit(
            session.model, [prompts[i] for i in training], revision=_commit(session.revision)
        )
    except PromptEmbeddingError as error:
        raise DatasetError(f"{dataset}: {error}") from error
    own = [embedding.own_tokens(prompt) for prompt in prompts]
    vectors = np.stack([embedding.vector(tokens) for tokens, _ in own])
    tokens = np.array([one["tokens"] for one in records], dtype=np.int64)
    reasons = [str(one["finish_reason"]) for one in records]
    censored = np.array([reason != "stop" for reason in reasons])
    temperature = np.array([_number(one["temperature"], 1.0) for one in records])
    n = len(records)
    table = RowTable(
        hidden_states=HiddenStates([vectors]),
        vector=np.arange(n),
        request=np.arange(n),
        prompt_tokens=np.array([length for _, length in own], dtype=np.int64),
        generated_tokens=np.zeros(n, dtype=np.int64),
        remaining_tokens=tokens,
        censored=censored,
        max_tokens=np.array([int(_number(one["max_tokens"], 0)) for one in records]),
        requests=Requests(
            request_id=[one["id"] for one in records],
            group=group,
            total_tokens=tokens,
            censored=censored,
            finish_reason=reasons,
            task=[str(one["task"] or "") for one in records],
            temperature=temperature,
            prompt_token_ids=list(prompts),
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


def _of_dataset(dataset: Path) -> tuple[Session, list[dict[str, Any]]]:
    session = read_sessions(dataset)[-1]
    records = []
    for file in requests_files(dataset):
        with open_shard(file) as shard:
            for one in shard.read().to_pylist():
                short = {name: one.get(name) for name in REQUESTS_SCHEMA.names}
                records.append(short | {"id": one["external_id"], "tokens": one["total_tokens"]})
    return session, records


def _of_transcripts(pattern: Path) -> tuple[Session, list[dict[str, Any]]]:
    files = [pattern]
    if not pattern.is_file():
        files = sorted(pattern.parent.glob(pattern.name)) if pattern.name else []
    if not files:
        raise DatasetError(f"{pattern}: no such dataset, and no such file of transcripts")
    models, records = set(), []
    for file in files:
        with open_shard(file) as shard:
            found = shard.schema_arrow
            missing = sorted(set(TRANSCRIPTS_SCHEMA.names) - set(found.names))
            if missing:
                raise DatasetError(f"{file}: no transcripts: it has no {', '.join(missing)}")
            described = found.metadata or {}
            models.add(
                tuple(
                    described.get(name, b"").decode()
                    for name in (b"headway.model", b"headway.revision")
                )
            )
            for one in shard.read().to_pylist():
                records.append(one | {"tokens": len(one["output_token_ids"] or ())})
    if len(models) > 1 or not next(iter(models))[0]:
        raise DatasetError(
            f"{pattern}: the transcripts must name one model, and the same: they name "
            f"{', '.join(sorted(name or 'none' for name, _ in models))}"
        )
    (model, revision), first = models.pop(), files[0]
    return _session(model, revision, first), records


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


def _number(value: Any, otherwise: float) -> float:
    return otherwise if value is None or value != value else float(value)
