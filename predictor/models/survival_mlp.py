"""Headway's predictor: a survival curve of the remaining length from one hidden state."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.recalibration import Recalibration
from predictor.models.hazard_likelihood import log_survival
from predictor.models.hidden_state_mlp import CheckpointError, HiddenStateMLP, RequestRows

__all__ = ["SurvivalMLP"]


class SurvivalMLP(HiddenStateMLP):
    r"""Predict P(R > h) for the remaining tokens R of a request, at every edge of a grid.

    .. math:: S(e_j) = g\Big(\prod_{i < j} \big(1 - \operatorname{sigmoid}(x_i)\big)\Big)

    with x the trunk's output (`HiddenStateMLP`), one discrete-time hazard a bin, and g the
    post-hoc `Recalibration`, the identity at first. Trained with `hazard_nll`.

    Args:
        edges: [n_edges] the grid, in whole tokens from 0 to the model's limit.
        kind: ``survival``.
        recalibration_nominal: [n_knots] where g is given, as P(R ≤ h).
        recalibration_observed: [n_knots] what was observed there.
        **shared: the other arguments of `HiddenStateMLP`.

    Raises:
        CheckpointError: the checkpoint is of another kind.
        ForecastError: the edges or the recalibration are none.
    """

    edges: torch.Tensor

    def __init__(
        self,
        edges: Sequence[int],
        kind: str = "survival",
        recalibration_nominal: Sequence[float] = (0.0, 1.0),
        recalibration_observed: Sequence[float] = (0.0, 1.0),
        **shared: Any,
    ) -> None:
        if kind != "survival":
            raise CheckpointError(f"a {kind!r} checkpoint holds no survival predictor")
        super().__init__(len(edges) - 1, kind=kind, **shared)
        SurvivalForecast.new(edges, [[1.0, *[0.0] * (len(edges) - 1)]])
        self.recalibration = Recalibration(recalibration_nominal, recalibration_observed)
        grid = torch.tensor(list(edges), dtype=torch.float32)
        self.register_buffer("edges", grid, persistent=False)

    def forward(self, rows: RequestRows, noise: float = 0.0) -> torch.Tensor:
        """Return hazard logits, [n, n_edges - 1] (for training)."""
        return self.output(rows, noise)

    def survival(self, rows: RequestRows) -> torch.Tensor:
        """Return S at every edge, [n, n_edges], as learned: before the recalibration."""
        return log_survival(self(rows)).exp()

    @torch.inference_mode()
    def forecast(self, rows: RequestRows) -> SurvivalForecast:
        """Forecast n requests, capped by the tokens left to ``max_tokens``."""
        self.refuse_other_width(rows.hidden_states)
        return self._capped(self.recalibrated(self.survival(rows).cpu()), rows)

    @torch.inference_mode()
    def forecast_as_learned(self, rows: RequestRows) -> SurvivalForecast:
        """Forecast n requests without the recalibration, to see what it does."""
        self.refuse_other_width(rows.hidden_states)
        return self._capped(self.survival(rows).cpu().numpy().astype(np.float64), rows)

    def recalibrated(self, survival: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return learned curves on the host [n, n_edges], recalibrated."""
        return self.recalibration.apply(survival.numpy().astype(np.float64))

    def _capped(self, curves: npt.NDArray[np.float64], rows: RequestRows) -> SurvivalForecast:
        left = rows.counts[:, 2].cpu().numpy()
        return SurvivalForecast.new(self.edges.cpu().numpy(), curves, left)

    def fingerprint(self) -> str:
        """Return 12 hexadecimal digits that name these weights and this recalibration."""
        digest = hashlib.sha256(repr((self.edges.tolist(), *self._knots())).encode())
        for name, values in sorted(self.state_dict().items()):
            digest.update(name.encode() + values.cpu().numpy().tobytes())
        return digest.hexdigest()[:12]

    def _knots(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.recalibration.nominal, self.recalibration.observed

    def recalibrate(self, recalibration: Recalibration) -> None:
        """Use another post-hoc recalibration, also in checkpoints saved from here on."""
        self.recalibration = recalibration
        self._hub_mixin_config = self.config() | {
            "recalibration_nominal": list(recalibration.nominal),
            "recalibration_observed": list(recalibration.observed),
        }
