"""Batches of rows for training: of a memory-mapped dataset, or of prompts, a row each."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_collection.dataset.dataset_schema import (
    DatasetError,
    Session,
    SplitName,
    read_columns,
    read_sessions,
    requests_files,
    split_requests,
)
from data_collection.workload.prompts import PromptError, Transcript, load_transcripts
from predictor.models.hidden_state_mlp import PROMPT_LAYER, RequestRows
from predictor.prompts.prompt_predictor import PromptEmbedding, PromptEmbeddingError
from predictor.training.row_table import HiddenStates, Requests, RowTable, load_rows


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
            state_half_life=0.0,
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


class Batch(NamedTuple):
    """Rows with what came of them.

    Attributes:
        rows: n requests.
        remaining: [n] float32 tokens that came.
        censored: [n] bool, whether the request was cut after them.
    """

    rows: RequestRows
    remaining: torch.Tensor
    censored: torch.Tensor


class RowsDataModule(L.LightningDataModule):
    """The rows of a dataset, split 70/15/15 by request (STAR §4.4).

    Args:
        dataset: folder recorded by ``headway collect`` or by a live server.
        batch_size: rows in a step of training.
        split_seed: of the split; the evaluation must use the same.
        train_requests: keep only so many requests of the training part, drawn at random with the
            same seed (for learning curves): those that ended first are short.
        cut_requests: what rows of requests that were cut (``max_tokens``, a leaving client)
            count as, since their true remaining length is unknown. ``leave_out``: nothing;
            ``as_ended``: as if they had ended where they were cut, as published systems do;
            ``censor``: as "longer than this", which only a likelihood can use.
        reads: ``hidden_states`` of running requests; or ``prompts``, a row each, to forecast
            before prefill. Then ``dataset`` may also be transcripts, a file or a pattern.
        adapter: learn from the requests of this LoRA adapter, by its name; "": the base model's.
    """

    def __init__(
        self,
        dataset: Path,
        batch_size: int = 64,
        split_seed: int = 0,
        train_requests: int | None = None,
        cut_requests: Literal["leave_out", "as_ended", "censor"] = "leave_out",
        reads: Literal["hidden_states", "prompts"] = "hidden_states",
        adapter: str = "",
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.split_seed = split_seed
        self.train_requests = train_requests
        self.cut_requests = cut_requests
        self.reads = reads
        self.adapter = adapter
        self.embedding: PromptEmbedding | None = None
        self.parts: dict[SplitName, RowTable] = {}
        self.censored_rows = 0

    def setup(self, stage: str) -> None:
        """Load and split the dataset, once.

        Raises:
            DatasetError: a part has no row to learn from.
        """
        if self.parts:
            return
        if self.reads == "prompts" and self.adapter:
            raise DatasetError("--data.adapter: of prompts alone only the base model's are learned")
        if self.reads == "prompts":
            table, self.embedding = load_prompt_rows(self.dataset, self.split_seed)
        else:
            table = load_rows(self.dataset, self.adapter)
        self.censored_rows = int(table.censored.sum())
        for name, requests in split_requests(table.requests.group, self.split_seed).items():
            if name == "train" and self.train_requests is not None:
                mine = requests[np.isin(requests, table.request)]
                drawn = np.random.default_rng(self.split_seed).permutation(mine)
                requests = drawn[: self.train_requests]
            part = table.select(np.isin(table.request, requests))
            ended = part.uncensored()
            if len(ended) == 0:
                raise DatasetError(
                    f"{self.dataset}: the {name} part has no row with a known remaining length "
                    f"({self.censored_rows} of {len(table)} rows are censored)"
                )
            if self.cut_requests == "leave_out":
                part = ended
            elif self.cut_requests == "as_ended":
                part = part.ran_to_their_end()
            self.parts[name] = part

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled batches of the training part."""
        return self._loader("train", self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Batches of the validation part."""
        return self._loader("validation", 1024, shuffle=False)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Batches of the test part."""
        return self._loader("test", 1024, shuffle=False)

    def _loader(self, name: SplitName, batch_size: int, shuffle: bool) -> DataLoader[Batch]:
        rows = _Rows(self.parts[name])
        return DataLoader(rows, batch_size, shuffle=shuffle, collate_fn=_as_is)


def request_rows(table: RowTable) -> RequestRows:
    """Return the rows of a table as a predictor's input; they must fit in memory."""
    return RequestRows(
        torch.from_numpy(table.vectors()),
        torch.from_numpy(table.numbers()),
    )


class _Rows(Dataset[Batch]):
    """Takes a whole batch of rows at once."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._numbers = table.numbers()

    def __len__(self) -> int:
        return len(self._table)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows, table = np.asarray(indices), self._table
        vectors = table.hidden_states.take(table.vector[rows])
        return Batch(
            RequestRows(torch.from_numpy(vectors), torch.from_numpy(self._numbers[rows])),
            torch.from_numpy(table.remaining_tokens[rows].astype(np.float32)),
            torch.from_numpy(table.censored[rows]),
        )


def _as_is(batch: Any) -> Any:
    return batch
