"""Forecasts that engines published during a run, as a recording that simulations replay."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rescheduler.simulator.workloads.forecast_recording import ForecastRecording, write_recording
from rescheduler.telemetry.forecast_batch import SURVIVAL_SCALE, ForecastBatch

__all__ = ["write_forecasts"]


def write_forecasts(
    out: Path, batches: Sequence[ForecastBatch], requests: Sequence[dict[str, Any]], interval: int
) -> None:
    """Write the requests of a run in their order, each with a curve every so many tokens.

    Engines forecast every so many of their own steps, so that a request's forecasts come at any
    token: the curve of token jk is the one made closest to it, earlier ones first. A request that
    ended before its first forecast has what the proxy expects then, exp(-h / mean length).

    Args:
        out: file to write.
        batches: as they were published.
        requests: of the run, that ended.
        interval: k.
    """
    found: dict[str, list[tuple[int, int, np.ndarray]]] = {}
    for batch in batches:
        for i, name in enumerate(batch.names):
            row = (int(batch.context[i]), int(batch.tokens_left[i]), batch.survival[i])
            found.setdefault(name.partition("-")[2], []).append(row)
    edges = np.array(batches[0].edges, dtype=np.float64)
    output = np.array([request["tokens"] for request in requests], dtype=np.int64)
    expected = SURVIVAL_SCALE * np.exp(-edges / output.mean())
    curves: list[np.ndarray] = []
    rows_of: list[int] = []
    for request in requests:
        rows = found.get(request["name"], [(request["prompt"], 0, expected)])
        made = np.array([context - request["prompt"] for context, _, _ in rows])
        wanted = np.arange(0, request["tokens"], interval)
        nearest = [int(np.abs(made - at).argmin()) for at in wanted]
        curves += [rows[i][2] for i in nearest]
        rows_of.append(len(wanted))
    n_rows = np.array(rows_of, dtype=np.int64)
    recording = ForecastRecording(
        model="smollm2",
        predictor="live",
        part="live",
        interval=interval,
        edges=edges,
        prompt=np.array([request["prompt"] for request in requests], dtype=np.int64),
        output=output,
        max_tokens=np.array([request["max_tokens"] for request in requests], dtype=np.int64),
        cut=np.array([request["finish_reason"] == "length" for request in requests]),
        curves=np.asarray(np.array(curves) / SURVIVAL_SCALE, dtype=np.float32),
        first_row=np.cumsum(n_rows) - n_rows,
        n_rows=n_rows,
    )
    write_recording(recording, out)
