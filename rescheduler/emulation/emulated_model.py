"""The model folder that an emulated engine loads: one small layer, and a real tokenizer."""

import json
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from data_collection.atomic_file import write_text_atomically
from data_collection.models import IDENTITY_FILE, identify

__all__ = ["MOST_TOKENS", "emulated_model"]

_TOKENIZER = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
MOST_TOKENS = 131_072
"""Of a context."""
_WIDTH = 64  # 512 bytes of KV cache a token


def emulated_model(model: str) -> Path:
    """Return the folder of a model of one layer, with the tokenizer and the name of another.

    Its weights are drawn by vLLM (``--load-format dummy``), and never used.

    Args:
        model: what `resolve_model` returned. Of a Hugging Face id the tokenizer and configuration
            are downloaded, no weights.

    Raises:
        ValueError: the model has no tokenizer, or its configuration cannot be read.
    """
    source = _with_tokenizer(model)
    try:
        values: dict[str, Any] = json.loads((source / "config.json").read_text())
        text = values.get("text_config", values)
        kept = {name: text.get(name) for name in ("vocab_size", "bos_token_id", "pad_token_id")}
        eos = text.get("eos_token_id", values.get("eos_token_id"))
        config = kept | {"eos_token_id": eos, "vocab_size": int(text["vocab_size"])} | _LAYER
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source}: its config.json cannot be read: {error!r}") from error
    if eos is None:
        raise ValueError(f"{source}: its config.json has no eos_token_id, so that no answer ends")
    digest = sha256(json.dumps([str(source), config], sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(HF_HOME) / "headway" / f"emulated-{digest}"
    if (folder / IDENTITY_FILE).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".emulated-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        for name in _TOKENIZER:
            if (source / name).is_file():
                shutil.copy(source / name, made / name)
        write_text_atomically(made / "config.json", json.dumps(config, indent=1) + "\n")
        name, revision = identify(model).name, "emulated"
        identity = json.dumps({"name": name, "revision": revision})
        write_text_atomically(made / IDENTITY_FILE, identity + "\n")
        if not folder.exists():  # another process may have been first
            made.rename(folder)
    return folder


_LAYER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": _WIDTH,
    "num_hidden_layers": 1,
    "max_position_embeddings": MOST_TOKENS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def _with_tokenizer(model: str) -> Path:
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            wanted = [*_TOKENIZER, "config.json"]
            folder = Path(snapshot_download(model, allow_patterns=wanted))
        except Exception as error:  # the hub raises many kinds
            raise ValueError(
                f"{model}: its tokenizer is needed, and cannot be downloaded: {error}"
            ) from error
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: has no tokenizer.json, which an emulated engine needs")
    return folder
