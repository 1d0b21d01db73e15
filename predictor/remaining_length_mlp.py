"""STAR's remaining-length predictor: an MLP on the serving model's last hidden state."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from torch import nn

from data_collection.dataset_schema import Session
from predictor.checkpoint_card import checkpoint_card

__all__ = ["CheckpointError", "ModelMismatchError", "RemainingLengthMLP"]


class CheckpointError(ValueError):
    """A folder is no checkpoint of a predictor."""


class ModelMismatchError(ValueError):
    """A predictor was given hidden states of a model it was not trained on."""


class RemainingLengthMLP(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="headway",
    tags=["length-prediction", "llm-serving"],
    license="apache-2.0",
):
    """Predict the remaining length of a request from one hidden state (STAR §4.2, eq. 2).

    With h in R^d the last layer's hidden state of the last token, after the final norm,

        y = s · w4 φ(W3 φ(W2 φ(W1 z))),   z = (h - μ) / σ,   φ = ReLU,

    with biases, widths 2048, 512, 64. The standardisation (μ, σ of the training vectors)
    and the scale s are fixed before training and fold into W1 and w4: they change how fast
    the network learns, not what it can express. Predictions are clipped to at least 0.

    Every argument is kept in the checkpoint's ``config.json``.

    Args:
        model: name of the serving model whose hidden states it reads.
        model_revision: that model's revision.
        hidden_size: d.
        k: tokens between two rows of the training data.
        layer: which layer's hidden state.
        normalisation: what the serving model applied to it.
        widths: hidden widths; the paper's for d = 3,584 are (2048, 512, 64).
        target_transform: ``tokens``: the output, times the scale, is in tokens.
        target_scale: s, in tokens.
        trained_generated_tokens: smallest and largest n in the training data.
        trained_remaining_tokens: smallest and largest remaining length in it.
        provenance: commit, versions, dataset, command and metrics, for the card.
    """

    input_mean: torch.Tensor
    input_std: torch.Tensor

    def __init__(
        self,
        model: str,
        model_revision: str,
        hidden_size: int,
        k: int,
        layer: str = "last",
        normalisation: str = "final norm of the model",
        widths: Sequence[int] = (2048, 512, 64),
        target_transform: str = "tokens",
        target_scale: float = 1.0,
        trained_generated_tokens: Sequence[int] = (0, 0),
        trained_remaining_tokens: Sequence[int] = (0, 0),
        provenance: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if target_transform != "tokens":
            raise CheckpointError(f"unknown target transform {target_transform!r}; known: tokens")
        self.serving_model = model
        self.model_revision = model_revision
        self.hidden_size = hidden_size
        self.layer = layer
        self.target_scale = target_scale
        self.provenance = dict(provenance or {})
        sizes = [hidden_size, *widths]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self.register_buffer("input_mean", torch.zeros(hidden_size))
        self.register_buffer("input_std", torch.ones(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden states [n, d] to remaining tokens [n], unclipped (for training)."""
        standardised = (hidden_states - self.input_mean) / self.input_std
        output: torch.Tensor = self.network(standardised).squeeze(-1)
        return output * self.target_scale

    @torch.inference_mode()
    def predict(self, hidden_states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Predict remaining tokens [n] ≥ 0 for hidden states [n, d].

        Raises:
            ModelMismatchError: d is not the one the predictor was trained on.
        """
        if hidden_states.ndim != 2 or hidden_states.shape[1] != self.hidden_size:
            raise ModelMismatchError(
                f"hidden states of shape {hidden_states.shape} given to a predictor of "
                f"{self.serving_model}, whose vectors have {self.hidden_size} values"
            )
        predicted: torch.Tensor = self(torch.from_numpy(hidden_states))
        remaining: npt.NDArray[np.float32] = predicted.clamp_min(0).numpy()
        return remaining

    def refuse_other_model(self, session: Session) -> None:
        """Refuse hidden states that were recorded from another model, revision or layer.

        Raises:
            ModelMismatchError: names both models.
        """
        mine = (self.serving_model, self.model_revision, self.layer, self.hidden_size)
        theirs = (session.model, session.revision, session.layer, session.hidden_size)
        if mine != theirs:
            raise ModelMismatchError(
                f"this predictor was trained on hidden states of {mine[0]} (revision {mine[1]}, "
                f"{mine[2]} layer, d = {mine[3]}); these are of {theirs[0]} (revision "
                f"{theirs[1]}, {theirs[2]} layer, d = {theirs[3]}). Train one with "
                "`headway train fit`"
            )

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the checkpoint's card, made from its configuration."""
        return ModelCard(checkpoint_card(self.config()))

    def config(self) -> dict[str, Any]:
        """Return what ``config.json`` holds: the arguments this predictor was built with."""
        config = self._hub_mixin_config
        assert isinstance(config, dict)
        return {**config, "provenance": self.provenance}

    @classmethod
    def load(cls, checkpoint: str) -> "RemainingLengthMLP":
        """Load a checkpoint from a folder or the Hugging Face hub, ready to predict.

        Raises:
            CheckpointError: the folder lacks its files or they are damaged.
        """
        folder = Path(checkpoint)
        if folder.exists():
            for name in ("config.json", "model.safetensors"):
                if not (folder / name).is_file():
                    raise CheckpointError(f"{folder}: no {name}, so this is no checkpoint")
            try:
                json.loads((folder / "config.json").read_text(encoding="utf-8"))
            except ValueError as error:
                raise CheckpointError(f"{folder / 'config.json'}: not JSON: {error}") from error
        try:
            return cls.from_pretrained(checkpoint).eval()
        except Exception as error:  # safetensors, torch and the hub each raise their own
            raise CheckpointError(f"{checkpoint}: cannot be loaded: {error}") from error
