"""μ-Serve's length predictor: a fine-tuned BERT-like encoder that reads the text."""

from typing import Any

import torch

from data_collection.models import resolve_model
from predictor.evaluation.comparators.text_regressor import FineTuning, TextNetwork, TextRegressor
from predictor.models.text_backbone import mean_state, minilm_folder

__all__ = ["AuxiliaryEncoder"]


class _MeanPooledEncoder(TextNetwork):
    """Encoder states [batch, length, d], averaged over the text's tokens, then a linear head."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the scaled remaining length, [batch]."""
        pooled = mean_state(self.backbone, input_ids, attention_mask)
        remaining: torch.Tensor = self.head(pooled).squeeze(-1)
        return remaining


class AuxiliaryEncoder(TextRegressor):
    """An encoder fine-tuned to read the text of a row (μ-Serve's role in STAR §4.4, Table 1).

    The method is Qiu et al. 2024, with bert-base-uncased in both papers. The default here is
    MiniLM, a distilled BERT of 22.7 million parameters that two processor cores can fine-tune;
    ``model="google-bert/bert-base-uncased"`` with ``max_tokens=512`` is the paper's.

    Args:
        model: ``minilm``, a Hugging Face id of an encoder, or a folder.
        serving_model: the model that was served, for the text of recorded token ids.
        max_tokens: tokens of the text that are read, from its beginning; up to the encoder's
            number of positions (512).
        max_rows: training rows, a random subsample where there are more.
        max_validation_rows: validation rows, likewise.
        learning_rate: AdamW's, constant.
        max_epochs: passes over the training rows.
        patience: passes without a better validation MAE before stopping.
        batch_size: rows in a mini-batch.
        max_minutes: wall time of training.
        seed: of everything random in training.

    Raises:
        ValueError: the model is unknown, or has fewer positions than ``max_tokens``.
    """

    def __init__(
        self,
        model: str = "minilm",
        serving_model: str = "smollm2",
        max_tokens: int = 256,
        max_rows: int = 4000,
        max_validation_rows: int = 500,
        learning_rate: float = 5e-5,
        max_epochs: int = 100,
        patience: int = 10,
        batch_size: int = 16,
        max_minutes: float = 30.0,
        seed: int = 0,
    ) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = str(minilm_folder()) if model == "minilm" else resolve_model(model)
        backbone: Any = AutoModel.from_pretrained(folder)
        positions = backbone.config.max_position_embeddings
        if max_tokens > positions:
            raise ValueError(f"{model} reads {positions} tokens, max_tokens is {max_tokens}")
        super().__init__(
            name="auxiliary_encoder",
            network=_MeanPooledEncoder(backbone),
            tokenizer=AutoTokenizer.from_pretrained(folder),
            serving_model=serving_model,
            max_tokens=max_tokens,
            fine_tuning=FineTuning(
                max_rows=max_rows,
                max_validation_rows=max_validation_rows,
                learning_rate=learning_rate,
                max_epochs=max_epochs,
                patience=patience,
                batch_size=batch_size,
                max_minutes=max_minutes,
                seed=seed,
            ),
        )
