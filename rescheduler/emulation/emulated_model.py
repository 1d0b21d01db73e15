"""The model folder that an emulated engine loads: one small layer, and a real tokenizer."""

import json
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from data_collection.files import write_text_atomically
from data_collection.models import IDENTITY_FILE, identify

__all__ = ["MOST_TOKENS", "emulated_model"]

_GENERATION = "generation_config.json"
_GENERATION_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Its defaults for sampling would be refused of clients that have not asked for them."""
_TOKENIZER = (
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
MOST_TOKENS = 131_072
"""Of a context."""
_WIDTH = 64  # 512 bytes of KV cache a token


def emulated_model(model: str) -> Path:
    """Return the folder of a model of one layer, with the tokenizer and the name of another.

    Its weights are drawn by vLLM (``--load-format dummy``), and never used. Of a Hugging Face id
    the tokenizer and configuration are downloaded, no weights.

    Raises:
        ValueError: the model has no tokenizer, or its configuration cannot be read.
    """
    source = _with_tokenizer(model)
    config, generation = _configs(source)
    name_of_model = identify(model).name
    files = [source / name for name in _TOKENIZER if (source / name).is_file()]
    digest = sha256(json.dumps([config, generation, name_of_model]).encode())
    for file in files:
        digest.update(file.read_bytes())
    folder = Path(HF_HOME) / "headway" / f"emulated-{digest.hexdigest()[:12]}"
    if (folder / IDENTITY_FILE).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".emulated-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        for file in files:
            shutil.copy(file, made / file.name)
        identity = {"name": name_of_model, "revision": "emulated"}
        contents = {"config.json": config, _GENERATION: generation, IDENTITY_FILE: identity}
        for name, content in contents.items():
            write_text_atomically(made / name, json.dumps(content, indent=1) + "\n")
        try:
            made.rename(folder)
        except OSError:
            if not (folder / IDENTITY_FILE).is_file():  # else another process was first
                raise
    return folder


def _configs(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of the small model, and what is kept of that of generation."""
    try:
        values: dict[str, Any] = json.loads((source / "config.json").read_text())
        given: dict[str, Any] = {}
        if (source / _GENERATION).is_file():
            given = json.loads((source / _GENERATION).read_text())
        text = values.get("text_config") or values
        kept = {name: text.get(name) for name in ("bos_token_id", "pad_token_id")}
        vocabulary = int(text["vocab_size"])
        ends = (one.get("eos_token_id") for one in (text, values, given))
        eos = next((one for one in ends if one is not None and one != []), None)
        is_known = all(isinstance(one, int) for one in (eos if isinstance(eos, list) else [eos]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: its configuration cannot be read: {error!r}") from error
    if not is_known:
        raise ValueError(f"{source}: its config.json has no eos_token_id, so that no answer ends")
    generation = {name: given[name] for name in _GENERATION_KEPT if name in given}
    generation.setdefault("eos_token_id", eos)
    return kept | {"eos_token_id": eos, "vocab_size": vocabulary} | _LAYER, generation


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
            wanted = [*_TOKENIZER, _GENERATION, "config.json"]
            folder = Path(snapshot_download(model, allow_patterns=wanted))
        except Exception as error:  # the hub raises many kinds
            raise ValueError(
                f"{model}: its tokenizer is needed, and cannot be downloaded: {error}"
            ) from error
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: has no tokenizer.json, which an emulated engine needs")
    return folder
