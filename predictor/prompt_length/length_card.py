"""The card of a prompt-time classifier's checkpoint, made from its configuration."""

from typing import Any

import yaml

from predictor.models.checkpoint_card import FRONT_MATTER

__all__ = ["length_card"]

_CARD = """\
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

from predictor.prompt_length import Prompts, load_length_predictor

predictor = load_length_predictor(Path("this folder"))
# texts and tasks: a list each; prompt_tokens and max_tokens: integer arrays [n]
forecast = predictor.forecast(Prompts(texts, tasks, prompt_tokens, max_tokens))
forecast.at(80)  # P(longer than 80 tokens), [n]
forecast.aged(40)  # of the same requests, 40 tokens on"""

_USE_TASK = """\
from pathlib import Path

from predictor.prompt_length import load_task_classifier

classifier = load_task_classifier(Path("this folder"))
prompts = prompts.with_tasks(classifier.predicted(prompts))"""


def length_card(config: dict[str, Any]) -> str:
    """Return the card's text for a checkpoint's ``config.json``."""
    curve, encoder = config["curve"], config["classifier"] == "encoder"
    what = "its task"
    if curve:
        what = (
            f"which of the buckets {', '.join(config['labels'])} tokens its answer will be in, "
            "and the survival curve that the probabilities stand for"
        )
    hint = "" if not config.get("hinted") else " The task is appended to the prompt as a hint."
    return _CARD.format(
        front_matter=FRONT_MATTER,
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
