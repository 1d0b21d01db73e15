"""The dataset's tables: one row a captured step, one row a request."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_collection.files import read_text, write_text_atomically
from data_collection.hub import front_matter, is_repository
from data_collection.parquet_file import UnusableParquetError, open_parquet, parquet_batches

IntArray = npt.NDArray[np.int64]
SplitName = Literal["train", "validation", "test"]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Total = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
FileName = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+\Z", max_length=200)]
Setting = str | int | float | bool | None

SERVER_STOPPED = "server_stopped"
"""Finish reason of requests that were still running when the engine stopped."""


class DatasetError(ValueError):
    """A dataset, or a part of it, is not what it should be."""


def vector_type(hidden_size: int, dtype: str) -> pa.DataType:
    """Return the fixed-size list type of a hidden state."""
    return pa.list_(pa.from_numpy_dtype(np.dtype(dtype)), hidden_size)


def rows_schema(hidden_size: int, dtype: str) -> pa.Schema:
    """Return the schema of the rows table.

    ``generated_tokens`` is n, the tokens generated when the hidden state was computed;
    ``remaining_tokens`` = total - n is the truth where ``censored`` is false, and a lower
    bound where the request was cut (``length``, ``abort``, ``server_stopped``).
    """
    return pa.schema(
        {
            "request_id": pa.string(),
            "step_index": pa.int64(),
            "prompt_tokens": pa.int32(),
            "generated_tokens": pa.int32(),
            "hidden_state": vector_type(hidden_size, dtype),
            "remaining_tokens": pa.int32(),
            "censored": pa.bool_(),
            "finish_reason": pa.string(),
            "max_tokens": pa.int32(),
            "source": pa.string(),
            "task": pa.string(),
        }
    )


REQUESTS_SCHEMA = pa.schema(
    {
        "request_id": pa.string(),
        "external_id": pa.string(),
        "prompt_index": pa.int32(),
        "sample_index": pa.int32(),
        "prompt_tokens": pa.int32(),
        "total_tokens": pa.int32(),
        "censored": pa.bool_(),
        "finish_reason": pa.string(),
        "max_tokens": pa.int32(),
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "adapter": pa.string(),
        "source": pa.string(),
        "task": pa.string(),
        "rows": pa.int32(),
        "prompt_token_ids": pa.list_(pa.int32()),
        "output_token_ids": pa.list_(pa.int32()),
    }
)


ADDED_LATER = ("temperature", "top_p", "adapter")
"""Columns that datasets of earlier versions do not have."""

MAY_BE_EMPTY = (*ADDED_LATER, "prompt_token_ids", "output_token_ids")
"""Columns of requests without a value where it is not known, or not kept."""


@dataclass
class Session:
    """One engine process that recorded into a dataset; kept as ``sessions/NAME.json``.

    Attributes:
        name: start time and process, unique within the dataset.
        dtype: type the vectors are stored in; ``model_dtype`` is the one the model computed in.
        k: tokens between two rows of a request.
        layer: ``last``, or after how many layers.
        state_half_life: tokens after which a state counts half in the average that a row is; 0: a
            row is the last token's state.
        closed: ISO time of an orderly end, or None while running or when killed.
        dropped_rows: rows lost because the writer could not follow.
        refused_rows: rows refused for a value outside dtype's range.
        sampling: parameters of a driven collection.
        workload: how its prompts were driven (arrivals, concurrency, prompts).
    """

    name: FileName
    model: str
    revision: str
    hidden_size: Count
    dtype: Literal["float16", "float32"]
    k: Count
    engine: str
    runner: str
    headway: str
    model_dtype: str
    started: str
    layer: str = "last"
    normalisation: str = "final norm of the model"
    state_half_life: float = 0.0
    closed: str | None = None
    rows: Total = 0
    requests: Total = 0
    dropped_rows: Total = 0
    refused_rows: Total = 0
    sampling: dict[str, Setting] = field(default_factory=dict)
    workload: dict[str, Setting] = field(default_factory=dict)

    def write(self, dataset: Path) -> None:
        """Write the session's file, whole or not at all."""
        folder = dataset / "sessions"
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_text_atomically(folder / f"{self.name}.json", text)

    def refuse_mixing(self, other: "Session") -> None:
        """Refuse to put rows of two models, or of two kinds, into one dataset.

        Raises:
            DatasetError: model, revision, d, dtype, layer, half-life or k differ; both are named.
        """
        kinds = ("layer", "normalisation", "state_half_life", "dtype", "k")
        for what in ("model", "revision", "hidden_size", *kinds):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise DatasetError(
                    f"this dataset was recorded with {what} = {theirs!r} (model {other.model}), "
                    f"now it is {mine!r} (model {self.model}): choose another folder"
                )


