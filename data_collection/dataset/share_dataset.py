"""`headway dataset push` and `headway dataset pull`: datasets on the Hugging Face Hub."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_collection.dataset.dataset_schema import (
    DatasetError,
    dataset_card,
    open_shard,
    read_sessions,
    requests_files,
    rows_files,
    shard_batches,
    shown,
)
from data_collection.dataset.validate_dataset import validate
from data_collection.files import write_text_atomically
from data_collection.hub import (
    Shared,
    pull_folder,
    refuse_license,
    refuse_repository,
    share,
)

_TEXTS = ("prompt_token_ids", "output_token_ids")
DATASET = Shared(
    kind="dataset",
    title="dataset",
    files=re.compile(r"README\.md|sessions/[\w.-]+\.json|data/(rows|requests)-[\w.-]+\.parquet"),
    needed={
        "sessions/*.json": re.compile(r"sessions/.*\.json"),
        "data/requests-*.parquet": re.compile(r"data/requests-.*\.parquet"),
    },
)


def push(
    dataset: Path,
    repository: str,
    private: bool = True,
    with_prompts: bool = False,
    license: str | None = None,
    dry_run: bool = False,
) -> None:
    """Share a dataset on the Hugging Face Hub, after it was checked.

    A dataset holds what users wrote. The command prints what leaves this machine, then sends it.
    Look at it first with ``--dry-run``. Set ``HF_TOKEN`` to a token that may write.

    Token ids of prompts and answers stay here unless you give ``--with-prompts``. A predictor that
    reads ``repetition`` or prompts needs them. Text can be recovered from hidden states, too.

    The files replace those that the repository holds. ``--verbose`` shows the progress.

    Args:
        dataset: Folder of the dataset.
        repository: Where to, OWNER/NAME. The repository is made if there is none.
        private: Whether only you and whom you let in can read it. Use ``false`` to publish it.
        with_prompts: Send token ids of prompts and answers, too.
        license: Identifier of the licence, such as cc-by-4.0.
        dry_run: Print what would leave this machine, and send nothing.

    Raises:
        DatasetError: the folder is not a dataset, or it is damaged.
        HubError: there is no token, or the Hub refuses; says why.
    """
    refuse_repository(repository)
    refuse_license(license)
    validate(dataset)
    files = {f"data/{file.name}": file for file in (*rows_files(dataset), *requests_files(dataset))}
    for session in sorted((dataset / "sessions").glob("*.json")):
        files[f"sessions/{session.name}"] = session
    with TemporaryDirectory(prefix="headway-") as temporary:
        written = Path(temporary)
        n_requests = n_texts = 0
        for file in requests_files(dataset):
            in_file, with_text = _count_requests(file)
            n_requests, n_texts = n_requests + in_file, n_texts + with_text
            if with_text and not with_prompts:
                files[f"data/{file.name}"] = written / file.name
                _leave_out_texts(file, written / file.name)
        files["README.md"] = written / "README.md"
        card = dataset_card(dataset, license, texts=with_prompts and n_texts > 0)
        write_text_atomically(files["README.md"], card)
        n_rows = sum(_n_rows(file) for file in rows_files(dataset))
        contents = [
            f"{n_requests:,} requests: the ids that clients gave, lengths, tasks and sampling",
            f"{n_rows:,} hidden states of {shown(read_sessions(dataset)[-1].model)}; text can be "
            "recovered from them",
            _said_of_texts(n_texts, with_prompts),
            f"licence {license}" if license else "no licence; --license names one",
        ]
        share(files, repository, DATASET, private, contents, dry_run)


def pull(repository: str, out: Path) -> None:
    """Fetch a dataset from the Hugging Face Hub, and check it.

    An interrupted pull goes on when the same command is given again. Nothing of the repository is
    run. For a private one, set ``HF_TOKEN`` to a token that may read it.

    Args:
        repository: Where from, OWNER/NAME.
        out: Folder of the dataset; absent or empty.

    Raises:
        HubError: there is no such repository, it holds no dataset or a damaged one, ``out`` is in
            use, or the Hub does not answer.
    """
    pull_folder(repository, out, DATASET, validate)


def _said_of_texts(n_texts: int, with_prompts: bool) -> str:
    if n_texts == 0:
        return "no prompts and answers: none were recorded"
    if with_prompts:
        return f"the prompts and answers of {n_texts:,} requests, as token ids"
    return f"no prompts and answers; --with-prompts sends those of {n_texts:,} requests"


def _count_requests(file: Path) -> tuple[int, int]:
    """Return how many requests a shard has, and how many of them with token ids."""
    n_requests = n_texts = 0
    with open_shard(file) as shard:
        kept = [name for name in _TEXTS if name in shard.schema_arrow.names]
    if len(kept) < len(_TEXTS):
        raise DatasetError(f"{file}: no columns {' and '.join(_TEXTS)}")
    for batch in shard_batches(file, kept):
        known = pc.or_(*(pc.is_valid(batch[name]) for name in _TEXTS))
        n_requests, n_texts = n_requests + len(batch), n_texts + (pc.sum(known).as_py() or 0)
    return n_requests, n_texts


def _n_rows(file: Path) -> int:
    with open_shard(file) as shard:
        return int(shard.metadata.num_rows)


def _leave_out_texts(file: Path, out: Path) -> None:
    """Copy a shard of requests; where the token ids were, the copy has no values."""
    with open_shard(file) as shard:
        schema = shard.schema_arrow
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for batch in shard_batches(file):
            arrays = [
                pa.nulls(len(batch), column.type) if column.name in _TEXTS else batch[column.name]
                for column in schema
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
