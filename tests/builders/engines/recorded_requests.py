"""Wait for what a recorder writes."""

import time
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_collection.dataset.dataset_schema import requests_files, rows_files


def wait_until_recorded(dataset: Path, count: int) -> None:
    """Wait until the ends of so many requests, and all their rows, are in a dataset.

    A recorder writes the ends first; a server that is stopped in between loses the rows.
    """
    deadline = time.monotonic() + 300
    while True:
        ends = [pq.read_table(file, columns=["rows"]) for file in requests_files(dataset)]
        requests = sum(len(table) for table in ends)
        expected = sum(pc.sum(table["rows"]).as_py() or 0 for table in ends)
        rows = sum(pq.read_metadata(file).num_rows for file in rows_files(dataset))
        if requests >= count and rows >= expected:
            return
        assert time.monotonic() < deadline, (
            f"only {requests} of {count} requests and {rows} of their {expected} rows were recorded"
        )
        time.sleep(0.2)
