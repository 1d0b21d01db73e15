"""Training the survival model on requests that ended and requests that were cut."""

from typing import Any

import torch
from torch import nn

from predictor.forecasts.kaplan_meier import survival_edges
from predictor.forecasts.recalibration import fit_recalibration, observed_levels
from predictor.models.survival_mlp import SurvivalMLP, hazard_nll, hazard_rates
from predictor.training.predictor_training import PredictorTraining
from predictor.training.rows_data_module import Batch, RowsDataModule, request_rows

__all__ = ["SurvivalTraining"]


class SurvivalTraining(PredictorTraining):
    """Train `SurvivalMLP` on the censored likelihood, stopped by the validation likelihood.

    Training starts from the hazards that fit all rows alike, with no weight on the inputs.
    Afterwards the curves are recalibrated on the validation rows.

    Args:
        edges: the grid in whole tokens from 0; None: dense near 0 and logarithmic to ``limit``.
        limit: tokens that no request can pass: the model's context.
        widths: hidden widths of the MLP.
        inputs: numbers it reads beside the hidden state, see `PredictorTraining`.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        noise: on the standardised hidden states while training, see `PredictorTraining`.
        averaging_half_life: of earlier forecasts, in tokens, see `averaged`; 0: they do
            not count. Training itself sees every row alone.
        recalibrate: fit the post-hoc recalibration on the validation rows.
    """

    monitor = "val_nll"

    def __init__(
        self,
        edges: tuple[int, ...] | None = None,
        limit: int = 8192,
        widths: tuple[int, ...] = (512, 128),
        inputs: tuple[str, ...] = (
            *("generated_tokens", "prompt_tokens", "temperature"),
            *("repetition", "repeated_suffix"),
        ),
        lr: float = 1e-4,
        weight_decay: float = 0.1,
        noise: float = 1.0,
        averaging_half_life: float = 30.0,
        recalibrate: bool = True,
    ) -> None:
        super().__init__(widths, inputs, lr, weight_decay, noise)
        self.save_hyperparameters()
        self.edges = edges or tuple(survival_edges(limit).tolist())
        self.averaging_half_life = averaging_half_life
        self.recalibrate = recalibrate

    def build(self, data: RowsDataModule, shared: dict[str, Any]) -> SurvivalMLP:
        """Return a survival model that starts from the marginal hazards.

        Raises:
            ValueError: cut requests are left out or counted as ended.
        """
        if data.cut_requests != "censor":
            raise ValueError(
                "the survival model learns from cut requests as 'longer than this': give "
                "--data.cut_requests censor"
            )
        train = data.parts["train"]
        predictor = SurvivalMLP(
            edges=list(self.edges), averaging_half_life=self.averaging_half_life, **shared
        )
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
