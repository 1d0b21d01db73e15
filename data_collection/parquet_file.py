"""Parquet files that people give, which a few bytes can make as large in memory as they like."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_BYTES, _TIMES = 64 << 20, 64
"""What a file may take in memory: so many bytes, and so many times its own size.

Prompts that share a beginning of thousands of tokens are compressed 40 times.
"""
_ROWS = 100_000
"""Rows that a file may have, in addition to one for each of its bytes."""

_BATCH_ROWS = 1024
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_OFFSET = 4
"""Bytes that a text takes beside its own."""


class UnusableParquetError(ValueError):
    """A Parquet file is too large in memory, or has two columns of one name."""


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file whose columns have different names, and whose rows fit in memory.

    Texts may be larger than this can know: `parquet_batches` counts them.

    Raises:
        UnusableParquetError: as it says.
        OSError: it cannot be read.
        pa.ArrowException: it is no Parquet file, or it is damaged.
    """
    with pq.ParquetFile(path) as file:
        doubled = [name for name, n in Counter(file.schema_arrow.names).items() if n > 1]
        if doubled:
            raise UnusableParquetError(f"{path}: it has column {doubled[0]!r} more than once")
        if (rows := file.metadata.num_rows) > _ROWS + path.stat().st_size:
            raise UnusableParquetError(f"{path}: {rows:,} rows, far too many for so small a file")
        _refuse_size(path, sum(_sizes(file.metadata)))
        yield file


def parquet_batches(
    path: Path, columns: Sequence[str] | None = None, rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield a file's columns, all of them by default, a batch of rows at a time.

    Raises:
        UnusableParquetError: as `open_parquet`, also where texts are too large.
        OSError, pa.ArrowException: as `open_parquet`.
    """
    with open_parquet(path) as file:
        kinds = {field.name: field.type for field in file.schema_arrow}
    texts = {name: kind for name, given in kinds.items() if (kind := _text(given)) is not None}
    for name in kinds if columns is None else kinds.keys() & columns:
        if name not in texts and re.search("string|binary", str(kinds[name])):
            raise UnusableParquetError(f"{path}: column {name!r} is {kinds[name]}: lists of texts")
    size = 0
    # A text that many rows share is in memory once, until it is known how large they all are.
    with pq.ParquetFile(path, read_dictionary=list(texts)) as file:
        for batch in file.iter_batches(rows, columns=columns):
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            for name in arrays.keys() & texts.keys():
                lengths = pc.binary_length(arrays[name].dictionary).take(arrays[name].indices)
                size += pc.sum(lengths).as_py() or 0
                _refuse_size(path, size)
                arrays[name] = arrays[name].dictionary_decode().cast(texts[name])
            yield pa.RecordBatch.from_pydict(arrays) if arrays else batch


def _sizes(metadata: Any) -> Iterator[int]:
    """Yield the bytes that each column of each group of rows takes in memory, at least."""
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            width = _WIDTHS.get(column.physical_type, _OFFSET)
            if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
                width = metadata.schema.column(number).length
            yield max(column.num_values * width, column.total_uncompressed_size)


def _refuse_size(path: Path, size: int) -> None:
    largest = _BYTES + _TIMES * path.stat().st_size
    if size > largest:
        raise UnusableParquetError(
            f"{path}: it would take more than {largest >> 20:,} MiB of memory, far too much for "
            "so small a file"
        )


def _text(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a column's texts; None if it has others, or lists of them."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("is_string", "is_large_string", "is_binary", "is_large_binary")
    return kind if any(getattr(pa.types, test)(kind) for test in tests) else None