def read_sessions(dataset: Path) -> list[Session]:
    """Read the sessions of a dataset, oldest first.

    Raises:
        DatasetError: the folder is not a dataset recorded by Headway, or a session is damaged.
    """
    if not dataset.is_dir():
        raise DatasetError(f"{dataset}: no such folder")
    sessions = []
    for path in sorted((dataset / "sessions").glob("*.json")):
        try:
            sessions.append(msgspec.json.decode(read_text(path), type=Session))
        except (ValueError, RecursionError) as error:  # msgspec's too
            raise DatasetError(f"{path}: not a session's file: {error}") from error
    if not sessions:
        raise DatasetError(f"{dataset}: not a dataset recorded by Headway: no sessions/*.json")
    return sorted(sessions, key=lambda session: session.started)


@contextmanager
def open_shard(file: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet shard to read from it.

    Raises:
        DatasetError: it is not a whole Parquet file of a usable size, or reading from it fails.
    """
    with _of_shard(file), open_parquet(file) as shard:
        yield shard


def shard_batches(
    file: Path, columns: Sequence[str] | None = None, rows: int = 1024
) -> Iterator[pa.RecordBatch]:
    """Yield columns of a shard, a batch of rows at a time; raises as `open_shard`."""
    with _of_shard(file):
        yield from parquet_batches(file, columns, rows)


@contextmanager
def _of_shard(file: Path) -> Iterator[None]:
    try:
        yield
    except UnusableParquetError as error:
        raise DatasetError(str(error)) from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DatasetError(
            f"{file}: not a whole Parquet file ({error}); move it away to use the rest"
        ) from error


def read_columns(files: Iterable[Path], columns: list[str]) -> pa.Table:
    """Return columns of shards, one after another; a table without columns if there are none.

    A column that was added later is empty in shards of earlier versions.

    Raises:
        DatasetError: a shard is not a whole Parquet file, or a column is missing, of another type,
            or has empty values.
    """
    expected = {one.name: one for one in (*rows_schema(1, "float32"), *REQUESTS_SCHEMA)}
    schema = pa.schema([expected[name] for name in columns])
    files, batches = list(files), []
    for file in files:
        with open_shard(file) as shard:
            found = {column.name: column.type for column in shard.schema_arrow}
        for column in schema:
            kind = found.get(column.name)
            if kind != column.type and not (kind is None and column.name in ADDED_LATER):
                what = "is missing" if kind is None else f"is {kind}, it should be {column.type}"
                raise DatasetError(f"{file}: {column.name} {what}")
        for batch in shard_batches(file, [name for name in columns if name in found]):
            for name in batch.schema.names:
                if batch[name].null_count and name not in MAY_BE_EMPTY:
                    raise DatasetError(f"{file}: empty values in {name}")
            arrays = [
                batch[column.name] if column.name in found else pa.nulls(len(batch), column.type)
                for column in schema
            ]
            batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return pa.Table.from_batches(batches, schema) if files else pa.table({})


def shown(text: str) -> str:
    """Return a name of somebody else in one line, without what a terminal would obey."""
    return text if text.isprintable() else repr(text)[1:-1]


def rows_files(dataset: Path) -> list[Path]:
    """Return the Parquet shards with rows, in order."""
    return sorted((dataset / "data").glob("rows-*.parquet"))


def requests_files(dataset: Path) -> list[Path]:
    """Return the Parquet shards with requests, in order."""
    return sorted((dataset / "data").glob("requests-*.parquet"))


def split_requests(group: IntArray, seed: int) -> dict[SplitName, IntArray]:
    """Split requests at random, 70:15:15, no client's request into two parts (STAR §4.4).

    Args:
        group: [n_requests] requests with the same number stay together.
        seed: the same seed gives the same split.

    Returns:
        For each part the indices of its requests, ascending.

    Raises:
        DatasetError: there are too few requests to fill every part.
    """
    groups = np.unique(group)
    order = np.random.default_rng(seed).permutation(groups)
    first = round(0.70 * len(groups))
    second = first + max(1, round(0.15 * len(groups)))
    parts: dict[SplitName, IntArray] = {
        "train": order[:first],
        "validation": order[first:second],
        "test": order[second:],
    }
    if min(len(part) for part in parts.values()) == 0:
        raise DatasetError(
            f"{len(groups)} requests are too few to split into train, validation and test"
        )
    return {name: np.flatnonzero(np.isin(group, part)) for name, part in parts.items()}


def described_state(layer: str, normalisation: str, half_life: float) -> str:
    """Return in words what a row's vector is of; the arguments are those of a `Session`."""
    of = f"{layer} layer, {normalisation}" if layer == "last" else f"after layer {layer}"
    if half_life:
        return f"{of}, averaged over the answer with a half-life of {half_life:g} tokens"
    return f"{of}, last token"


_CARD = """\
{front_matter}# Hidden states of {model}

{rows} rows of {requests} requests, recorded by Headway.
Each row is {row}, and how many
tokens the request still generated after it.

| files | |
|---|---|
| `data/rows-*.parquet` | a hidden state a row, with the tokens generated and remaining |
| `data/requests-*.parquet` | a request a row: ids, lengths, finish reason, sampling{texts} |
| `sessions/*.json` | an engine process a file: model, revision, k, dtype, counts |

Text can be recovered from hidden states, too.

| | |
|---|---|
| model | {model} |
| revision | `{revision}` |
| hidden state | {state}, d = {hidden_size} |
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
    write_text_atomically(dataset / "README.md", dataset_card(dataset))


def dataset_card(dataset: Path, license: str | None = None, texts: bool = True) -> str:
    """Return a card, made from the sessions' files.

    Args:
        dataset: folder of the dataset.
        license: its identifier, if one was chosen.
        texts: whether token ids of prompts and answers are inside, as far as they were kept.

    Raises:
        DatasetError: the folder is not a dataset, or a session is damaged.
    """
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
    fields = asdict(last) | sums
    of_logits = (last.layer, last.state_half_life) == ("last", 0.0)
    logits = f"the hidden state with which {last.model} computed a token's logits"
    fields["row"] = logits if of_logits else f"what {last.model} computed of an answer's tokens"
    fields["state"] = described_state(last.layer, last.normalisation, last.state_half_life)
    fields["sessions"] = "\n".join(lines)
    fields["texts"] = ", token ids of prompt and answer" if texts else "; no token ids"
    fields["front_matter"] = front_matter(
        {
            "configs": [
                {"config_name": "rows", "default": True, "data_files": "data/rows-*.parquet"},
                {"config_name": "requests", "data_files": "data/requests-*.parquet"},
            ],
            "license": license,
            "base_model": last.model if is_repository(last.model) else None,
            "size_categories": [_size_category(sums["rows"])],
            "task_categories": ["tabular-regression"],
            "tags": ["llm-serving", "length-prediction", "headway"],
        }
    )
    return _CARD.format(**fields)


def _size_category(rows: int) -> str:
    """Return the Hub's name for a number of rows."""
    bounds = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
    above = sum(rows >= 1000 * 10**i for i in range(len(bounds)))
    if above == 0:
        return f"n<{bounds[0]}"
    return f"n>{bounds[-1]}" if above == len(bounds) else f"{bounds[above - 1]}<n<{bounds[above]}"
