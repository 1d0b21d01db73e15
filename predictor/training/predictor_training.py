"""Training predictors with Lightning: what STAR's regressor and the survival model share."""

from abc import ABC, abstractmethod
from typing import Any

import lightning as L
import numpy as np
import torch

from predictor.models.hidden_state_mlp import HiddenStateMLP
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import Batch, RowsDataModule, request_rows

__all__ = ["PredictorTraining"]

_STATISTICS_ROWS = 20_000


class PredictorTraining(L.LightningModule, ABC):
    """Train a predictor on hidden states with AdamW.

    The network is built when the data is known: d, the standardisation (from at most
    20,000 training rows) and where the output starts come from it.

    Args:
        widths: hidden widths of the MLP.
        inputs: numbers it reads beside the hidden state, out of
            `predictor.models.hidden_state_mlp.INPUTS`. None in STAR.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        noise: standard deviation of the noise added to the standardised hidden states while
            training. The rows of one request are alike; noise keeps the network from learning
            requests by heart.
    """

    monitor: str
    """Name of the validation figure that early stopping and the best epoch go by."""

    def __init__(
        self,
        widths: tuple[int, ...] = (2048, 512, 64),
        inputs: tuple[str, ...] = (),
        lr: float = 3e-4,
        weight_decay: float = 1e-2,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.widths = widths
        self.inputs = inputs
        self.lr = lr
        self.weight_decay = weight_decay
        self.noise = noise
        self.predictor: HiddenStateMLP | None = None

    @abstractmethod
    def build(self, data: RowsDataModule, shared: dict[str, Any]) -> HiddenStateMLP:
        """Return the untrained predictor for the data's training rows.

        ``shared`` are the arguments of `HiddenStateMLP` that do not depend on the head.
        """

    @abstractmethod
    def losses(self, batch: Batch, noise: float) -> torch.Tensor:
        """Return the loss of each row, [n]."""

    def finish(self, data: RowsDataModule) -> None:
        """Do what is left when the best epoch's weights are in place."""

    def setup(self, stage: str) -> None:
        """Build the network for the data module's rows."""
        if self.predictor is None:
            data: RowsDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
            train = data.parts["train"]
            predictor = self.build(data, self._shared(train) | {"adapter": data.adapter})
            step = max(1, len(train) // _STATISTICS_ROWS)
            with torch.no_grad():
                predictor.standardise(request_rows(train.select(np.arange(0, len(train), step))))
            self.predictor = predictor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the network."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        """Return the mean loss of a batch."""
        loss = self.losses(batch, self.noise).mean()
        n_rows = len(batch.remaining)
        self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=n_rows)
        return loss

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Log the figure that training is stopped by."""
        self._log_figure(self.monitor, batch)

    def test_step(self, batch: Batch, batch_index: int) -> None:
        """Log the same figure for the test rows."""
        self._log_figure(self.monitor.replace("val_", "test_"), batch)

    def validation_figure(self, batch: Batch) -> torch.Tensor:
        """Return what `monitor` names, for a batch; lower is better."""
        return self.losses(batch, 0.0).mean()

    def _log_figure(self, name: str, batch: Batch) -> None:
        n_rows = len(batch.remaining)
        self.log(name, self.validation_figure(batch), prog_bar=True, batch_size=n_rows)

    def _shared(self, train: RowTable) -> dict[str, Any]:
        session = train.session
        same = ("model", "hidden_size", "k", "layer", "normalisation")
        return {
            **{name: getattr(session, name) for name in same},
            "model_revision": session.revision,
            "widths": self.widths,
            "inputs": self.inputs,
            "trained_generated_tokens": _range(train.generated_tokens),
            "trained_remaining_tokens": _range(train.remaining_tokens),
        }


def _range(values: Any) -> tuple[int, int]:
    return int(values.min()), int(values.max())
