"""Batches of tokenised texts, padded."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["LabelledTexts", "TextBatch", "shuffled_text_batches", "text_batches"]

_POOL = 16
"""Batches that are shuffled together before they are put in order of length."""


class LabelledTexts(NamedTuple):
    """Texts and what they are.

    Attributes:
        token_ids: of each text, in the reading model's tokens.
        labels: [n] indices of classes, or numbers.
    """

    token_ids: Sequence[Sequence[int]]
    labels: npt.NDArray[Any]


class TextBatch(NamedTuple):
    """Texts, padded on the right.

    Attributes:
        input_ids: [n, length].
        attention_mask: [n, length], 1 where there is text.
        labels: [n].
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def text_batches(
    texts: LabelledTexts,
    batch_size: int,
    padding: int,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> DataLoader[TextBatch]:
    """Return batches of like length, so that little is padded.

    With a seed they come in random order, another one in each pass. Each pass draws one number
    from ``generator``; None draws it from torch's own, which the dropout uses too.
    """
    lengths = np.array([len(ids) for ids in texts.token_ids])
    return DataLoader(
        _Texts(texts, padding),
        batch_sampler=_LikeLengths(lengths, batch_size, seed),
        collate_fn=_as_is,
        generator=generator,
    )


def shuffled_text_batches(
    texts: LabelledTexts, batch_size: int, padding: int, order: np.random.Generator
) -> DataLoader[TextBatch]:
    """Return batches of at most ``batch_size`` texts, as even as can be, shuffled in each pass."""
    return DataLoader(
        _Texts(texts, padding),
        batch_sampler=_Shuffled(len(texts.token_ids), batch_size, order),
        collate_fn=_as_is,
        generator=torch.Generator(),  # leaves the random numbers of the dropout alone
    )


class _Shuffled(Sampler[list[int]]):
    """Indices in batches that are shuffled only."""

    def __init__(self, n: int, batch_size: int, order: np.random.Generator) -> None:
        self._n = n
        self._batches = -(-n // batch_size)
        self._order = order

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        batches = np.array_split(self._order.permutation(self._n), self._batches)
        return iter([batch.tolist() for batch in batches])


class _LikeLengths(Sampler[list[int]]):
    """Indices in batches: shuffled, then sorted by length within pools of batches."""

    def __init__(self, lengths: npt.NDArray[np.int64], batch_size: int, seed: int | None) -> None:
        self._lengths = lengths
        self._size = batch_size
        self._order = None if seed is None else np.random.default_rng(seed)

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        n, size = len(self._lengths), self._size
        if self._order is None:
            ranked = np.argsort(self._lengths, kind="stable")
        else:
            shuffled = self._order.permutation(n)
            pools = [shuffled[i : i + size * _POOL] for i in range(0, n, size * _POOL)]
            ranked = np.concatenate([pool[np.argsort(self._lengths[pool])] for pool in pools])
        batches = [ranked[i : i + size].tolist() for i in range(0, n, size)]
        order = (
            np.arange(len(batches))
            if self._order is None
            else self._order.permutation(len(batches))
        )
        return iter([batches[i] for i in order])


class _Texts(Dataset[TextBatch]):
    """Takes a whole batch of texts at once."""

    def __init__(self, texts: LabelledTexts, padding: int) -> None:
        self._texts = texts
        self._padding = padding

    def __len__(self) -> int:
        return len(self._texts.token_ids)

    def __getitems__(self, indices: Sequence[int]) -> TextBatch:
        ids = [torch.tensor(self._texts.token_ids[i]) for i in indices]
        lengths = torch.tensor([len(text) for text in ids])
        padded = torch.nn.utils.rnn.pad_sequence(ids, True, float(self._padding))
        mask = (torch.arange(padded.shape[1])[None, :] < lengths[:, None]).long()
        return TextBatch(padded, mask, torch.from_numpy(self._texts.labels[list(indices)]))


def _as_is(batch: Any) -> Any:
    return batch
