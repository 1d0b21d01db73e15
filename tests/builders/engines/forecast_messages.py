"""Forecasts that engines published, beside those of the rows that were recorded."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data_collection.models import identify
from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.kaplan_meier import survival_edges
from predictor.live.telemetry_messages import Forecasts, Message, Snapshot, decode_survival
from predictor.models.checkpoint import export_checkpoint, load_predictor
from predictor.models.hidden_state_mlp import INPUTS
from predictor.models.survival_mlp import SurvivalMLP
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import request_rows

_WIDTHS = ("word_embed_proj_dim", "hidden_size", "n_embd")
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


def write_all_reading(
    folder: Path, model: Path | None = None, layer: str = "last", state_half_life: float = 0.0
) -> Path:
    """Write an untrained predictor that reads every input; return it.

    For SmolLM2, or for a model in a folder.
    """
    shipped = load_predictor(str(CHECKPOINT))
    name, revision, width = shipped.serving_model, shipped.model_revision, shipped.hidden_size
    if model is not None:
        found, config = identify(str(model)), json.loads((model / "config.json").read_text())
        name, revision = found.name, found.revision or ""
        width = next(config[key] for key in _WIDTHS if key in config)
    torch.manual_seed(0)
    predictor = SurvivalMLP(
        edges=survival_edges(512).tolist(),
        model=name,
        model_revision=revision,
        hidden_size=width,
        k=1,
        widths=[32],
        inputs=INPUTS,
        layer=layer,
        state_half_life=state_half_life,
    )
    export_checkpoint(predictor, folder, {})
    return folder


def assert_forecasts_equal(
    messages: Sequence[Message],
    rows: RowTable,
    checkpoint: Path,
    repeats: bool = True,
    least: float = 0.9,
) -> None:
    """Assert that rows were forecast, ``least`` of them, as an offline pass over the dataset does.

    Within 1e-4 in probability: the wire rounds to 1/65,535, the batches differ. What ended before
    it could be published is not: on a busy machine that is much of what a tiny model answers.
    """
    repeated = rows.numbers()[:, INPUTS.index("repetition")]
    assert np.unique(repeated).size > 1 or not repeats, (
        "no answer repeats itself: its use is not tested"
    )
    offline = load_predictor(str(checkpoint)).forecast(request_rows(rows))
    assert isinstance(offline, SurvivalForecast)
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
    assert compared >= least * len(rows) > 0
    assert len(first) == len(rows.requests), "forecast at the end of its prefill"
