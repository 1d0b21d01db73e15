"""Fine-tuning a pre-trained model on texts, with Lightning."""

import logging
import sys
import warnings
from datetime import timedelta
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from rescheduler.papers.text_models.text_batches import TextBatch

__all__ = ["FineTunedModule", "Precision", "fine_tune"]

Precision = Literal["32-true", "bf16-mixed"]


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
