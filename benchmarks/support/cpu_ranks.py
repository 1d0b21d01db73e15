"""What data-parallel ranks on CPUs serve, and the log of `benchmarks.support.cpu_rank_worker`.

Importing this imports no vLLM.
"""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data_collection.models import prepare_embedded

FloatArray = npt.NDArray[np.float64]

_MODEL: dict[str, Any] = {
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
"""vLLM lets ranks step together only for a mixture of experts."""


def write_moe_model(folder: Path) -> Path:
    """Write the model, with SmolLM2's tokenizer, into a folder, the same every time; return it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    untyped: Any = AutoModelForCausalLM
    untyped.from_config(Qwen3MoeConfig(**_MODEL)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(prepare_embedded("smollm2") / name, folder / name)
    return folder


class Steps(NamedTuple):
    """Steps of an engine, in order, each [n]."""

    begins: FloatArray  # seconds on the monotonic clock
    requests: FloatArray  # 0 where only another rank had some
    new: FloatArray  # tokens computed
    context: FloatArray  # tokens of its requests


def read_steps(log: Path) -> Steps:
    """Return the whole lines of a log; no steps if there is none yet."""
    text = log.read_text() if log.is_file() else ""
    lines = text[: text.rfind("\n") + 1].split()
    rows = np.array([line.split(",") for line in lines], dtype=np.float64).reshape(-1, 4)
    return Steps(*rows.T)
