"""`headway dataset validate`: is a dataset what its card and its schema promise?"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_collection.dataset.dataset_schema import (
    REQUESTS_SCHEMA,
    DatasetError,
    Session,
    read_sessions,
    requests_files,
    rows_files,
    rows_schema,
    split_requests,
)

__all__ = ["open_shard", "validate"]

_BATCH_ROWS = 4096
_ADDED_LATER = ("temperature", "top_p")
"""Columns that datasets of earlier versions do not have."""

_EXAMPLES = 3

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@contextmanager
def open_shard(file: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet shard to read from it.

    Raises:
        DatasetError: it is not a whole Parquet file, or reading from it fails.
    """
    try:
        with pq.ParquetFile(file) as shard:
            yield shard
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DatasetError(
            f"{file.name}: not a whole Parquet file ({error}); move it away to use the rest"
        ) from error


def validate(dataset: Path) -> None:
    """Check everything that training relies on, and print one line when all of it holds.

    Shards are read in batches, without the token ids, so that memory stays bounded by the
    number of requests.

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
    check.start_rows()
    for file in rows_shards:
        check.read_rows(file)
    check.compare_counts()
    split = check.split()
    if check.problems:
        raise DatasetError(f"{dataset} is not valid:\n{check.problems}")
    print(
        f"valid: {check.counted.sum():,} rows of {len(check.total):,} requests in "
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
    """What has been read so far: requests as a struct of lists, and their rows' progress."""

    def __init__(self, session: Session) -> None:
        self.problems = _Problems()
        self.total: list[int] = []
        self.counted: IntArray = np.zeros(0, dtype=np.int64)
        self._session = session
        self._index: dict[str, int] = {}
        self._declared_rows: list[int] = []
        self._external_id: list[str] = []
        self._last_generated: IntArray = np.zeros(0, dtype=np.int64)
        self._totals: IntArray = np.zeros(0, dtype=np.int64)
        self._all_rows_read = True
        self._all_requests_read = True

    def read_requests(self, file: Path) -> None:
        """Take the requests of a shard, and check them against themselves."""
        columns = ["request_id", "external_id", "total_tokens", "censored", "rows"]
        try:
            with open_shard(file) as shard:
                if not self._schema_fits(file, shard.schema_arrow, REQUESTS_SCHEMA):
                    self._all_requests_read = False
                    return
                entries = shard.read(columns=[*columns, "finish_reason"]).to_pylist()
        except DatasetError as error:
            self.problems.add(str(error))
            self._all_requests_read = False
            return
        for entry in entries:
            name = entry["request_id"]
            if name in self._index:
                self.problems.add("a request appears twice", [f"{name} in {file.name}"])
                continue
            if entry["censored"] != (entry["finish_reason"] != "stop"):
                self.problems.add(
                    "a request's censored does not agree with its finish_reason",
                    [f"{name} in {file.name}"],
                )
            self._index[name] = len(self.total)
            self.total.append(entry["total_tokens"])
            self._declared_rows.append(entry["rows"])
            self._external_id.append(entry["external_id"])

    def start_rows(self) -> None:
        """All requests are known: make room for what their rows will add."""
        self._totals = np.array(self.total, dtype=np.int64)
        self.counted = np.zeros(len(self.total), dtype=np.int64)
        self._last_generated = np.full(len(self.total), -1, dtype=np.int64)

    def read_rows(self, file: Path) -> None:
        """Check the rows of a shard, a batch at a time."""
        expected = rows_schema(self._session.hidden_size, self._session.dtype)
        first_row = 0
        try:
            with open_shard(file) as shard:
                if not self._schema_fits(file, shard.schema_arrow, expected):
                    self._all_rows_read = False
                    return
                for batch in shard.iter_batches(_BATCH_ROWS):
                    self._check_batch(file.name, first_row, batch)
                    first_row += batch.num_rows
        except DatasetError as error:
            self.problems.add(str(error))
            self._all_rows_read = False

    def compare_counts(self) -> None:
        """Compare how many rows each request has with what the requests table says."""
        if not self._all_rows_read:
            return
        names = list(self._index)
        for i in np.flatnonzero(self.counted != np.array(self._declared_rows, dtype=np.int64)):
            self.problems.add(
                "a request's rows are not as many as the requests table says",
                [f"{names[i]} has {self.counted[i]}, not {self._declared_rows[i]}"],
            )

    def split(self) -> str:
        """Split by the client's request, check that no part shares one, and describe it."""
        clients, group = np.unique(np.array(self._external_id), return_inverse=True)
        try:
            parts = split_requests(group, seed=0)
        except DatasetError as error:
            return str(error)
        owners = np.concatenate([np.unique(group[part]) for part in parts.values()])
        if len(owners) != len(clients):
            self.problems.add("a client's request is in two of train, validation and test")
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in parts.items())
        return f"requests by part: {sizes}"

    def _schema_fits(self, file: Path, found: pa.Schema, expected: pa.Schema) -> bool:
        wrong = []
        for column in expected:
            place = found.get_field_index(column.name)
            if place < 0 and column.name in _ADDED_LATER:
                continue
            if place < 0:
                wrong.append(f"{column.name} is missing")
            elif not (kind := found.field(place).type).equals(column.type):
                wrong.append(_type_problem(column.name, kind, column.type))
        unknown = set(found.names) - set(expected.names)
        wrong += [f"unexpected column {name}" for name in sorted(unknown)]
        for problem in wrong:
            self.problems.add(f"{file.name}: {problem}")
        return not wrong

    def _check_batch(self, shard: str, first_row: int, batch: pa.RecordBatch) -> None:
        if empty := [name for name in batch.schema.names if batch[name].null_count]:
            self.problems.add(f"{shard}: empty values in {', '.join(empty)}")
            self._all_rows_read = False
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
        k = self._session.k
        found = {
            "hidden_state has NaN or infinite values": ~finite,
            "remaining_tokens is below 1": remaining < 1,
            f"generated_tokens is not a multiple of k = {k}": (generated % k != 0)
            | (generated < 0),
            "a row's censored does not agree with its finish_reason": ~agrees,
        }
        has_request = request >= 0
        if self._all_requests_read:
            found["a row's request is not in the requests table"] = ~has_request
        rows = np.flatnonzero(has_request)
        step = self._follow(request[rows], generated[rows])
        totals = self._totals[request[rows]]
        found |= {
            "remaining_tokens + generated_tokens is not the request's total_tokens": _at(
                rows, generated[rows] + remaining[rows] != totals, batch.num_rows
            ),
            "a request has two rows with the same generated_tokens": _at(
                rows, step == 0, batch.num_rows
            ),
            "generated_tokens falls within a request": _at(rows, step < 0, batch.num_rows),
        }
        for kind, where in found.items():
            if count := int(where.sum()):
                places = [
                    f"{shard} row {first_row + i} (request {batch['request_id'][int(i)]})"
                    for i in np.flatnonzero(where)[:_EXAMPLES]
                ]
                self.problems.add(kind, places, count)

    def _follow(self, request: IntArray, generated: IntArray) -> IntArray:
        """Return by how much n rose since the request's row before, in this batch or an earlier.

        Args:
            request: [n_rows] index of each row's request.
            generated: [n_rows] n.
        """
        order = np.argsort(request, kind="stable")
        request, ordered = request[order], generated[order]
        before = np.concatenate(([-1], ordered[:-1]))
        first = np.concatenate(([True], request[1:] != request[:-1]))[: len(request)]
        before = before[: len(request)]
        before[first] = self._last_generated[request[first]]
        rise = np.empty_like(ordered)
        rise[order] = ordered - before
        last = np.concatenate((request[1:] != request[:-1], [True]))[: len(request)]
        self._last_generated[request[last]] = ordered[last]
        np.add.at(self.counted, request, 1)
        return rise


def _at(rows: IntArray, wrong: BoolArray, n_rows: int) -> BoolArray:
    """Spread a mask over some rows to a mask over all n_rows."""
    mask = np.zeros(n_rows, dtype=np.bool_)
    mask[rows[wrong]] = True
    return mask


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
