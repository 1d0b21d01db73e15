"""Training predictors with Lightning: what STAR's regressor and the survival model share."""

import sys
from abc import ABC, abstractmethod
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn

from predictor.forecasts.kaplan_meier import fit_recalibration, observed_levels, survival_edges
from predictor.models.hidden_state_mlp import PROMPT_LAYER, HiddenStateMLP, RemainingLengthMLP
from predictor.models.survival_mlp import SurvivalMLP, hazard_nll, hazard_rates
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import Batch, RowsDataModule, request_rows

_STATISTICS_ROWS = 20_000
_SHORTEST_GRID = 8192
"""Tokens to which a survival grid goes at least, whatever the data has."""
_OF_ONE_TOKEN = """\
note: each row is the state of one token. Averages say more of a length: collect with \
--record.state_half_life 30, and with --record.layer where the model can (docs/collect.md)"""


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
        same = ("model", "hidden_size", "k", "layer", "normalisation", "state_half_life")
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


class SurvivalTraining(PredictorTraining):
    """Train `SurvivalMLP` on the censored likelihood, stopped by the validation likelihood.

    Training starts from the hazards that fit all rows alike, with no weight on the inputs.
    Afterwards the curves are recalibrated on the validation rows.

    Args:
        edges: the grid in whole tokens from 0; None: dense near 0 and logarithmic to ``limit``.
        limit: tokens that no request can pass: the model's context. None: 8,192, or as many as the
            longest answer of the data has, to the next power of two.
        widths: hidden widths of the MLP.
        inputs: numbers it reads beside the hidden state, see `PredictorTraining`.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        noise: on the standardised hidden states while training, see `PredictorTraining`.
        recalibrate: fit the post-hoc recalibration on the validation rows.
    """

    monitor = "val_nll"

    def __init__(
        self,
        edges: tuple[int, ...] | None = None,
        limit: int | None = None,
        widths: tuple[int, ...] = (512, 128),
        inputs: tuple[str, ...] = (
            *("generated_tokens", "prompt_tokens", "temperature"),
            *("repetition", "repeated_suffix"),
        ),
        lr: float = 1e-4,
        weight_decay: float = 0.1,
        noise: float = 1.0,
        recalibrate: bool = True,
    ) -> None:
        super().__init__(widths, inputs, lr, weight_decay, noise)
        self.save_hyperparameters()
        self.edges, self.limit = edges, limit
        self.recalibrate = recalibrate

    def build(self, data: RowsDataModule, shared: dict[str, Any]) -> SurvivalMLP:
        """Return a survival model that starts from the marginal hazards.

        Raises:
            ValueError: cut requests are left out or counted as ended; an answer is longer than the
                grid.
        """
        if data.cut_requests != "censor":
            raise ValueError(
                "the survival model learns from cut requests as 'longer than this': give "
                "--data.cut_requests censor"
            )
        train = data.parts["train"]
        if train.session.layer != PROMPT_LAYER and not train.session.state_half_life:
            print(_OF_ONE_TOKEN, file=sys.stderr)
        predictor = SurvivalMLP(edges=self._grid(data), **shared)
        edges = predictor.edges.double()
        rates = hazard_rates(
            torch.from_numpy(train.remaining_tokens), torch.from_numpy(train.censored), edges
        )
        last = predictor.network[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.zero_()
            hazards = rates * edges.diff()
            last.bias.copy_(hazards + torch.log(-torch.expm1(-hazards)))
        return predictor

    def _grid(self, data: RowsDataModule) -> list[int]:
        longest = max(int(one.remaining_tokens.max()) for one in data.parts.values() if len(one))
        limit = self.limit or max(_SHORTEST_GRID, 1 << (longest - 1).bit_length())
        edges = list(self.edges or survival_edges(limit).tolist())
        if longest > edges[-1]:
            raise ValueError(
                f"an answer goes on for {longest:,} tokens, and the grid ends at {edges[-1]:,}: "
                "give a larger --model.init_args.limit, or none"
            )
        return edges

    def losses(self, batch: Batch, noise: float) -> torch.Tensor:
        """Return negative log-likelihoods in nats, [n]."""
        predictor = self._built()
        logits = predictor(batch.rows, noise)
        return hazard_nll(logits, batch.remaining, batch.censored, predictor.edges)

    def finish(self, data: RowsDataModule) -> None:
        """Recalibrate on the validation rows."""
        if self.recalibrate:
            predictor, rows = self._built(), data.parts["validation"]
            curves = predictor.forecast_as_learned(request_rows(rows)).uncapped()
            levels = observed_levels(curves, rows.remaining_tokens, rows.censored)
            predictor.recalibrate(fit_recalibration(levels, rows.censored))

    def _built(self) -> SurvivalMLP:
        assert isinstance(self.predictor, SurvivalMLP), "setup() builds the predictor"
        return self.predictor
