"""`headway dataset validate`: is a dataset what its card and its schema promise?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_collection.dataset.dataset_schema import (
    ADDED_LATER,
    REQUESTS_SCHEMA,
    DatasetError,
    IntArray,
    Session,
    open_shard,
    read_sessions,
    requests_files,
    rows_files,
    rows_schema,
    shard_batches,
    shown,
    split_requests,
)

_BATCH_ROWS = 4096
_EXAMPLES = 3


def validate(dataset: Path) -> None:
    """Check everything that training relies on, and print one line when all of it holds.

    Shards are read in batches, without the token ids. So memory stays bounded by the number of
    requests.

    Args:
        dataset: folder of the dataset.

    Raises:
        DatasetError: the folder is not a dataset, or something is wrong in it; the message
            lists every kind of problem with its count and its first places.
    """
    sessions = read_sessions(dataset)
    check = _Check(sessions[-1])
    for session in sessions[:-1]:
        try:
            sessions[-1].refuse_mixing(session)
        except DatasetError as error:
            check.problems.add(f"session {session.name}: {error}")
    # Listed before the requests: a recorder that runs meanwhile renames its rows last.
    rows_shards = rows_files(dataset)
    for file in requests_files(dataset):
        check.read_requests(file)
    if not check.total and not check.problems:
        raise DatasetError(f"{dataset}: no data/requests-*.parquet, nothing was recorded yet")
    check.read_rows(rows_shards)
    split = check.split()
    if check.problems:
        raise DatasetError(f"{dataset} is not valid:\n{check.problems}")
    print(
        f"valid: {check.counted[:-1].sum():,} rows of {len(check.total):,} requests in "
        f"{len(rows_shards)} shards, {len(sessions)} sessions; {split}"
    )


class _Problems:
    """Problems by kind: how often, and where first."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, list[str]]] = {}

    def add(self, kind: str, places: list[str] | None = None, count: int = 1) -> None:
        earlier, examples = self._found.get(kind, (0, []))
        self._found[kind] = (earlier + count, [*examples, *(places or [])][:_EXAMPLES])

    def __bool__(self) -> bool:
        return bool(self._found)

    def __str__(self) -> str:
        return "\n".join(
            f"- {kind}" + (f": {count:,} times, first {'; '.join(places)}" if places else "")
            for kind, (count, places) in self._found.items()
        )


