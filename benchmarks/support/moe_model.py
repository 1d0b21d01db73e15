"""A small mixture of experts with random weights, for data-parallel ranks on CPUs.

vLLM lets ranks step together only for a mixture of experts. This one has little to compute but its
attention: 64 heads that read 4 heads' keys and values, so that a context costs time rather than
memory.
"""

import shutil
from pathlib import Path
from typing import Any

from data_collection.models import prepare_embedded

_CONFIG: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 128,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 128,
    "num_attention_heads": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def write_moe_model(folder: Path) -> Path:
    """Write the model, with SmolLM2's tokenizer, into a folder, the same every time; return it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    untyped: Any = AutoModelForCausalLM
    untyped.from_config(Qwen3MoeConfig(**_CONFIG)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(prepare_embedded("smollm2") / name, folder / name)
    return folder
