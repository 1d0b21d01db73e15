"""The card of a checkpoint, made from its configuration."""

from typing import Any

__all__ = ["checkpoint_card"]

_CARD = """\
---
license: apache-2.0
library_name: headway
tags:
- length-prediction
- llm-serving
---
# Remaining-length predictor for {model}

Reads the hidden state with which {model} computes a token's logits ({layer} layer,
{normalisation}, d = {hidden_size}) and predicts how many tokens the request still generates.
An MLP {shape} with ReLU, trained with the L1 loss (STAR, HPDC '26, §4).

| | |
|---|---|
| serving model | {model}, revision `{model_revision}` |
| trained on | n = {trained_generated_tokens[0]}–{trained_generated_tokens[1]} generated tokens, \
{trained_remaining_tokens[0]}–{trained_remaining_tokens[1]} remaining, every k = {k} tokens |
{provenance}

```python
from predictor import RemainingLengthMLP
predictor = RemainingLengthMLP.load("this folder")
remaining = predictor.predict(hidden_states)  # float32 [n, {hidden_size}] -> tokens [n]
```

`dataset_card.md` describes the training data; `metrics.json`, where there is one, is what
`headway evaluate` measured on the test split.

Do not use it on another model's hidden states: loading refuses to.
"""


def checkpoint_card(config: dict[str, Any]) -> str:
    """Return the card's text for a checkpoint's ``config.json``."""
    shape = "→".join(str(width) for width in (config["hidden_size"], *config["widths"], 1))
    provenance = "\n".join(
        f"| {name} | {_cell(value)} |" for name, value in (config["provenance"] or {}).items()
    )
    fields = {key: value for key, value in config.items() if key != "provenance"}
    return _CARD.format(shape=shape, provenance=provenance, **fields)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")
