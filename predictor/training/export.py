"""The callback that turns a training's best epoch into a checkpoint."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from data_collection.atomic_file import write_text_atomically
from data_collection.text_file import read_text
from data_collection.versions import machine, source_commit, versions
from predictor.models.checkpoint import export_checkpoint
from predictor.training.predictor_training import PredictorTraining
from predictor.training.rows_data_module import RowsDataModule

__all__ = ["ExportCheckpoint"]


class ExportCheckpoint(Callback):
    """When training ends, write the best epoch as a checkpoint with its card.

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
        assert isinstance(pl_module, PredictorTraining)
        assert pl_module.predictor is not None
        best = next(c for c in trainer.callbacks if isinstance(c, ModelCheckpoint))  # type: ignore[attr-defined]
        if not best.best_model_path:
            return  # nothing was trained (a dry run)
        state = torch.load(best.best_model_path, weights_only=True)["state_dict"]
        pl_module.load_state_dict(state)
        data: RowsDataModule = trainer.datamodule  # type: ignore[attr-defined]
        pl_module.eval()
        pl_module.finish(data)
        figure = float(best.best_model_score or "nan")
        provenance = self._provenance(trainer, data) | {pl_module.monitor: figure}
        export_checkpoint(pl_module.predictor.cpu(), self.folder, provenance)
        dataset_card = read_text(data.dataset / "README.md")
        write_text_atomically(self.folder / "dataset_card.md", dataset_card)
        print(f"best {pl_module.monitor} {figure:.4g}; wrote {self.folder}")

    def _provenance(self, trainer: L.Trainer, data: RowsDataModule) -> dict[str, Any]:
        train = data.parts["train"]
        return {
            "command": "headway " + " ".join(sys.argv[1:]),
            "commit": source_commit(),
            "versions": versions(),
            "machine": machine(),
            "dataset": f"{data.dataset.name}: {len(train.requests)} requests, engine "
            f"{train.session.engine}, sampling {train.session.sampling}",
            "rows": {name: len(part) for name, part in data.parts.items()},
            "rows of cut requests": f"{data.censored_rows} ({data.cut_requests})",
            "split_seed": data.split_seed,
            "seed": int(torch.initial_seed()),
            "epochs": trainer.current_epoch,
            "training_seconds": round(time.monotonic() - self._started, 1),
        }
