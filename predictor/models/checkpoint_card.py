"""The cards of checkpoints, made from their configurations."""

from typing import Any

import yaml

__all__ = ["checkpoint_card", "prompt_card"]

_FRONT_MATTER = """\
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
{normalisation}, d = {hidden_size}){beside} and predicts {what}

| | |
|---|---|
| serving model | {model}, revision `{model_revision}` |
| trained on | n = {trained_generated_tokens[0]}–{trained_generated_tokens[1]} generated tokens, \
{trained_remaining_tokens[0]}–{trained_remaining_tokens[1]} remaining, every k = {k} tokens |
{provenance}

```python
from predictor import RequestRows, load_predictor

predictor = load_predictor("this folder")
# hidden_states: float32 [n, {hidden_size}]; numbers: generated, prompt, left to max_tokens,
# and, for inputs beyond these, temperature, repetition, repeated suffix [n, 3 or 6]
forecast = predictor.forecast(RequestRows(hidden_states, numbers))
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
        front_matter=_FRONT_MATTER,
        title="Survival forecasts" if survival else "Remaining-length predictor",
        what=what,
        beside=f" and {', '.join(inputs)}" if inputs else "",
        provenance=provenance,
        **fields,
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")


_PROMPT_CARD = """\
{front_matter}# {title} for {serving_model}

Before the first token of a request, from {reads}, this {classifier} predicts {what}
(Jain et al. 2025, §4.1 and Appendix C).

```python
{use}
```

Tasks it was trained on: {tasks}.{hint}

## Training
```yaml
{provenance}```

Trained on the answers of {serving_model}: another model's have other lengths.
"""

_USE_LENGTH = """\
from pathlib import Path

from rescheduler.papers.prompt_length import Prompts, load_length_predictor

predictor = load_length_predictor(Path("this folder"))
# texts and tasks: a list each; prompt_tokens and max_tokens: integer arrays [n]
forecast = predictor.forecast(Prompts(texts, tasks, prompt_tokens, max_tokens))
forecast.at(80)  # P(longer than 80 tokens), [n]
forecast.aged(40)  # of the same requests, 40 tokens on"""

_USE_TASK = """\
from pathlib import Path

from rescheduler.papers.prompt_length import load_task_classifier

classifier = load_task_classifier(Path("this folder"))
prompts = prompts.with_tasks(classifier.predicted(prompts))"""


def prompt_card(config: dict[str, Any]) -> str:
    """Return the card of a prompt-time classifier's checkpoint, for its ``config.json``."""
    curve, encoder = config["curve"], config["classifier"] == "encoder"
    what = "its task"
    if curve:
        what = (
            f"which of the buckets {', '.join(config['labels'])} tokens its answer will be in, "
            "and the survival curve that the probabilities stand for"
        )
    hint = "" if not config.get("hinted") else " The task is appended to the prompt as a hint."
    return _PROMPT_CARD.format(
        front_matter=_FRONT_MATTER,
        title="Prompt-time length predictor" if curve else "Task classifier",
        serving_model=config["serving_model"],
        reads="its prompt's text" if encoder else "its prompt's tokens and its application",
        classifier="fine-tuned encoder" if encoder else "random forest",
        what=what,
        use=_USE_LENGTH if curve else _USE_TASK,
        tasks=", ".join(config["tasks"]),
        hint=hint,
        provenance=yaml.safe_dump(config["provenance"], sort_keys=False, allow_unicode=True),
    )
