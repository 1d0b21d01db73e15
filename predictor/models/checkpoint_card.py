"""The cards of checkpoints, made from their configurations."""

from collections.abc import Mapping
from typing import Any

_CARD = """\
{front_matter}# {title} for {model}

Reads {reads}{beside} and predicts {what}

| | |
|---|---|
| serving model | {model}, revision `{model_revision}`{adapter} |
| trained on | n = {trained_generated_tokens[0]}–{trained_generated_tokens[1]} generated tokens, \
{trained_remaining_tokens[0]}–{trained_remaining_tokens[1]} remaining, every k = {k} tokens |
{provenance}

{usage}

`dataset_card.md` describes the training data; `metrics.json`, where there is one, is what
`headway evaluate` measured on the test split.

{not_for}
"""

_HIDDEN_STATE = """\
the hidden state with which {model} computes a token's logits ({layer} layer,
{normalisation}, d = {hidden_size})"""

_PROMPT = """\
a prompt, as averages of {model}'s own token embeddings ({hidden_size} values)"""

_USAGE = """\
```python
from predictor import RequestRows, load_predictor

predictor = load_predictor("this folder")
# hidden_states: float32 [n, {hidden_size}]; numbers: generated, prompt, left to max_tokens,
# and, for inputs beyond these, temperature, repetition, repeated suffix [n, 3 or 6]
forecast = predictor.forecast(RequestRows(hidden_states, numbers))
forecast.at(80)  # P(still running after 80 more tokens), [n]
forecast.median()  # tokens, [n]
```"""

_PROMPT_USAGE = """\
```python
from predictor.prompts.prompt_predictor import PromptPredictor

predictor = PromptPredictor.load("this folder")
predictor.expected_tokens("Write a story about a lighthouse keeper.", max_tokens=1024)
# token ids of n prompts, temperature [n], max_tokens [n]
forecast = predictor.forecast([[504, 5646], [10]], [0.8, 1.0], [1024, 50])
forecast.median()  # tokens, [n]
```"""

_NOT_FOR = "Do not use it on another model's hidden states: loading refuses to."
_PROMPT_NOT_FOR = "What another model would answer to the same prompt, it does not know."

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
    fields = {key: value for key, value in config.items() if key != "provenance"}
    adapter = config.get("adapter")
    fields["adapter"] = f", LoRA adapter {adapter}" if adapter else ""
    prompt = config["layer"] == "prompt"
    return _CARD.format(
        front_matter=front_matter("length-prediction", "llm-serving"),
        title="Survival forecasts" if survival else "Remaining-length predictor",
        reads=(_PROMPT if prompt else _HIDDEN_STATE).format(**fields),
        usage=(_PROMPT_USAGE if prompt else _USAGE).format(**fields),
        not_for=_PROMPT_NOT_FOR if prompt else _NOT_FOR,
        what=what,
        beside=f" and {', '.join(inputs)}" if inputs else "",
        provenance=provenance_rows(config["provenance"] or {}),
        **fields,
    )


def front_matter(*tags: str) -> str:
    """Return what the Hugging Face hub reads of a card."""
    lines = ["---", "license: apache-2.0", "library_name: headway", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---", ""])


def provenance_rows(provenance: Mapping[str, Any]) -> str:
    """Return the rows of a table of two columns: how a checkpoint came about."""
    return "\n".join(f"| {name} | {_cell(value)} |" for name, value in provenance.items())


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")
