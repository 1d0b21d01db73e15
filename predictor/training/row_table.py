"""A recorded dataset as arrays: rows, their requests, and a split that shares no request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_collection.dataset.dataset_schema import (
    MAY_BE_EMPTY,
    REQUESTS_SCHEMA,
    DatasetError,
    Session,
    open_shard,
    read_sessions,
    requests_files,
    rows_files,
    shard_batches,
)

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class HiddenStates:
    """The vectors of a dataset, memory-mapped: [n_rows, d], read only where they are taken.

    They are in chunks [n_i, d] whose rows follow one another.
    """

    def __init__(self, chunks: Sequence[npt.NDArray[Any]]) -> None:
        self._chunks = list(chunks)
        self._starts = np.cumsum([0] + [len(chunk) for chunk in chunks])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and d."""
        return int(self._starts[-1]), int(self._chunks[0].shape[1])

    def take(self, rows: IntArray) -> FloatArray:
        """Return a copy of the given rows, [len(rows), d] float32."""
        taken = np.empty((len(rows), self.shape[1]), dtype=np.float32)
        chunk_of = np.searchsorted(self._starts, rows, side="right") - 1
        for chunk in np.unique(chunk_of):
            here = chunk_of == chunk
            taken[here] = self._chunks[chunk][rows[here] - self._starts[chunk]]
        return taken


@dataclass(frozen=True, slots=True)
class Requests:
    """One entry a request, as a struct of arrays.

    Attributes:
        group: [n_requests] number of the client's request; the answers of an n > 1 request,
            and a prompt driven again, share it and are never split apart.
        finish_reason: [n_requests] ``stop``, ``length`` (its ``max_tokens``), ``abort`` ...
        temperature: [n_requests] with which it was sampled; 1, vLLM's default, where unknown.
    """

    request_id: list[str]
    group: IntArray
    total_tokens: IntArray
    censored: npt.NDArray[np.bool_]
    finish_reason: list[str]
    task: list[str]
    temperature: npt.NDArray[np.float64]
    prompt_token_ids: list[list[int] | None]
    output_token_ids: list[list[int] | None]

    def __len__(self) -> int:
        return len(self.request_id)


_COLUMNS = (
    *("vector", "request", "prompt_tokens", "generated_tokens", "remaining_tokens"),
    *("censored", "max_tokens"),
)


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows of a dataset, as a struct of arrays.

    Attributes:
        hidden_states: [n_dataset_rows, d]; row i of this table is vector ``vector[i]``.
        vector: [n_rows] position of the row's vector in ``hidden_states``.
        request: [n_rows] index into ``requests``.
        remaining_tokens: [n_rows] truth, or lower bound where censored.
    """

    hidden_states: HiddenStates
    vector: IntArray
    request: IntArray
    prompt_tokens: IntArray
    generated_tokens: IntArray
    remaining_tokens: IntArray
    censored: npt.NDArray[np.bool_]
    max_tokens: IntArray
    requests: Requests
    session: Session

    def __len__(self) -> int:
        return len(self.vector)

    def select(self, rows: IntArray | npt.NDArray[np.bool_]) -> "RowTable":
        """Return the table with the given rows, in that order, over the same vectors."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def uncensored(self) -> "RowTable":
        """Return the rows whose remaining length is known."""
        return self.select(~self.censored)

    def ran_to_their_end(self) -> "RowTable":
        """Return the rows of requests that ended by themselves or at their ``max_tokens``.

        What these generated is what a scheduler would have wanted to know. Those cut by a
        leaving client or a stopping server say nothing of the kind.
        """
        whole = np.isin(self.requests.finish_reason, ("stop", "length"))
        return self.select(whole[self.request])

    def tokens_left(self) -> IntArray:
        """Return max_tokens - n, [n_rows]: no request generates more.

        Where a request's ``max_tokens`` is unknown (0), the largest of the table stands in.
        """
        cap = np.where(self.max_tokens > 0, self.max_tokens, self.max_tokens.max(initial=0))
        return np.maximum(cap - self.generated_tokens, 1)

    def numbers(self) -> FloatArray:
        """Return the columns of `predictor.models.hidden_state_mlp.INPUTS`, [n_rows, 6].

        Repetition is nan in rows whose tokens were not recorded.
        """
        columns = (
            *(self.generated_tokens, self.prompt_tokens, self.tokens_left()),
            self.requests.temperature[self.request],
            *self._repetition().T,
        )
        return np.stack(columns, axis=1).astype(np.float32)

    def _repetition(self) -> FloatArray:
        """Return what `repetition` says of every row's answer but its newest token, [n_rows, 2]."""
        # A process that has imported numba starts no vLLM worker on a CPU.
        from predictor.models.repetition import repetition

        found = np.full((len(self), 2), np.nan, dtype=np.float32)
        order = np.argsort(self.request, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(self.request[order])) + 1):
            answer = self.requests.output_token_ids[self.request[rows[0]]] if len(rows) else None
            if answer is None:
                continue
            tokens = np.array(answer, dtype=np.int64)
            for row in rows:
                known = max(0, int(self.generated_tokens[row]) - 1)
                if known <= len(tokens):
                    found[row] = repetition(tokens[:known])
        return found

    def vectors(self) -> FloatArray:
        """Return all hidden states of this table, [n_rows, d]; they must fit in memory."""
        return self.hidden_states.take(self.vector)


