"""`headway dataset merge`: several datasets of one model as one."""

import os
import shutil
from pathlib import Path

from data_collection.atomic_file import create_private_folder, replace_file
from data_collection.dataset.dataset_card import write_card
from data_collection.dataset.dataset_schema import (
    DatasetError,
    Session,
    open_shard,
    read_columns,
    read_sessions,
    requests_files,
    rows_files,
    shown,
)

__all__ = ["merge"]


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