class _Check:
    """What has been read so far: requests as a struct of lists, and their rows' progress.

    Arrays have one more entry, at -1, for rows whose request is unknown.
    """

    def __init__(self, session: Session) -> None:
        self.problems = _Problems()
        self.total: list[int] = []
        self.counted: IntArray = np.zeros(1, dtype=np.int64)
        self._session = session
        self._index: dict[str, int] = {}
        self._declared_rows: list[int] = []
        self._external_id: list[str] = []
        self._last_generated: IntArray = np.zeros(1, dtype=np.int64)
        self._totals: IntArray = np.zeros(1, dtype=np.int64)
        self._unread: set[str] = set()

    def read_requests(self, file: Path) -> None:
        """Take the requests of a shard, and check them against themselves."""
        columns = ["request_id", "external_id", "total_tokens", "censored", "rows", "finish_reason"]
        for batch in self._batches("requests", file, REQUESTS_SCHEMA, columns):
            if self._has_empty("requests", file.name, batch):
                return
            for entry in batch.to_pylist():
                name = entry["request_id"]
                place = [f"{shown(name)} in {file.name}"]
                if name in self._index:
                    self.problems.add("a request appears twice", place)
                    continue
                if entry["censored"] != (entry["finish_reason"] != "stop"):
                    kind = "a request's censored does not agree with its finish_reason"
                    self.problems.add(kind, place)
                self._index[name] = len(self.total)
                self.total.append(entry["total_tokens"])
                self._declared_rows.append(entry["rows"])
                self._external_id.append(entry["external_id"])

    def read_rows(self, files: list[Path]) -> None:
        """Check the rows of all shards, a batch at a time, when all requests are known."""
        self._totals = np.array([*self.total, 0], dtype=np.int64)
        self.counted = np.zeros(len(self._totals), dtype=np.int64)
        self._last_generated = np.full(len(self._totals), -1, dtype=np.int64)
        expected = rows_schema(self._session.hidden_size, self._session.dtype)
        for file in files:
            first_row = 0
            for batch in self._batches("rows", file, expected):
                self._check_batch(file.name, first_row, batch)
                first_row += batch.num_rows
        if "rows" in self._unread:
            return
        names, counted = list(self._index), self.counted[:-1]
        for i in np.flatnonzero(counted != np.array(self._declared_rows, dtype=np.int64)):
            self.problems.add(
                "a request's rows are not as many as the requests table says",
                [f"{shown(names[i])} has {counted[i]}, not {self._declared_rows[i]}"],
            )

    def split(self) -> str:
        """Split by the client's request, and describe the parts."""
        _, group = np.unique(np.array(self._external_id), return_inverse=True)
        try:
            parts = split_requests(group, seed=0)
        except DatasetError as error:
            return str(error)
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in parts.items())
        return f"requests by part: {sizes}"

    def _batches(
        self, kind: str, file: Path, expected: pa.Schema, columns: list[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a shard; if they cannot all be read, say why."""
        try:
            with open_shard(file) as shard:
                wrong = _wrong_columns(shard.schema_arrow, expected)
            if not wrong:
                yield from shard_batches(file, columns, _BATCH_ROWS)
                return
            for problem in wrong:
                self.problems.add(f"{file.name}: {problem}")
        except DatasetError as error:
            self.problems.add(str(error))
        self._unread.add(kind)

    def _has_empty(self, kind: str, shard: str, batch: pa.RecordBatch) -> bool:
        """Return whether values are missing, after which nothing of this kind can be counted."""
        empty = [name for name in batch.schema.names if batch[name].null_count]
        if empty:
            self.problems.add(f"{shard}: empty values in {', '.join(empty)}")
            self._unread.add(kind)
        return bool(empty)

    def _check_batch(self, shard: str, first_row: int, batch: pa.RecordBatch) -> None:
        if self._has_empty("rows", shard, batch):
            return
        ids = batch["request_id"].dictionary_encode()
        known = [self._index.get(name, -1) for name in ids.dictionary.to_pylist()]
        request = np.array(known, dtype=np.int64)[ids.indices.to_numpy()]
        generated = batch["generated_tokens"].to_numpy().astype(np.int64)
        remaining = batch["remaining_tokens"].to_numpy().astype(np.int64)
        vectors = batch["hidden_state"].flatten().to_numpy(zero_copy_only=False)
        finite = np.isfinite(vectors).reshape(batch.num_rows, -1).all(axis=1)
        cut = pc.not_equal(batch["finish_reason"], "stop")
        agrees = pc.equal(batch["censored"], cut).to_numpy(zero_copy_only=False)
        k, has_request, rise = self._session.k, request >= 0, self._follow(request, generated)
        total = generated + remaining
        found = {
            "hidden_state has NaN or infinite values": ~finite,
            "remaining_tokens is below 1": remaining < 1,
            f"generated_tokens is not a multiple of k = {k}": (generated % k != 0)
            | (generated < 0),
            "a row's censored does not agree with its finish_reason": ~agrees,
            "a row's request is not in the requests table": ~has_request
            & ("requests" not in self._unread),
            "remaining_tokens + generated_tokens is not the request's total_tokens": has_request
            & (total != self._totals[request]),
            "a request has two rows with the same generated_tokens": has_request & (rise == 0),
            "generated_tokens falls within a request": has_request & (rise < 0),
        }
        for kind, where in found.items():
            if count := int(where.sum()):
                places = [
                    f"{shard} row {first_row + i} "
                    f"(request {shown(batch['request_id'][int(i)].as_py())})"
                    for i in np.flatnonzero(where)[:_EXAMPLES]
                ]
                self.problems.add(kind, places, count)

    def _follow(self, request: IntArray, generated: IntArray) -> IntArray:
        """Return by how much n rose since the request's row before, in this batch or an earlier."""
        np.add.at(self.counted, request, 1)
        order = np.argsort(request, kind="stable")
        request, ordered = request[order], generated[order]
        first = np.flatnonzero(np.diff(request, prepend=-2))
        last = np.flatnonzero(np.diff(request, append=-2))
        before = np.roll(ordered, 1)
        before[first] = self._last_generated[request[first]]
        self._last_generated[request[last]] = ordered[last]
        rise = np.empty_like(ordered)
        rise[order] = ordered - before
        return rise


def _wrong_columns(found: pa.Schema, expected: pa.Schema) -> list[str]:
    wrong = []
    for column in expected:
        place = found.get_field_index(column.name)
        if place < 0:
            if column.name not in ADDED_LATER:
                wrong.append(f"{column.name} is missing")
        elif not (kind := found.field(place).type).equals(column.type):
            wrong.append(_type_problem(column.name, kind, column.type))
    unknown = set(found.names) - set(expected.names)
    return wrong + [f"unexpected column {shown(name)}" for name in sorted(unknown)]


def _type_problem(name: str, found: Any, expected: Any) -> str:
    if (
        pa.types.is_fixed_size_list(found)
        and pa.types.is_fixed_size_list(expected)
        and found.list_size != expected.list_size
    ):
        return (
            f"{name} has {found.list_size} values, the dataset card says "
            f"{expected.list_size}: was it collected from another model?"
        )
    return f"{name} is {found}, it should be {expected}"
