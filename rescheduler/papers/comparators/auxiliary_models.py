"""The length predictors of μ-Serve and TetriInfer: small models that read the text."""

from typing import Any

import torch

from data_collection.models import resolve_model
from rescheduler.papers.comparators.text_regressor import FineTuning, TextNetwork, TextRegressor
from rescheduler.papers.text_models.fine_tuning import (
    mean_state,
    minilm_folder,
    train_last_layers,
)

__all__ = ["AuxiliaryCausalLM", "AuxiliaryEncoder"]

_ENCODER: dict[str, Any] = {"max_rows": 4000, "max_validation_rows": 500, "learning_rate": 5e-5}
_CAUSAL_LM: dict[str, Any] = {"max_rows": 1500, "max_validation_rows": 200, "learning_rate": 1e-4}
"""How each is fine-tuned where its options do not say otherwise."""

_PAPER_LIMIT = 1024
"""Tokens that STAR §4.3 gives its opt-125m."""


class _MeanPooledEncoder(TextNetwork):
    """Encoder states [batch, length, d], averaged over the text's tokens, then a linear head."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the scaled remaining length, [batch]."""
        pooled = mean_state(self.backbone, input_ids, attention_mask)
        remaining: torch.Tensor = self.head(pooled).squeeze(-1)
        return remaining


class _LastTokenRegressor(TextNetwork):
    """The state of the text's last token, [batch, d], then a linear head."""

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
        fine_tuning: options of `FineTuning`.

    Raises:
        ValueError: the model is unknown, or has fewer positions than ``max_tokens``.
    """

    name = "auxiliary_encoder"

    def __init__(
        self,
        model: str = "minilm",
        serving_model: str = "smollm2",
        max_tokens: int = 256,
        **fine_tuning: Any,
    ) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = str(minilm_folder()) if model == "minilm" else resolve_model(model)
        backbone: Any = AutoModel.from_pretrained(folder)
        positions = backbone.config.max_position_embeddings
        if max_tokens > positions:
            raise ValueError(f"{model} reads {positions} tokens, max_tokens is {max_tokens}")
        super().__init__(
            _MeanPooledEncoder(backbone),
            AutoTokenizer.from_pretrained(folder),
            serving_model,
            max_tokens,
            FineTuning(**_ENCODER | fine_tuning),
        )


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
        fine_tuning: options of `FineTuning`.

    Raises:
        ValueError: the model is unknown, has fewer layers than ``train_layers``, or
            ``max_tokens`` is over the limit.
    """

    name = "auxiliary_causal_lm"

    def __init__(
        self,
        model: str = "smollm2",
        serving_model: str = "smollm2",
        max_tokens: int = 256,
        train_layers: int = 2,
        **fine_tuning: Any,
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
        network = _LastTokenRegressor(backbone)
        train_last_layers(backbone, train_layers)
        super().__init__(
            network,
            tokenizer,
            serving_model,
            max_tokens,
            FineTuning(**_CAUSAL_LM | fine_tuning),
        )
