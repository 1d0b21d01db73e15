"""Wait for what a recorder writes."""

import time
from pathlib import Path

import pyarrow.parquet as pq

from data_collection.dataset.dataset_schema import requests_files

__all__ = ["wait_until_recorded"]


def wait_until_recorded(dataset: Path, count: int) -> None:
    """Wait until the ends of so many requests are in a dataset."""
    deadline = time.monotonic() + 300
    while (n := sum(pq.read_metadata(file).num_rows for file in requests_files(dataset))) < count:
        assert time.monotonic() < deadline, f"only {n} of {count} requests were ever recorded"
        time.sleep(0.2)
