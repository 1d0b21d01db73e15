"""The dataset card, generated from what was recorded."""

from dataclasses import asdict
from pathlib import Path

from data_collection.atomic_file import write_text_atomically
from data_collection.dataset.dataset_schema import read_sessions

__all__ = ["write_card"]

_CARD = """\
---
configs:
- config_name: rows
  default: true
  data_files: data/rows-*.parquet
- config_name: requests
  data_files: data/requests-*.parquet
task_categories:
- tabular-regression
tags:
- llm-serving
- length-prediction
- headway
---
# Hidden states of {model}

{rows} rows of {requests} requests, recorded by Headway.
Each row is the hidden state with which {model} computed a token's logits, and how many
tokens the request still generated after it.

| | |
|---|---|
| model | {model} |
| revision | `{revision}` |
| hidden state | {layer} layer, {normalisation}, last token, d = {hidden_size} |
| stored as | {dtype} |
| captured | when the number of generated tokens is a multiple of k = {k}, from 0 on |
| engine | {engine}, model computed in {model_dtype} |
| rows lost | {dropped_rows} dropped, {refused_rows} refused for a value outside {dtype} |

```python
from datasets import load_dataset

rows = load_dataset("parquet", data_files="data/rows-*.parquet", split="train")
requests = load_dataset("parquet", data_files="data/requests-*.parquet", split="train")
```

`remaining_tokens` is the truth where `censored` is false, and a lower bound where the
request was cut (`length`, `abort`, `server_stopped`). Split by `external_id` of the requests
table (`headway` does), never by row.

## Sessions
{sessions}
"""


def write_card(dataset: Path) -> None:
    """Write README.md from the sessions' files."""
    sessions = read_sessions(dataset)
    last = sessions[-1]
    lines = []
    for session in sessions:
        closed = session.closed or "not closed: running, or killed and its open requests lost"
        lines.append(
            f"- `{session.name}`: {session.rows} rows, {session.requests} requests, "
            f"{session.started} to {closed}; {session.engine}, {session.runner}"
            + (f"; sampling {session.sampling}" if session.sampling else "")
            + (f"; workload {session.workload}" if session.workload else "")
        )
    counts = ("rows", "requests", "dropped_rows", "refused_rows")
    sums = {name: sum(getattr(session, name) for session in sessions) for name in counts}
    text = _CARD.format(**asdict(last) | sums | {"sessions": "\n".join(lines)})
    write_text_atomically(dataset / "README.md", text)
