"""What of Headway works with a model, by its configuration alone: no engine is started."""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_collection.files import read_text
from data_collection.models import NORM_WITH_LOGITS, resolve_model
from data_collection.versions import vllm_release

__all__ = ["Finding", "model_findings"]

_STATES = ("linear_attention", "mamba", "conv", "recurrent")
_PATTERNS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_INNER = ("text_config", "thinker_config", "llm_config")
_GENERATE = ("ForCausalLM", "ForConditionalGeneration")
_UNUSUAL = ("mamba", "ssm", "conv_l", "linear_attn", "attn_layer_period", "full_attention_interval")
"""What names of keys contain where some layers have a state in place of a KV cache."""


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        what: its name.
        state: ``ok``; ``note`` where only a part of Headway is missing; ``problem`` where what
            is there does not work.
        found: what was found.
        remedy: what to do about it; empty when ``ok``.
    """

    what: str
    state: Literal["ok", "note", "problem"]
    found: str
    remedy: str = ""


def model_findings(model: str) -> list[Finding]:
    """Return whether a model's states can be captured, and whether its requests can move.

    Args:
        model: ``smollm2``, a Hugging Face id, whose configuration is downloaded, or a folder.
    """
    try:
        config = _config(resolve_model(model))
    except (OSError, ValueError) as error:
        return [Finding("model", "problem", str(error), "give an id or a folder")]
    text, names = config, _architectures(config)
    for key in _INNER:
        if isinstance(config.get(key), dict):
            text = config | config[key]
            names += _architectures(config[key])
    model = f"{model} ({', '.join(names) or 'unknown architecture'})"
    return [Finding("model", "ok", model), _capture(names), _moves(text)]


def _capture(architectures: list[str]) -> Finding:
    found = [name for name in architectures if name in NORM_WITH_LOGITS]
    if found:
        wrong = f"the final norm of {found[0]} comes after what vLLM lets be captured"
        return Finding("hidden states", "problem", wrong, "serve it without forecasts")
    if architectures and not architectures[0].endswith(_GENERATE):
        wrong = f"{architectures[0]} does not look like a model that generates text"
        return Finding("hidden states", "note", wrong, "an engine says for sure as it starts")
    return Finding("hidden states", "ok", "can be recorded and forecast from")


def _moves(config: dict[str, Any]) -> Finding:
    kinds = _kinds_of_layers(config)
    if any(kind.startswith(_STATES) for kind in kinds) or "mamba" in str(config.get("model_type")):
        wrong = "it has layers whose state is not a KV cache, which no other engine can read"
        return Finding("moves", "problem", wrong, "remove `control` to serve it without moves")
    whole = "give --disable-hybrid-kv-cache-manager"
    if len(kinds) > 1 and "chunked_attention" in kinds:
        return Finding("moves", "note", "some of its layers attend to chunks", whole)
    if "sliding_attention" in kinds and (0, 0) < vllm_release() < (0, 30):
        return Finding("moves", "note", "windows of attention move from vLLM 0.30 on", whole)
    if not kinds and any(part in str(key).lower() for key in config for part in _UNUSUAL):
        wrong = "some of its layers seem to have a state in place of a KV cache"
        return Finding("moves", "note", wrong, "an engine says for sure as it starts")
    return Finding("moves", "ok", "running requests can move between engines")


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    return list(map(str, names)) if isinstance(names, list) else []


def _kinds_of_layers(config: dict[str, Any]) -> set[str]:
    kinds: set[str] = set()
    for key in _PATTERNS:
        pattern = config.get(key)
        if isinstance(pattern, list):
            kinds |= {str(kind) for kind in pattern}
        elif isinstance(pattern, str) and "M" in pattern:  # as in M-M*-: Mamba, MLP, attention
            kinds.add("mamba")
    return kinds


def _config(model: str) -> dict[str, Any]:
    """Return a model's configuration, with what transformers adds to the file."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(model, "config.json"))
        except Exception as error:  # the hub raises many kinds
            raise ValueError(f"{model}: its config.json cannot be downloaded: {error}") from error
    else:
        file = folder / "config.json"
    config = json.loads(read_text(file))
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not an object")
    return _filled(config, file.parent) | config


def _filled(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what transformers makes of a configuration: files seldom list the layers' kinds."""
    from transformers import AutoConfig

    if "model_type" not in config:
        return {}
    try:
        known = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = known.get_text_config()
        return {key: getattr(text, key) for key in _PATTERNS if getattr(text, key, None)}
    except Exception:  # of a model that transformers does not know, the file has to say all
        return {}
