"""Fine-tuning an encoder to classify prompts, with Lightning."""

import logging
import re
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from predictor.prompt_length.encoder_classifier import EncoderClassifier
from predictor.prompt_length.text_batches import LabelledTexts, TextBatch, text_batches

__all__ = ["EncoderOptions", "EncoderTraining", "train_classifier"]

_HEAD_RATE = 10.0
"""How much faster the new linear layer learns than the encoder."""

_VALIDATION_BATCH = 64


@dataclass(frozen=True)
class EncoderOptions:
    """An encoder and how it is fine-tuned.

    Attributes:
        model: ``minilm``, a Hugging Face id such as distilbert/distilbert-base-uncased (the
            paper's), or a folder.
        max_tokens: tokens of prompt and hint that are read.
        train_layers: only the last so many of the encoder's layers learn, and not its
            embeddings; None: everything learns, as in the paper.
        dropout: on the mean state.
        epochs: passes over the training prompts; 6 in the paper (C.7).
        patience: passes without a lower validation loss before stopping.
        learning_rate: AdamW's for the encoder, falling to 0 over the passes; the linear layer's
            is ten times that.
        batch_size: prompts in a step.
        precision: of the training's arithmetic; ``bf16-mixed`` halves its time on processors
            that have it (AVX-512 BF16, AMX). Predictions are always computed in full.
    """

    model: str = "minilm"
    max_tokens: int = 128
    train_layers: int | None = None
    dropout: float = 0.1
    epochs: int = 6
    patience: int = 2
    learning_rate: float = 5e-5
    batch_size: int = 16
    precision: Literal["32-true", "bf16-mixed"] = "32-true"

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_size, self.patience) < 1 or self.learning_rate <= 0:
            raise ValueError("epochs, patience, batch_size and learning_rate must be positive")


class EncoderTraining(L.LightningModule):
    r"""Minimise the cross-entropy of the labels, :math:`-\frac{1}{N} \sum_i \log p_{i, y_i}`.

    Args:
        classifier: to train.
        options: how.
    """

    monitor = "val_loss"

    def __init__(self, classifier: EncoderClassifier, options: EncoderOptions) -> None:
        super().__init__()
        self.classifier = classifier
        self.options = options
        if options.train_layers is not None:
            freeze_below(classifier.backbone, options.train_layers)

    def configure_optimizers(self) -> Any:
        """Return AdamW, its rates falling linearly to 0 over the planned steps."""
        rate = self.options.learning_rate
        learning = [w for w in self.classifier.backbone.parameters() if w.requires_grad]
        head = {"params": self.classifier.head.parameters(), "lr": _HEAD_RATE * rate}
        optimizer = torch.optim.AdamW([{"params": learning, "lr": rate}, head])
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def training_step(self, batch: TextBatch, batch_index: int) -> torch.Tensor:
        """Return the mean loss of a batch."""
        loss = self._loss(batch)
        n = len(batch.labels)
        self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=n)
        return loss

    def validation_step(self, batch: TextBatch, batch_index: int) -> None:
        """Log the loss that chooses the best pass."""
        self.log(self.monitor, self._loss(batch), prog_bar=True, batch_size=len(batch.labels))

    def _loss(self, batch: TextBatch) -> torch.Tensor:
        logits = self.classifier(batch.input_ids, batch.attention_mask)
        return nn.functional.cross_entropy(logits, batch.labels)


def freeze_below(backbone: Any, train_layers: int) -> None:
    """Let only the last ``train_layers`` of an encoder learn.

    No graph is kept below the first of them, so that the frozen part costs a forward only.

    Raises:
        ValueError: the encoder has fewer layers.
    """
    depth = int(backbone.config.num_hidden_layers)
    if not 0 <= train_layers <= depth:
        raise ValueError(f"train_layers is {train_layers}, the encoder has {depth} layers")
    for name, weights in backbone.named_parameters():
        layer = re.search(r"(?:^|\.)layers?\.(\d+)\.", name)
        learns = layer is not None and int(layer.group(1)) >= depth - train_layers
        weights.requires_grad_(learns)


def train_classifier(
    classifier: EncoderClassifier,
    train: LabelledTexts,
    validation: LabelledTexts,
    options: EncoderOptions,
    folder: Path,
    seed: int,
) -> dict[str, Any]:
    """Train a classifier and leave it with the weights of the best pass.

    Args:
        classifier: to train.
        train: what it learns from.
        validation: what chooses the pass.
        options: how.
        folder: for logs, and for the best weights while it trains.
        seed: of the dropout and the order of batches.

    Returns:
        What the checkpoint's card tells: passes, seconds, validation loss.
    """
    started = time.monotonic()
    L.seed_everything(seed, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    training = EncoderTraining(classifier, options)
    training.train()  # pre-trained encoders come without dropout, and Lightning leaves them so
    padding = classifier.tokenizer.pad_token_id
    weights = folder / "training"
    shutil.rmtree(weights, ignore_errors=True)
    best = ModelCheckpoint(weights, monitor=training.monitor, save_weights_only=True)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        deterministic=True,
        precision=options.precision,
        max_epochs=options.epochs,
        callbacks=[EarlyStopping(training.monitor, patience=options.patience), best, _EpochLine()],
        logger=CSVLogger(folder / "logs", name="csv"),
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        try:
            trainer.fit(
                training,
                text_batches(train, options.batch_size, padding, seed),
                text_batches(validation, _VALIDATION_BATCH, padding),
            )
        except SystemExit as stopped:  # what Lightning makes of Ctrl-C
            if trainer.interrupted:
                raise KeyboardInterrupt from stopped
            raise
    state = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    training.load_state_dict(state)
    classifier.requires_grad_(True).eval()
    shutil.rmtree(weights)
    return {
        "epochs": trainer.current_epoch,
        "training_seconds": round(time.monotonic() - started, 1),
        training.monitor: float(best.best_model_score or "nan"),
    }


class _EpochLine(Callback):
    """Say how each pass went, also where no progress bar does."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss = float(trainer.callback_metrics[EncoderTraining.monitor])
        passes = f"{trainer.current_epoch + 1} of {trainer.max_epochs}"
        print(f"  pass {passes}: validation loss {loss:.4f}", flush=True)
