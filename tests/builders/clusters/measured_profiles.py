"""Profiles of an imagined linear machine, for tests of those who read them."""

import numpy as np

from rescheduler.step_time.profile import (
    BatchTime,
    EngineDescription,
    Profile,
    fit_batch_time,
    fit_gradients,
    fit_quality,
)

ENGINE = EngineDescription(
    model="smollm2",
    revision="1",
    dtype="float32",
    machine="a machine, 2 cores",
    engine_version="0.32.0",
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=1024,
)
TRUE = BatchTime(0.02, 0.001, 2e-6)


def steps_of(batch: BatchTime, noise: float = 0.0) -> np.ndarray:
    """Prefills and decode steps of every size, some of them measured more than once."""
    prefill = [(n, n) for n in (8, 32, 128, 500)]
    decode = [(n, n * context) for n in (1, 2, 4, 8) for context in (50, 200, 900)]
    mixed = [(n + 64, 300 * n + 64) for n in (1, 4, 8)]
    tokens = np.array([*prefill, *decode, *mixed] * 5, dtype=float)
    seconds = np.array([batch.seconds(new, context) for new, context in tokens])
    factor = np.exp(noise * np.random.default_rng(0).standard_normal(len(seconds)))
    return np.column_stack([tokens, seconds * factor])


def profile_of(batch: BatchTime) -> Profile:
    steps = steps_of(batch)
    return Profile(
        engine=ENGINE,
        batch=fit_batch_time(steps),
        gradients=fit_gradients(steps, ENGINE.max_num_seqs),
        quality=fit_quality(steps, batch),
    )
