"""Small datasets written by the real `Recorder`, for tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from msgspec import structs

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.capture_hook import CapturedRows
from data_collection.capture.recorder import Recorder
from data_collection.capture.requests import FinishedRequest
from data_collection.dataset.dataset_schema import Session

D = 8
K = 20


def new_session(name: str = "20250101T000000-1", **changes: object) -> Session:
    """Return a session as the worker describes it, of a model with d = 8."""
    described: dict[str, object] = {
        "name": name,
        "model": "acme/small-model",
        "revision": "abc123",
        "hidden_size": D,
        "dtype": "float16",
        "k": K,
        "engine": "vLLM 0.32.0",
        "runner": "V1",
        "headway": "0.1.0",
        "model_dtype": "float32",
        "started": "2025-01-01T00:00:00+00:00",
    }
    return Session(**(described | changes))  # type: ignore[arg-type]


def step_rows(
    step: int, generated: dict[str, int], vectors: Sequence[Sequence[float]] | None = None
) -> CapturedRows:
    """Return the rows of one step: request id to n; random vectors unless given."""
    if vectors is None:
        hidden = np.random.default_rng(step).standard_normal((len(generated), D))
    else:
        hidden = np.array(vectors)
    return CapturedRows(
        step=step,
        request_ids=list(generated),
        prompt_tokens=[11] * len(generated),
        generated_tokens=list(generated.values()),
        max_tokens=[100] * len(generated),
        temperatures=[1.0] * len(generated),
        adapters=[""] * len(generated),
        hidden_states=torch.from_numpy(hidden.astype(np.float32)),
    )


def ended(
    request_id: str, total: int, reason: str = "stop", task: str = "story"
) -> FinishedRequest:
    """Return the end of a request that generated ``total`` tokens."""
    return FinishedRequest(
        request_id=request_id,
        finish_reason=reason,
        prompt_tokens=11,
        total_tokens=total,
        max_tokens=100,
        prompt_token_ids=list(range(11)),
        output_token_ids=list(range(total)),
        extra_args={"headway_source": "starter", "headway_task": task},
    )


def record(
    dataset: Path,
    session: Session | None = None,
    prefix: str = "a",
    finish_reason: str | None = None,
    adapter: str = "",
) -> None:
    """Record 20 requests of 1 to 100 tokens, those of 100 cut, in several shards."""
    session = session or new_session()
    config = RecordConfig(path=str(dataset), shard_rows=16, flush_seconds=60, dtype=session.dtype)
    recorder = Recorder(config, session)
    for i, total in enumerate(np.linspace(1, 100, 20).astype(int).tolist()):
        name = f"prompt-{prefix}{i}-{i:08x}"
        for n in range(0, total, session.k):
            recorder.on_rows(step_rows(1000 * i + n, {name: n}))
        reason = finish_reason or ("length" if total == 100 else "stop")
        recorder.on_finished([structs.replace(ended(name, total, reason), adapter=adapter)])
    recorder.close()


def with_column(
    name: str, values: Callable[[list[Any]], list[Any]]
) -> Callable[[pa.Table], pa.Table]:
    """Return what makes other values of a column's, of the same type."""

    def change(table: pa.Table) -> pa.Table:
        field, place = table.schema.field(name), table.schema.get_field_index(name)
        changed = values(table[name].to_pylist())
        return table.set_column(place, field, pa.array(changed, field.type))

    return change


def change_shard(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Rewrite a shard as ``change`` makes it."""
    pq.write_table(change(pq.ParquetFile(file).read()), file)
