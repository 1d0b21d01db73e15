"""TetriInfer's length predictor: a fine-tuned small causal language model that reads the text."""

from typing import Any

import torch

from data_collection.models import resolve_model
from predictor.evaluation.comparators.text_regressor import FineTuning, TextNetwork, TextRegressor
from predictor.models.text_backbone import train_last_layers

__all__ = ["AuxiliaryCausalLM"]

_PAPER_LIMIT = 1024
"""Tokens that STAR §4.3 gives its opt-125m."""


class _LastTokenRegressor(TextNetwork):
    """The state of the text's last token, [batch, d], then a linear head."""

    def __init__(self, backbone: Any, train_layers: int) -> None:
        super().__init__(backbone)
        train_last_layers(backbone, train_layers)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the scaled remaining length, [batch]; padding is on the right."""
        states = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        last = attention_mask.sum(1) - 1
        remaining: torch.Tensor = self.head(
            states[torch.arange(len(states), device=states.device), last]
        ).squeeze(-1)
        return remaining


class AuxiliaryCausalLM(TextRegressor):
    """A small causal LM fine-tuned to read a row's text (TetriInfer's role in STAR §4.4, Table 1).

    The method is Hu et al. 2024, with opt-125m in both papers; its last token's state, which
    has seen the whole text, goes through a linear head. The default here is SmolLM2-135M with
    all but the last two layers frozen, which two processor cores can fine-tune;
    ``model="facebook/opt-125m"``, ``max_tokens=1024``, ``train_layers=12`` is the paper's.

    Args:
        model: ``smollm2``, a Hugging Face id of a causal LM, or a folder.
        serving_model: the model that was served, for the text of recorded token ids.
        max_tokens: tokens of the text that are read, from its beginning; up to 1024 as in the
            paper, or the model's number of positions where that is less.
        train_layers: layers from the top that are fine-tuned with the head.
        max_rows: training rows, a random subsample where there are more.
        max_validation_rows: validation rows, likewise.
        learning_rate: AdamW's, constant.
        max_epochs: passes over the training rows.
        patience: passes without a better validation MAE before stopping.
        batch_size: rows in a mini-batch.
        max_minutes: wall time of training.
        seed: of everything random in training.

    Raises:
        ValueError: the model is unknown, has fewer layers than ``train_layers``, or
            ``max_tokens`` is over the limit.
    """

    def __init__(
        self,
        model: str = "smollm2",
        serving_model: str = "smollm2",
        max_tokens: int = 256,
        train_layers: int = 2,
        max_rows: int = 1500,
        max_validation_rows: int = 200,
        learning_rate: float = 1e-4,
        max_epochs: int = 100,
        patience: int = 10,
        batch_size: int = 16,
        max_minutes: float = 30.0,
        seed: int = 0,
    ) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = resolve_model(model)
        backbone: Any = AutoModel.from_pretrained(folder)
        limit = min(_PAPER_LIMIT, backbone.config.max_position_embeddings)
        if max_tokens > limit:
            raise ValueError(f"{model} reads {limit} tokens here, max_tokens is {max_tokens}")
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        tokenizer.padding_side = "right"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        super().__init__(
            name="auxiliary_causal_lm",
            network=_LastTokenRegressor(backbone, train_layers),
            tokenizer=tokenizer,
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
