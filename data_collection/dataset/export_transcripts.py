"""`headway dataset transcripts`: keep a dataset as its prompts and answers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_collection.atomic_file import replace_file
from data_collection.dataset.dataset_schema import DatasetError, read_sessions, requests_files
from data_collection.dataset.validate_dataset import open_shard

__all__ = ["TRANSCRIPTS_SCHEMA", "export_transcripts"]

TRANSCRIPTS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("output_token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("max_tokens", pa.int32()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("source", pa.string()),
        ("task", pa.string()),
    ]
)

_SHARED = TRANSCRIPTS_SCHEMA.names[2:]
_WHOLE = ("stop", "length", "repetition")


def export_transcripts(dataset: Path, out: Path) -> None:
    """Write the token ids of a dataset's requests into one Parquet file.

    The file takes a few bytes a token, where the rows take some kilobytes each;
    ``headway collect --transcripts`` makes the rows of it again. Requests that a client or a
    stop of the server cut short are left out: how they would have ended is not known.

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
    n_cut = n_private = 0
    for file in requests_files(dataset):
        with open_shard(file) as shard:
            requests = shard.read().to_pylist()
        for request in requests:
            if request["finish_reason"] not in _WHOLE:
                n_cut += 1
            elif not request["prompt_token_ids"] or not request["output_token_ids"]:
                n_private += 1
            else:
                name = request["external_id"]
                if name.startswith("cmpl-"):
                    name += f"-{request['prompt_index']}"
                entry = {column: request.get(column) for column in _SHARED}
                transcripts.append({"id": name, "sample_index": answers[name]} | entry)
                answers[name] += 1
    if not transcripts:
        raise DatasetError(
            f"{dataset}: no request with token ids to its end "
            f"({n_cut} were cut short, {n_private} were recorded with tokens: false)"
        )
    described = {"headway.model": session.model, "headway.revision": session.revision}
    table = pa.Table.from_pylist(transcripts, TRANSCRIPTS_SCHEMA.with_metadata(described))
    with replace_file(out) as file:
        pq.write_table(table, file, compression="zstd", compression_level=19)
    print(f"{out}: {len(transcripts):,} answers to {len(answers):,} prompts")
    if n_cut or n_private:
        print(f"left out: {n_cut} requests that were cut short, {n_private} without token ids")
