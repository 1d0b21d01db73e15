"""The cards of checkpoints, made from their configurations."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from data_collection import hub
from data_collection.dataset.dataset_schema import described_state

_CARD = """\
{front_matter}# {title} for {model}

Reads {reads}{beside} and predicts {what}

| | |
|---|---|
| serving model | {model}, revision `{model_revision}`{adapter} |
| trained on | n = {trained_generated_tokens[0]}–{trained_generated_tokens[1]} generated tokens, \
{trained_remaining_tokens[0]}–{trained_remaining_tokens[1]} remaining, every k = {k} tokens |
{provenance}

{usage}{pull}

`dataset_card.md` describes the training data; `metrics.json`, where there is one, is what
`headway evaluate` measured on the test split.

{not_for}
"""

_HIDDEN_STATE = """\
the hidden state with which {model} computes a token's logits ({layer} layer,
{normalisation}, d = {hidden_size})"""

_OTHER_STATE = """\
the hidden state of {model} ({state}, d = {hidden_size})"""

_PROMPT = """\
a prompt, as averages of {model}'s own token embeddings ({hidden_size} values)"""

_USAGE = """\
```python
from predictor import RequestRows, load_predictor

predictor = load_predictor("{folder}")
# hidden_states: float32 [n, {hidden_size}]; numbers: generated, prompt, left to max_tokens,
# and, for inputs beyond these, temperature, repetition, repeated suffix [n, 3 or 6]
forecast = predictor.forecast(RequestRows(hidden_states, numbers))
forecast.at(80)  # P(still running after 80 more tokens), [n]
forecast.median()  # tokens, [n]
```"""

_PROMPT_USAGE = """\
```python
from predictor.prompts.prompt_predictor import PromptPredictor

predictor = PromptPredictor.load("{folder}")
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


_PULL = """

The folder comes with

```
headway train pull {repository} {folder}
```"""

_PULLED = "runs/predictor"

_VALIDATED = {"val_mae": ("mae", "MAE, tokens"), "val_nll": ("nll", "Negative log-likelihood")}
_EVALUATED = {
    "mae": "MAE, tokens",
    "mae_ended": "MAE, ended by itself, tokens",
    "ibs": "Integrated Brier score",
    "concordance": "Concordance",
    "pinball": "Pinball loss, tokens",
}


def checkpoint_card(
    config: dict[str, Any],
    metrics: Mapping[str, Any] | None = None,
    *,
    license: str = "apache-2.0",
    repository: str = "",
    dataset: str | None = None,
) -> str:
    """Return a checkpoint's card.

    Args:
        config: its ``config.json``.
        metrics: its ``metrics.json``, if it was evaluated.
        license: identifier of its licence.
        repository: where it is on the Hub, or empty.
        dataset: the repository of the dataset that it was trained on, if there is one.
    """
    survival = config["kind"] == "survival"
    inputs = config["inputs"]
    outputs = len(config["edges"]) - 1 if survival else 1
    sizes = (config["hidden_size"] + len(inputs), *config["widths"], outputs)
    what = (_SURVIVAL if survival else _REGRESSION).format(shape="→".join(map(str, sizes)))
    fields = {key: value for key, value in config.items() if key != "provenance"}
    adapter = config.get("adapter")
    fields["adapter"] = f", LoRA adapter {adapter}" if adapter else ""
    fields["folder"] = _PULLED if repository else "this folder"
    prompt = config["layer"] == "prompt"
    half_life = config.get("state_half_life", 0.0)
    fields["state"] = described_state(config["layer"], config["normalisation"], half_life)
    of_logits = (config["layer"], half_life) == ("last", 0.0)
    reads = _PROMPT if prompt else _HIDDEN_STATE if of_logits else _OTHER_STATE
    title = "Survival forecasts" if survival else "Remaining-length predictor"
    results = _results(config["provenance"] or {}, metrics or {}, dataset)
    hub_fields = {
        "base_model": config["model"] if hub.is_repository(config["model"]) else None,
        "datasets": [dataset] if dataset else None,
        "metrics": list(dict.fromkeys(one["type"] for r in results for one in r["metrics"])),
        "model-index": results and [{"name": f"{title} for {config['model']}", "results": results}],
    }
    return _CARD.format(
        front_matter=front_matter(
            "length-prediction", "llm-serving", license=license, fields=hub_fields
        ),
        title=title,
        pull=_PULL.format(repository=repository, folder=_PULLED) if repository else "",
        reads=reads.format(**fields),
        usage=(_PROMPT_USAGE if prompt else _USAGE).format(**fields),
        not_for=_PROMPT_NOT_FOR if prompt else _NOT_FOR,
        what=what,
        beside=f" and {', '.join(inputs)}" if inputs else "",
        provenance=provenance_rows(config["provenance"] or {}),
        **fields,
    )


def _results(
    provenance: Mapping[str, Any], metrics: Mapping[str, Any], dataset: str | None
) -> list[dict[str, Any]]:
    """Return what training and evaluation measured, as the Hub reads a card's ``model-index``."""
    evaluated = metrics.get("provenance")
    where = evaluated if isinstance(evaluated, Mapping) else {}
    trained_on = str(provenance.get("dataset", ""))
    measured = [
        (
            {"name": str(where.get("dataset", "")), "split": str(where.get("part", "test"))},
            [(kind, name, metrics.get(kind)) for kind, name in _EVALUATED.items()],
        ),
        (
            {"name": trained_on.partition(", engine")[0], "split": "validation"},
            [(kind, name, provenance.get(key)) for key, (kind, name) in _VALIDATED.items()],
        ),
    ]
    results = []
    for on, figures in measured:
        found = [
            {"type": kind, "name": name, "value": round(value, 6)}
            for kind, name, value in figures
            if isinstance(value, int | float) and isfinite(value)
        ]
        if found:
            task = {"type": "tabular-regression", "name": "Remaining tokens of a request"}
            of_dataset = {"type": dataset or "headway-dataset", **on}
            results.append({"task": task, "dataset": of_dataset, "metrics": found})
    return results


def front_matter(
    *tags: str, license: str = "apache-2.0", fields: Mapping[str, Any] | None = None
) -> str:
    """Return what the Hugging Face hub reads of a card."""
    named = {"license": license, "library_name": "headway", **(fields or {})}
    return hub.front_matter({**named, "tags": list(tags)})


def provenance_rows(provenance: Mapping[str, Any]) -> str:
    """Return the rows of a table of two columns: how a checkpoint came about."""
    return "\n".join(f"| {name} | {_cell(value)} |" for name, value in provenance.items())


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")
