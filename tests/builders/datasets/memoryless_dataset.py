"""A dataset whose true remaining lengths are known, for requests that were cut and were not."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from recorded_dataset import D, ended, new_session, step_rows

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder

FloatArray = npt.NDArray[np.float64]

K = 5
LONGEST_CAP = 70


def end_probability(x: npt.ArrayLike) -> FloatArray:
    """Return the chance to end with the next token, whatever the age: e^-(3 + x)."""
    return np.asarray(np.exp(-(3.0 + np.asarray(x, dtype=np.float64))))


def true_median(x: npt.ArrayLike) -> FloatArray:
    """Return h with P(R > h) = (1 - p)^h = 1/2, in tokens."""
    return np.asarray(np.log(0.5) / np.log1p(-end_probability(x)))


def hidden_states(x: FloatArray, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return vectors [n, d] that carry x in their first value and nothing in the others."""
    vectors = rng.standard_normal((len(x), D)).astype(np.float32)
    vectors[:, 0] = x
    return vectors


def record_memoryless(dataset: Path, n_requests: int = 700) -> None:
    """Record requests that end without memory, about half of them cut at random.

    Each has its own x in [-1, 1] and so its own mean length, 7 to 54 tokens, and its own
    ``max_tokens`` in 10..70; a tenth are left by their clients before.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, n_requests)
    length = rng.geometric(end_probability(x))
    cap = rng.integers(10, LONGEST_CAP + 1, n_requests)
    left = np.where(rng.random(n_requests) < 0.1, rng.integers(1, 30, n_requests), 10**9)
    total = np.minimum(np.minimum(length, cap), left)
    reason = np.where(total == length, "stop", np.where(total == cap, "length", "abort"))
    session = new_session(k=K)
    config = RecordConfig(path=str(dataset), shard_rows=2000, dtype=session.dtype)
    recorder = Recorder(config, session)
    names = [f"prompt-{i}-{i:08x}" for i in range(n_requests)]
    for n in range(0, LONGEST_CAP, K):
        running = np.flatnonzero(total > n)
        rows = step_rows(
            n, dict.fromkeys((names[i] for i in running), n), hidden_states(x[running], rng)
        )
        recorder.on_rows(replace(rows, max_tokens=cap[running].tolist()))
    for i, name in enumerate(names):
        end = ended(name, int(total[i]), str(reason[i]))
        recorder.on_finished([msgspec.structs.replace(end, max_tokens=int(cap[i]))])
    recorder.close()