def load_rows(dataset: Path, adapter: str = "") -> RowTable:
    """Load a dataset recorded by Headway; vectors stay on the disk.

    Args:
        dataset: its folder.
        adapter: the LoRA adapter whose rows are loaded; "": the base model's.

    Raises:
        DatasetError: the folder is no dataset, has no rows, or a shard is damaged.
    """
    session = read_sessions(dataset)[-1]
    shards = {"rows": rows_files(dataset), "requests": requests_files(dataset)}
    for kind, files in shards.items():
        if not files:
            raise DatasetError(f"{dataset}: no data/{kind}-*.parquet, nothing was recorded yet")
        for file in files:
            _refuse_unusable(file)
    try:
        rows = read_shards(shards["rows"])
        requests = read_shards(shards["requests"], REQUESTS_SCHEMA)
        table = _joined(dataset, session, rows, requests)
        return _of_adapter(dataset, adapter, table, requests)
    except DatasetError:
        raise
    except Exception as error:  # a damaged page, or other columns: there are many kinds
        raise DatasetError(
            f"{dataset}: a shard cannot be read ({type(error).__name__}: {error}); "
            "`headway dataset validate` lists what is wrong"
        ) from error


def _refuse_unusable(file: Path) -> None:
    """Refuse a shard that is not whole, too large in memory, or has empty values."""
    with open_shard(file) as shard:
        names = shard.schema_arrow.names
    checked = [name for name in names if name != "hidden_state" and name not in MAY_BE_EMPTY]
    for batch in shard_batches(file, checked, rows=1 << 16):
        for name in checked:
            if batch[name].null_count:
                raise DatasetError(f"{file}: empty values in {name}")


def read_shards(files: Sequence[Path], schema: Any = None) -> Any:
    """Return the Arrow table of some shards; its buffers stay on the disk.

    With a schema, columns that a shard of an earlier version lacks are null.
    """
    from datasets import Features, load_dataset

    return load_dataset(
        "parquet",
        data_files=[str(file) for file in files],
        features=None if schema is None else Features.from_arrow_schema(schema),
        split="train",
    ).data


def _of_adapter(dataset: Path, adapter: str, table: RowTable, requests: Any) -> RowTable:
    adapters = np.array([name or "" for name in requests.column("adapter").to_pylist()])
    selected = table.select((adapters == adapter)[table.request])
    if len(table) and not len(selected):
        found = ", ".join(sorted({name or "the base model" for name in adapters.tolist()}))
        wanted = f"adapter {adapter}" if adapter else "the base model"
        raise DatasetError(
            f"{dataset}: no rows of {wanted}, but of {found}: choose by --data.adapter NAME"
        )
    return selected


def _joined(dataset: Path, session: Session, rows: Any, requests: Any) -> RowTable:
    """Return rows with their requests."""
    hidden = rows.column("hidden_state")
    width = hidden.type.list_size
    chunks = [chunk.flatten().to_numpy().reshape(-1, width) for chunk in hidden.chunks]
    columns = {
        name: rows.column(name).to_numpy().astype(np.int64)
        for name in ("prompt_tokens", "generated_tokens", "remaining_tokens", "max_tokens")
    }
    lists = ("request_id", "finish_reason", "task", "prompt_token_ids", "output_token_ids")
    listed = {name: requests.column(name).to_pylist() for name in lists}
    index = {name: i for i, name in enumerate(listed["request_id"])}
    _, group = np.unique(requests.column("external_id").to_numpy(), return_inverse=True)
    temperature = requests.column("temperature").to_numpy()
    try:
        request = np.array([index[name] for name in rows.column("request_id").to_pylist()])
    except KeyError as error:
        raise DatasetError(
            f"{dataset}: rows of request {error} are there, the request is not; "
            "`headway dataset validate` lists what is wrong"
        ) from error
    return RowTable(
        hidden_states=HiddenStates(chunks),
        vector=np.arange(len(request)),
        request=request,
        censored=rows.column("censored").to_numpy(),
        requests=Requests(
            group=group,
            total_tokens=requests.column("total_tokens").to_numpy().astype(np.int64),
            censored=requests.column("censored").to_numpy(),
            temperature=np.where(np.isnan(temperature), 1.0, temperature),
            **listed,
        ),
        session=session,
        **columns,
    )
