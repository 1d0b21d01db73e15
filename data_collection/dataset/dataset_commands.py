"""`headway dataset merge` and `headway dataset transcripts`."""

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_collection.dataset.dataset_schema import (
    REQUESTS_SCHEMA,
    DatasetError,
    Session,
    open_shard,
    read_columns,
    read_sessions,
    requests_files,
    rows_files,
    shown,
    write_card,
)
from data_collection.files import create_private_folder, replace_file


def merge(datasets: list[Path], out: Path) -> None:
    """Copy the shards and sessions of several datasets into a new one.

    The result is built in a hidden folder beside ``out`` and renamed when it is whole.

    Args:
        datasets: folders of datasets recorded from the same model, layer, dtype and k.
        out: folder of the new dataset; absent or empty.

    Raises:
        DatasetError: fewer than two datasets are given, one of them is damaged, they do not
            fit together, share a session or a request, or ``out`` is in use.
    """
    if len(datasets) < 2:
        raise DatasetError(f"merging needs at least two datasets, not {len(datasets)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DatasetError(f"{out}: exists and is not an empty folder: choose another one")
    sessions = _sessions(datasets)
    shards = _shards(datasets)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        create_private_folder(temporary)
        (temporary / "data").mkdir()
        for name, source in shards.items():
            with replace_file(temporary / "data" / name) as copy:
                shutil.copyfile(source, copy)
        for session in sessions:
            session.write(temporary)
        write_card(temporary)
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(
        f"merged {len(datasets)} datasets into {out}: {len(shards)} shards of "
        f"{len(sessions)} sessions"
    )


def _sessions(datasets: list[Path]) -> list[Session]:
    """Return the sessions of all datasets, which fit together and are in one dataset only."""
    found: dict[str, tuple[Path, Session]] = {}
    for dataset in datasets:
        for session in read_sessions(dataset):
            if session.name in found:
                raise DatasetError(
                    f"{found[session.name][0]} and {dataset} both hold session {session.name}: "
                    "the same rows would be there twice"
                )
            for other_dataset, other in found.values():
                try:
                    session.refuse_mixing(other)
                except DatasetError as error:
                    raise DatasetError(
                        f"cannot merge {dataset} with {other_dataset}: {error}"
                    ) from error
            found[session.name] = (dataset, session)
    return [session for _, session in found.values()]


def _shards(datasets: list[Path]) -> dict[str, Path]:
    """Return every shard by its name in the merged dataset; all are whole, no request twice."""
    shards: dict[str, Path] = {}
    owner: dict[str, Path] = {}
    for dataset in datasets:
        # Rows are listed first: a recorder that runs meanwhile renames its rows last.
        for file in (*rows_files(dataset), *requests_files(dataset)):
            if file.name in shards:
                raise DatasetError(
                    f"{shards[file.name].parent.parent} and {dataset} both hold {file.name}"
                )
            if file.name.startswith("requests-"):
                for name in read_columns([file], ["request_id"])["request_id"].to_pylist():
                    if name in owner:
                        raise DatasetError(
                            f"{owner[name]} and {dataset} both hold request {shown(name)}"
                        )
                    owner[name] = dataset
            else:
                with open_shard(file):
                    pass  # it is whole, or refused
            shards[file.name] = file
    return shards


_TOKENS = ("prompt_token_ids", "output_token_ids")
_SHARED = (*_TOKENS, "finish_reason", "max_tokens", "temperature", "top_p", "source", "task")
TRANSCRIPTS_SCHEMA = pa.schema(
    [("id", pa.string()), *(REQUESTS_SCHEMA.field(name) for name in ("sample_index", *_SHARED))]
)


def export_transcripts(dataset: Path, out: Path) -> None:
    """Write the token ids of a dataset's requests into one Parquet file.

    The file takes a few bytes a token, where the rows take some kilobytes each.
    ``headway collect --transcripts`` makes the rows of it again. It leaves out requests whose
    tokens were not kept: requests that a stop of the server cut, and private requests. It also
    leaves out requests of LoRA adapters: the base model would not make their rows again.

    Args:
        dataset: folder of a dataset.
        out: the file, which is replaced when it exists.

    Raises:
        DatasetError: the dataset is damaged or holds no token ids.
    """
    if out.suffix != ".parquet":
        raise DatasetError(f"{out}: transcripts are written as Parquet; name the file *.parquet")
    session = read_sessions(dataset)[-1]
    answers: Counter[str] = Counter()
    transcripts: list[dict[str, Any]] = []
    n_without = n_adapters = 0
    for file in requests_files(dataset):
        table = read_columns([file], ["external_id", "prompt_index", "adapter", *_SHARED])
        token_ids = {name: _token_ids(table[name]) for name in _TOKENS}
        for i, request in enumerate(table.drop_columns(list(_TOKENS)).to_pylist()):
            request |= {name: ids[i] for name, ids in token_ids.items()}
            if any(request[name] is None or not len(request[name]) for name in _TOKENS):
                n_without += 1
            elif request["adapter"]:
                n_adapters += 1
            else:
                name = request["external_id"]
                if name.startswith("cmpl-"):
                    name += f"-{request['prompt_index']}"
                entry = {column: request[column] for column in _SHARED}
                transcripts.append({"id": name, "sample_index": answers[name]} | entry)
                answers[name] += 1
    if not transcripts and n_adapters:
        raise DatasetError(f"{dataset}: all of its requests are of LoRA adapters")
    if not transcripts:
        raise DatasetError(
            f"{dataset}: none of {n_without} requests has token ids: recorded with tokens: false, "
            "or cut by a stop of the server"
        )
    described = {"headway.model": session.model, "headway.revision": session.revision}
    table = pa.Table.from_pylist(transcripts, TRANSCRIPTS_SCHEMA.with_metadata(described))
    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(out) as file:
        pq.write_table(table, file, compression="zstd", compression_level=19)
    print(f"{out}: {len(transcripts):,} answers to {len(answers):,} prompts")
    if n_without:
        print(f"left out: {n_without} requests without token ids")
    if n_adapters:
        print(f"left out: {n_adapters} requests of LoRA adapters")


def _token_ids(column: pa.ChunkedArray) -> list[npt.NDArray[np.int32] | None]:
    """Return each request's token ids, in a tenth of the memory that Python's numbers take.

    Raises:
        DatasetError: one of them is null.
    """
    if any(one.is_valid and one.values.null_count for one in column):
        raise DatasetError("token ids of a request contain a null; was the file changed?")
    return [one.values.to_numpy() if one.is_valid else None for one in column]
