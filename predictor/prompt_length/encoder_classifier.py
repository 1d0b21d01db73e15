"""A text encoder that says which bucket of lengths, or which task, a prompt belongs to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from data_collection.models import resolve_model
from predictor.evaluation.comparators.auxiliary_encoder import minilm_folder
from predictor.prompt_length.prompt_table import Prompts
from predictor.prompt_length.text_batches import LabelledTexts, text_batches

__all__ = ["EncoderClassifier", "task_hint"]

FloatArray = npt.NDArray[np.float64]

_BATCH = 32


def task_hint(task: str) -> str:
    """Return the sentence that the paper appends to a prompt (Jain et al. 2025, C.5.2)."""
    return f"This is a {task} task"


class EncoderClassifier(nn.Module):
    r"""An encoder f, the mean of its states over the text, dropout, and a linear layer.

    .. math:: p = \operatorname{softmax}\Big(W \cdot \frac{1}{T} \sum_{t \le T} f(x)_t + b\Big)

    The paper (§4.1, C.7, C.8) fine-tunes DistilBERT; any encoder of Hugging Face will do. A long
    prompt keeps its beginning. The hint is a second text after the encoder's separator, so that
    it is never what is cut.

    Args:
        backbone: a Hugging Face encoder without a head.
        tokenizer: its own.
        labels: what is told apart, in order.
        tasks: that a prompt may be of; only these can be hinted at.
        hinted: whether the texts carry the hint of their task.
        max_tokens: tokens of prompt and hint that are read.
        dropout: share of the mean state's values that training drops.

    Raises:
        ValueError: fewer than two labels, or more tokens than the encoder has positions.
    """

    def __init__(
        self,
        backbone: Any,
        tokenizer: Any,
        labels: Sequence[str],
        tasks: Sequence[str],
        hinted: bool = False,
        max_tokens: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        positions = getattr(backbone.config, "max_position_embeddings", max_tokens)
        if not 32 <= max_tokens <= positions:
            raise ValueError(f"the encoder reads 32 to {positions} tokens, not {max_tokens}")
        if len(labels) < 2:
            raise ValueError(f"nothing to tell apart: the only label is {', '.join(labels)!r}")
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.tasks = tuple(tasks)
        self.hinted = hinted
        self.max_tokens = max_tokens
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(backbone.config.hidden_size, len(labels))

    @classmethod
    def pretrained(
        cls,
        encoder: str,
        labels: Sequence[str],
        tasks: Sequence[str],
        hinted: bool,
        max_tokens: int,
        dropout: float,
    ) -> "EncoderClassifier":
        """Return an untrained classifier on a pre-trained encoder.

        Args:
            encoder: ``minilm``, a Hugging Face id, or a folder.
            labels: see the class.
            tasks: see the class.
            hinted: see the class.
            max_tokens: see the class.
            dropout: see the class.

        Raises:
            ValueError: the encoder cannot be found or loaded.
        """
        from transformers import AutoModel, AutoTokenizer

        folder = str(minilm_folder()) if encoder == "minilm" else resolve_model(encoder)
        try:
            backbone = AutoModel.from_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except OSError as error:  # neither cached nor within reach
            reason = str(error).partition("\n")[0]
            raise ValueError(f"encoder {encoder!r} cannot be loaded: {reason}") from error
        return cls(backbone, tokenizer, labels, tasks, hinted, max_tokens, dropout)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits, [n, n_labels], for padded tokens [n, length]."""
        states = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        is_text = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * is_text).sum(1) / is_text.sum(1)
        logits: torch.Tensor = self.head(self.dropout(mean))
        return logits

    def token_ids(self, prompts: Prompts) -> list[list[int]]:
        """Return the encoder's tokens of each prompt, and of its hint if it has one.

        Raises:
            ValueError: a task is none of those that were trained on.
        """
        texts = list(prompts.text)
        if not self.hinted:
            encoded = self.tokenizer(texts, truncation=True, max_length=self.max_tokens)
        else:
            for task in prompts.task:
                if task not in self.tasks:
                    raise ValueError(
                        f"no request of the task {task!r} was trained on; known: "
                        f"{', '.join(self.tasks)}. Predict the task, or leave the hint out"
                    )
            hints = [task_hint(task) for task in prompts.task]
            encoded = self.tokenizer(
                texts, hints, truncation="only_first", max_length=self.max_tokens
            )
        return [list(ids) for ids in encoded["input_ids"]]

    @torch.inference_mode()
    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return P(label) of each prompt, [n, n_labels].

        Raises:
            ValueError: as `token_ids` does.
        """
        self.eval()
        ids = self.token_ids(prompts)
        found = np.empty((len(ids), len(self.labels)))
        place = np.arange(len(ids))
        device = self.head.weight.device
        texts = LabelledTexts(ids, place)  # each batch tells whose its rows are
        for batch in text_batches(texts, _BATCH, self.tokenizer.pad_token_id):
            logits = self(batch.input_ids.to(device), batch.attention_mask.to(device))
            found[batch.labels.numpy()] = logits.double().softmax(dim=1).cpu().numpy()
        return found

    def predicted(self, prompts: Prompts) -> list[str]:
        """Return the most probable label of each prompt."""
        return [self.labels[i] for i in self.probabilities(prompts).argmax(axis=1)]
