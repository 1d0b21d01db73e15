"""Training the predictor with Lightning, and the checkpoint that comes out."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from data_collection.atomic_file import write_text_atomically
from data_collection.versions import machine, source_commit, versions
from predictor.remaining_length_mlp import RemainingLengthMLP
from predictor.row_table import RowTable
from predictor.rows_data_module import Batch, RowsDataModule

__all__ = ["ExportCheckpoint", "RemainingLengthTraining"]

_STATISTICS_ROWS = 20_000


class RemainingLengthTraining(L.LightningModule):
    """Train `RemainingLengthMLP` with AdamW on the L1 loss (STAR §4.4).

    The network is built when the data is known: d, the standardisation (from at most
    20,000 training rows) and the scale (the mean remaining length) come from it.

    Args:
        widths: hidden widths of the MLP.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (2048, 512, 64),
        lr: float = 3e-4,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.widths = widths
        self.lr = lr
        self.weight_decay = weight_decay
        self.predictor: RemainingLengthMLP | None = None

    def setup(self, stage: str) -> None:
        """Build the network for the data module's rows."""
        if self.predictor is None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            self.predictor = build_predictor(data.parts["train"], self.widths)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the network."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        """Return the mean absolute error of a batch, in units of the scale."""
        predictor = self._built()
        vectors, remaining = batch
        loss = nn.functional.l1_loss(predictor(vectors), remaining)
        self.log("train_mae", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss / predictor.target_scale

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Log the validation MAE in tokens."""
        self._log_mae("val_mae", batch)

    def test_step(self, batch: Batch, batch_index: int) -> None:
        """Log the test MAE in tokens."""
        self._log_mae("test_mae", batch)

    def _log_mae(self, name: str, batch: Batch) -> None:
        vectors, remaining = batch
        mae = nn.functional.l1_loss(self._built()(vectors).clamp_min(0), remaining)
        self.log(name, mae, prog_bar=True, batch_size=len(remaining))

    def _built(self) -> RemainingLengthMLP:
        assert self.predictor is not None, "setup() builds the predictor"
        return self.predictor


def build_predictor(train: RowTable, widths: tuple[int, ...]) -> RemainingLengthMLP:
    """Return an untrained predictor whose standardisation fits the training rows."""
    session, remaining = train.session, train.remaining_tokens
    step = max(1, len(train) // _STATISTICS_ROWS)
    sample = train.hidden_states.take(train.vector[::step])
    scale = float(remaining.mean())
    predictor = RemainingLengthMLP(
        model=session.model,
        model_revision=session.revision,
        hidden_size=session.hidden_size,
        k=session.k,
        layer=session.layer,
        normalisation=session.normalisation,
        widths=widths,
        target_scale=scale,
        trained_generated_tokens=_range(train.generated_tokens),
        trained_remaining_tokens=_range(remaining),
    )
    predictor.input_mean.copy_(torch.from_numpy(sample.mean(axis=0)))
    predictor.input_std.copy_(torch.from_numpy(sample.std(axis=0) + 1e-6))
    with torch.no_grad():  # start from the best constant prediction
        last = predictor.network[-1]
        assert isinstance(last, nn.Linear)
        last.bias.fill_(float(np.median(remaining)) / scale)
    return predictor


class ExportCheckpoint(Callback):
    """When training ends, write the epoch with the best validation MAE as a checkpoint.

    Args:
        folder: where ``model.safetensors``, ``config.json`` and the card go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note when training began."""
        self._started = time.monotonic()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the best epoch's weights and write the checkpoint."""
        assert isinstance(pl_module, RemainingLengthTraining)
        best = next(c for c in trainer.callbacks if isinstance(c, ModelCheckpoint))  # type: ignore[attr-defined]
        if not best.best_model_path:
            return  # nothing was trained (a dry run)
        state = torch.load(best.best_model_path, weights_only=True)["state_dict"]
        pl_module.load_state_dict(state)
        data = trainer.datamodule  # type: ignore[attr-defined]
        provenance = self._provenance(trainer, data, float(best.best_model_score or "nan"))
        export_checkpoint(pl_module._built(), self.folder, provenance)
        dataset_card = (data.dataset / "README.md").read_text(encoding="utf-8")
        write_text_atomically(self.folder / "dataset_card.md", dataset_card)
        print(f"best validation MAE {best.best_model_score:.1f} tokens; wrote {self.folder}")

    def _provenance(
        self, trainer: L.Trainer, data: RowsDataModule, val_mae: float
    ) -> dict[str, Any]:
        train = data.parts["train"]
        return {
            "command": "headway " + " ".join(sys.argv[1:]),
            "commit": source_commit(),
            "versions": versions(),
            "machine": machine(),
            "dataset": f"{data.dataset.name}: {len(train.requests)} requests, engine "
            f"{train.session.engine}, sampling {train.session.sampling}",
            "rows": {name: len(part) for name, part in data.parts.items()}
            | {"censored, left out": data.censored_rows},
            "split_seed": data.split_seed,
            "seed": int(torch.initial_seed()),
            "epochs": trainer.current_epoch,
            "training_seconds": round(time.monotonic() - self._started, 1),
            "validation_mae": val_mae,
        }


def export_checkpoint(
    predictor: RemainingLengthMLP, folder: Path, provenance: dict[str, Any]
) -> None:
    """Write a checkpoint with its card; the weights come last, so a whole one has them."""
    predictor.provenance = provenance
    predictor._hub_mixin_config = predictor.config()
    folder.mkdir(parents=True, exist_ok=True)
    predictor.save_pretrained(folder)
    write_text_atomically(folder / "README.md", str(predictor.generate_model_card()))


def _range(values: Any) -> tuple[int, int]:
    return int(values.min()), int(values.max())
