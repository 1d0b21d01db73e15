"""Peak memory of recording and of training at the size of STAR's dataset (§4.4).

    python -m benchmarks.large_dataset_memory [--quick] --json OUT

100,000 rows of d = 3,584 go through the real recorder, then one epoch of training reads them
back. The vectors are random numbers: only their size matters here. Each part runs in a
process of its own, whose largest resident set is reported beside that of the same process
when it had loaded its libraries and nothing else. Pages of the memory-mapped dataset count
as resident while the system has memory to spare.
"""

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.report import arguments, report
from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.capture_hook import CapturedRows
from data_collection.capture.recorder import Recorder
from data_collection.capture.requests import FinishedRequest
from data_collection.dataset.dataset_schema import Session
from predictor.training.train_command import train

HIDDEN_SIZE = 3584
ROWS_PER_REQUEST = 50
K = 20


def main() -> None:
    """Record, train, and print both peaks."""
    options = arguments("memory at 100,000 rows of d = 3,584").parse_args()
    rows = 5_000 if options.quick else 100_000
    figures: dict[str, float] = {"rows": rows, "vectors_mib": rows * HIDDEN_SIZE * 2 / 2**20}
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("record", record), ("train", train_one_epoch)):
            base, peak, seconds = measured(part, Path(folder), rows)
            figures[f"{name}_base_mib"] = base
            figures[f"{name}_peak_mib"] = peak
            figures[f"{name}_seconds"] = seconds
    report("large_dataset_memory", figures, options.json)


def measured(
    part: Callable[[Path, int], None], folder: Path, rows: int
) -> tuple[float, float, float]:
    """Run a part in a fresh process; return its resident MiB before and at most, and seconds."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_run, args=(part, folder, rows, sender))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{part.__name__} ended with exit code {process.exitcode}")
    found: tuple[float, float, float] = receiver.recv()
    return found


def _run(part: Callable[[Path, int], None], folder: Path, rows: int, sender: Any) -> None:
    base, started = peak_mib(), time.monotonic()
    part(folder, rows)
    sender.send((base, peak_mib(), time.monotonic() - started))


def peak_mib() -> float:
    """Return the largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def record(folder: Path, rows: int) -> None:
    """Send requests of 50 rows each through the recorder, 8 at a time."""
    session = Session(
        name="benchmark",
        model="benchmark",
        revision="0",
        hidden_size=HIDDEN_SIZE,
        dtype="float16",
        k=K,
        engine="none",
        runner="none",
        headway="benchmark",
        model_dtype="float32",
        started="2026-01-01T00:00:00+00:00",
    )
    recorder = Recorder(RecordConfig(path=str(folder / "dataset")), session)
    generator = np.random.default_rng(0)
    total = ROWS_PER_REQUEST * K
    for batch in range(rows // (8 * ROWS_PER_REQUEST)):
        names = [f"prompt-{batch}-{i}-{0:08x}" for i in range(8)]
        for n in range(0, total, K):
            vectors = generator.standard_normal((8, HIDDEN_SIZE), dtype=np.float32)
            hidden = torch.from_numpy(vectors)
            recorder.on_rows(
                CapturedRows(n, names, [9] * 8, [n] * 8, [2000] * 8, [1.0] * 8, hidden)
            )
        recorder.on_finished(
            [FinishedRequest(name, "stop", 9, total, 4096, [], [], {}) for name in names]
        )
        while recorder.status()["rows"] < (batch + 1) * 8 * ROWS_PER_REQUEST:
            time.sleep(0.001)  # a serving engine is slower than this loop
    recorder.close()


def train_one_epoch(folder: Path, rows: int) -> None:
    """Train the paper's MLP for one epoch."""
    options = ["fit", "--model", "RemainingLengthTraining", "--out", str(folder / "star")]
    options += ["--data.dataset", str(folder / "dataset"), "--data.batch_size", "128"]
    options += ["--trainer.max_epochs", "1"]
    train([*options, "--trainer.enable_progress_bar", "false"])


if __name__ == "__main__":
    main()
