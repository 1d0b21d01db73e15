"""Batches of rows for training, read from the memory-mapped dataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_collection.dataset.dataset_schema import DatasetError, SplitName, split_requests
from predictor.models.hidden_state_mlp import RequestRows
from predictor.prompts.prompt_predictor import PromptEmbedding
from predictor.training.prompt_table import load_prompt_rows
from predictor.training.row_table import RowTable, load_rows


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
        torch.from_numpy(table.request),
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
