"""STAR's remaining-length predictor: one number from one hidden state."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from predictor.forecasts.forecast import PointForecast
from predictor.models.hidden_state_mlp import CheckpointError, HiddenStateMLP, RequestRows


class RemainingLengthMLP(HiddenStateMLP):
    """Predict the remaining length of a request from one hidden state (STAR §4.2, eq. 2).

        y = s · w4 φ(W3 φ(W2 φ(W1 z)))

    with z and φ as in `HiddenStateMLP` and the scale s, ``target_scale``, fixed before training.
    Predictions are clipped to at least 0.

    Raises:
        CheckpointError: the checkpoint is of another kind or has another target.
    """

    def __init__(
        self,
        kind: str = "regression",
        target_transform: str = "tokens",
        target_scale: float = 1.0,
        **shared: Any,
    ) -> None:
        if kind != "regression" or target_transform != "tokens":
            raise CheckpointError(
                f"a {kind!r} checkpoint with target {target_transform!r} is no "
                "remaining-length regressor in tokens"
            )
        super().__init__(1, kind=kind, **shared)
        self.target_scale = target_scale

    def forward(self, rows: RequestRows, noise: float = 0.0) -> torch.Tensor:
        """Return remaining tokens [n], unclipped (for training)."""
        return self.output(rows, noise).squeeze(-1) * self.target_scale

    @torch.inference_mode()
    def predict(self, hidden_states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Predict remaining tokens [n] ≥ 0 for hidden states [n, d], without other inputs.

        Raises:
            ModelMismatchError: d is not the one the predictor was trained on.
            ValueError: the predictor reads more; use `forecast`.
        """
        if self.inputs:
            raise ValueError(f"this predictor also reads {', '.join(self.inputs)}: use forecast")
        vectors = torch.from_numpy(hidden_states)
        self.refuse_other_width(vectors)
        predicted = self(RequestRows(vectors, torch.zeros(len(vectors), 3)))
        remaining: npt.NDArray[np.float32] = predicted.clamp_min(0).numpy()
        return remaining

    @torch.inference_mode()
    def forecast(self, rows: RequestRows) -> PointForecast:
        """Forecast n requests as step curves, capped by the tokens left to ``max_tokens``."""
        self.refuse_unreadable(rows)
        predicted = self(rows).clamp_min(0).cpu().numpy()
        return PointForecast.new(predicted, rows.numbers[:, 2].cpu().numpy())
