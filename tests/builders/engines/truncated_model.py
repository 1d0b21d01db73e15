"""The first layers of the embedded model, where a test does not care what it says."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def truncated_model(model: Path, layers: int, folder: Path) -> Path:
    """Write a model of so many of a model's layers, with its tokenizer."""
    kept = AutoModelForCausalLM.from_pretrained(model)
    kept.model.layers = kept.model.layers[:layers]
    kept.config.num_hidden_layers = layers
    kept.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder
