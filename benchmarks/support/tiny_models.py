"""Models of many architectures, tiny and with random weights, for which transformers is right."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

VOCABULARY = 49_152  # the embedded model's, whose tokenizer all of them have
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_FOUR = {"num_hidden_layers": 4}
_WHOLE, _WINDOW = "full_attention", "sliding_attention"
_WINDOWS = {"layer_types": [_WINDOW, _WHOLE] * 2, "sliding_window": 64, **_FOUR}


class TinyModel(NamedTuple):
    """How to make a model, and what is expected of it.

    Attributes:
        config: class of its configuration in transformers.
        changes: to the sizes that all have.
        moves: whether its requests can move.
        flags: that engines need for them to move.
        captured: whether its states can be captured.
        kv_blocks: of an engine, few enough that requests are preempted.
    """

    config: str
    changes: Mapping[str, Any] = MappingProxyType({})
    moves: bool = True
    flags: tuple[str, ...] = ()
    captured: bool = True
    kv_blocks: int = 24


_TWO_GROUPS = 35  # one is the null block; of the others each group has as many
_NO_PREFIXES = ("--no-enable-prefix-caching",)
_WHOLE_ONLY = ("--disable-hybrid-kv-cache-manager",)
TINY_MODELS = {
    "llama": TinyModel("LlamaConfig"),
    "llama-tied": TinyModel("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": TinyModel("Qwen2Config"),
    "qwen3": TinyModel("Qwen3Config"),
    "qwen3-moe": TinyModel("Qwen3MoeConfig", _EXPERTS),
    "mistral": TinyModel("MistralConfig", {"sliding_window": None}),
    "gemma2": TinyModel(
        "Gemma2Config", _WINDOWS | {"query_pre_attn_scalar": 32}, kv_blocks=_TWO_GROUPS
    ),
    "gemma3": TinyModel(
        "Gemma3TextConfig", _WINDOWS | {"query_pre_attn_scalar": 32}, kv_blocks=_TWO_GROUPS
    ),
    "phi4": TinyModel("Phi3Config", {"rope_scaling": None}),
    "granite": TinyModel("GraniteConfig", {"logits_scaling": 8.0, "attention_multiplier": 0.0156}),
    "gpt2": TinyModel(
        "GPT2Config",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024, "n_inner": 256},
    ),
    "opt": TinyModel("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "granite-4": TinyModel(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "shared_intermediate_size": 128,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            **_FOUR,
        },
        moves=False,
        flags=_NO_PREFIXES,
    ),
    "olmo2": TinyModel("Olmo2Config"),
    "cohere2": TinyModel("Cohere2Config", _WINDOWS, kv_blocks=_TWO_GROUPS),
    "gpt-oss": TinyModel(
        "GptOssConfig",
        _WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        kv_blocks=_TWO_GROUPS,
    ),
    "smollm3": TinyModel("SmolLM3Config"),
    "glm4": TinyModel("Glm4Config"),
    "llama4": TinyModel(
        "Llama4TextConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
            **_FOUR,
        },
        flags=_WHOLE_ONLY,
    ),
    "nemotron-h": TinyModel(
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M*-M*-",
            "num_hidden_layers": 6,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 1,
        },
        moves=False,
        flags=_NO_PREFIXES,
    ),
    "mimo": TinyModel("Qwen2Config", {"architectures": ["MiMoForCausalLM"]}, captured=False),
}


def tiny_model(name: str, tokenizer: Path, folder: Path) -> Path:
    """Write a model, with the embedded model's tokenizer; return its folder.

    Args:
        name: of `TINY_MODELS`.
        tokenizer: folder of the embedded model.
        folder: to write it to.
    """
    import torch
    import transformers

    made = TINY_MODELS[name]
    changes = {key: value for key, value in made.changes.items() if key != "architectures"}
    config = getattr(transformers, made.config)(**(_SIZES | changes))
    torch.manual_seed(7)
    made_of: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    made_of.float().save_pretrained(folder)
    for file in (*tokenizer.glob("*token*.json"), *tokenizer.glob("*.jinja")):
        shutil.copy(file, folder)
    for generation in folder.glob("generation_config.json"):
        generation.unlink()
    path = folder / "config.json"
    written = json.loads(path.read_text()) | {"dtype": "float32"}
    if "architectures" in made.changes:
        written["architectures"] = made.changes["architectures"]
    path.write_text(json.dumps(written, indent=1))
    return folder
