"""Forecasts that engines published, beside those of the rows that were recorded."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from predictor.live.telemetry_messages import Forecasts, Message, Snapshot, decode_survival
from predictor.models.checkpoint import load_predictor
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import request_rows

__all__ = ["CHECKPOINT", "assert_forecasts_equal"]

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "smollm2-135m-instruct"


def published(messages: Sequence[Message]) -> dict[tuple[str, int], tuple[int, np.ndarray]]:
    """(request id, n when it was forecast) -> tokens left and curve."""
    found = {}
    for message in messages:
        if isinstance(message, Snapshot | Forecasts):
            coded = [request.survival for request in message.requests]
            curves = decode_survival(coded, len(message.edges))
            for request, curve in zip(message.requests, curves, strict=True):
                found[request.request_id, request.forecast_at] = (request.tokens_left, curve)
    return found


def assert_forecasts_equal(messages: Sequence[Message], rows: RowTable) -> None:
    """Assert that nearly all rows were forecast, as an offline pass over their vectors does.

    Within 1e-4 in probability: the wire rounds to 1/65,535, the batches differ.
    """
    offline = load_predictor(str(CHECKPOINT)).forecast(request_rows(rows))
    curves, compared, first = published(messages), 0, set()
    for i in range(len(rows)):
        name = rows.requests.request_id[rows.request[i]]
        n = int(rows.generated_tokens[i])
        if (name, n) in curves:
            left, curve = curves[name, n]
            np.testing.assert_allclose(curve, offline.survival[i], atol=1e-4)
            assert left == rows.tokens_left()[i]
            compared += 1
            first |= {name} if n == 0 else set()
    assert compared >= 0.9 * len(rows) > 0
    assert len(first) == len(rows.requests), "forecast at the end of its prefill"
