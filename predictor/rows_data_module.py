"""Batches of rows for training, read from the memory-mapped dataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_collection.dataset_schema import DatasetError
from data_collection.split import SplitName, split_requests
from predictor.row_table import RowTable, load_rows

__all__ = ["Batch", "RowsDataModule"]

Batch = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [n, d] and remaining tokens [n], float32."""


class RowsDataModule(L.LightningDataModule):
    """The rows of a dataset, split 70/15/15 by request (STAR §4.4).

    Rows of requests that were cut have no true remaining length: they are left out and
    counted in ``censored_rows``.

    Args:
        dataset: folder recorded by ``headway collect`` or by a live server.
        batch_size: rows in a step of training.
        split_seed: of the split; the evaluation must use the same.
        train_requests: keep only so many requests of the training part (for learning curves).
    """

    def __init__(
        self,
        dataset: Path,
        batch_size: int = 64,
        split_seed: int = 0,
        train_requests: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.split_seed = split_seed
        self.train_requests = train_requests
        self.parts: dict[SplitName, RowTable] = {}
        self.censored_rows = 0

    def setup(self, stage: str) -> None:
        """Load and split the dataset, once."""
        if self.parts:
            return
        table = load_rows(self.dataset)
        self.censored_rows = int(table.censored.sum())
        for name, requests in split_requests(table.requests.group, self.split_seed).items():
            if name == "train" and self.train_requests is not None:
                requests = requests[: self.train_requests]
            part = table.select(np.isin(table.request, requests)).uncensored()
            if len(part) == 0:
                raise DatasetError(
                    f"{self.dataset}: the {name} part has no row with a known remaining length "
                    f"({self.censored_rows} of {len(table)} rows are censored)"
                )
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


class _Rows(Dataset[Batch]):
    """Takes a whole batch of rows at once."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = np.asarray(indices)
        vectors = self._table.hidden_states.take(self._table.vector[rows])
        remaining = self._table.remaining_tokens[rows].astype(np.float32)
        return torch.from_numpy(vectors), torch.from_numpy(remaining)


def _as_is(batch: Any) -> Any:
    return batch
