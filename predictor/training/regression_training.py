"""Training STAR's regressor."""

from typing import Any

import numpy as np
import torch
from torch import nn

from predictor.models.remaining_length_mlp import RemainingLengthMLP
from predictor.training.predictor_training import PredictorTraining
from predictor.training.rows_data_module import Batch, RowsDataModule

__all__ = ["RemainingLengthTraining"]


class RemainingLengthTraining(PredictorTraining):
    """Train `RemainingLengthMLP` on the L1 loss, stopped by the validation MAE (STAR §4.4).

    The output is scaled by the mean remaining length of the training rows. See
    `PredictorTraining` for the arguments.
    """

    monitor = "val_mae"

    def build(self, data: RowsDataModule, shared: dict[str, Any]) -> RemainingLengthMLP:
        """Return a regressor that starts from the best constant prediction.

        Raises:
            ValueError: cut requests are to be censored, which the L1 loss cannot.
        """
        if data.cut_requests == "censor":
            raise ValueError(
                "the regressor cannot use cut requests as 'longer than this': give "
                "--data.cut_requests leave_out or as_ended, or train the survival model"
            )
        remaining = data.parts["train"].remaining_tokens
        scale = float(remaining.mean())
        predictor = RemainingLengthMLP(target_scale=scale, **shared)
        last = predictor.network[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias.fill_(float(np.median(remaining)) / scale)
        return predictor

    def losses(self, batch: Batch, noise: float) -> torch.Tensor:
        """Return absolute errors in units of the scale, [n]."""
        predictor = self._built()
        errors: torch.Tensor = (predictor(batch.rows, noise) - batch.remaining).abs()
        return errors / predictor.target_scale

    def validation_figure(self, batch: Batch) -> torch.Tensor:
        """Return the MAE in tokens of the clipped predictions."""
        predicted: torch.Tensor = self._built()(batch.rows).clamp_min(0)
        return (predicted - batch.remaining).abs().mean()

    def _built(self) -> RemainingLengthMLP:
        assert isinstance(self.predictor, RemainingLengthMLP), "setup() builds the predictor"
        return self.predictor
