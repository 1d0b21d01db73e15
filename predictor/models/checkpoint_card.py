"""The card of a checkpoint, made from its configuration."""

from typing import Any

__all__ = ["FRONT_MATTER", "checkpoint_card"]

FRONT_MATTER = """\
---
license: apache-2.0
library_name: headway
tags:
- length-prediction
- llm-serving
---
"""
"""What the Hugging Face hub reads of a card."""

_CARD = """\
{front_matter}# {title} for {model}

Reads the hidden state with which {model} computes a token's logits ({layer} layer,
{normalisation}, d = {hidden_size}){counts} and predicts {what}

| | |
|---|---|
| serving model | {model}, revision `{model_revision}` |
| trained on | n = {trained_generated_tokens[0]}–{trained_generated_tokens[1]} generated tokens, \
{trained_remaining_tokens[0]}–{trained_remaining_tokens[1]} remaining, every k = {k} tokens |
{provenance}

```python
from predictor import RequestRows, load_predictor

predictor = load_predictor("this folder")
# hidden_states: float32 [n, {hidden_size}]; counts: generated, prompt, left to max_tokens [n, 3]
forecast = predictor.forecast(RequestRows(hidden_states, counts))
forecast.at(80)  # P(still running after 80 more tokens), [n]
forecast.median()  # tokens, [n]
```

`dataset_card.md` describes the training data; `metrics.json`, where there is one, is what
`headway evaluate` measured on the test split.

Do not use it on another model's hidden states: loading refuses to.
"""

_REGRESSION = """\
how many tokens the request still generates.
An MLP {shape} with ReLU, trained with the L1 loss (STAR, HPDC '26, §4)."""

_SURVIVAL = """\
the probability that the request still runs after h more tokens, for every h.
An MLP {shape} with ReLU whose outputs are hazards of bins of tokens, trained on the likelihood
in which cut requests count as "longer than this", recalibrated on the validation rows."""


def checkpoint_card(config: dict[str, Any]) -> str:
    """Return the card's text for a checkpoint's ``config.json``."""
    survival = config["kind"] == "survival"
    inputs = config["inputs"]
    outputs = len(config["edges"]) - 1 if survival else 1
    sizes = (config["hidden_size"] + len(inputs), *config["widths"], outputs)
    what = (_SURVIVAL if survival else _REGRESSION).format(shape="→".join(map(str, sizes)))
    provenance = "\n".join(
        f"| {name} | {_cell(value)} |" for name, value in (config["provenance"] or {}).items()
    )
    fields = {key: value for key, value in config.items() if key != "provenance"}
    return _CARD.format(
        front_matter=FRONT_MATTER,
        title="Survival forecasts" if survival else "Remaining-length predictor",
        what=what,
        counts=f" and {', '.join(inputs)}" if inputs else "",
        provenance=provenance,
        **fields,
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")
