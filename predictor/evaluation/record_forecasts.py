"""What a predictor forecasts of a dataset's requests, recorded for simulations."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import Forecast, SurvivalForecast
from predictor.forecasts.forecast_recording import ForecastRecording, in_steps, write_recording
from predictor.forecasts.kaplan_meier import survival_edges
from predictor.models.hidden_state_mlp import PROMPT_LAYER, HiddenStateMLP
from predictor.models.survival_mlp import SurvivalMLP
from predictor.prompts.prompt_predictor import PromptPredictor
from predictor.training.row_table import RowTable
from predictor.training.rows_data_module import request_rows

IntArray = npt.NDArray[np.int64]

_ROWS_AT_ONCE = 8192
_GRID_FLOOR = 40
"""Tokens that the grid of a regressor's steps spans at least."""


class LeftOut(NamedTuple):
    """Requests that were not recorded.

    Attributes:
        unfinished: neither ended by themselves nor at their ``max_tokens``.
        incomplete: lack the row at some multiple of k tokens, or have others.
    """

    unfinished: int
    incomplete: int


def record_forecasts(
    predictor: HiddenStateMLP,
    table: RowTable,
    requests: IntArray,
    out: Path,
    part: str,
    prompts: PromptPredictor | None = None,
) -> tuple[ForecastRecording, LeftOut]:
    """Write what a predictor forecasts of requests of a dataset, every k tokens.

    A regressor's number is recorded as a step within one bin of the grid of `survival_edges`.

    Args:
        predictor: of the dataset's model.
        table: the dataset.
        requests: which of its requests.
        out: Parquet file to write.
        part: what the recording calls them.
        prompts: predictor whose forecasts of their prompts are recorded too.

    Returns:
        What was written, and how many requests were left out.

    Raises:
        ModelMismatchError: the predictor of prompts is of another model; both are named.
        ValueError: no request can be recorded.
    """
    if prompts is not None:
        width = prompts.model.hidden_size
        session = replace(table.session, layer=PROMPT_LAYER, state_half_life=0.0, hidden_size=width)
        prompts.model.refuse_other_model(session)
    whole, left_out = _whole_requests(table, requests)
    if len(whole) == 0:
        raise ValueError(
            f"no {part} request can be recorded: {left_out.unfinished} did not run to their end, "
            f"{left_out.incomplete} lack a row at every {table.session.k} tokens"
        )
    rows = table.select(np.flatnonzero(np.isin(table.request, whole)))
    rows = rows.select(np.lexsort((rows.generated_tokens, rows.request)))
    first_row = np.flatnonzero(rows.generated_tokens == 0)
    max_tokens = rows.max_tokens[first_row]
    edges, curves = _curves(predictor, rows)
    of_prompts = None if prompts is None else _prompt_curves(prompts, table, whole, edges)
    recording = ForecastRecording(
        model=predictor.serving_model,
        predictor=_fingerprint(predictor),
        part=part,
        interval=table.session.k,
        edges=edges,
        prompt=rows.prompt_tokens[first_row],
        output=table.requests.total_tokens[whole],
        # Where it is unknown (0), nothing but the curve's own end cuts a request.
        max_tokens=np.where(max_tokens > 0, max_tokens, int(edges[-1])),
        cut=np.array(table.requests.finish_reason)[whole] == "length",
        curves=curves,
        first_row=first_row,
        n_rows=np.diff(np.append(first_row, len(rows))),
        prompt_curves=of_prompts,
        prompt_predictor="" if prompts is None else prompts.model.fingerprint(),
    )
    write_recording(recording, out)
    return recording, left_out


def _whole_requests(table: RowTable, chosen: IntArray) -> tuple[IntArray, LeftOut]:
    """Return which of the chosen requests ran to their end with a row at n = 0, k, 2k ... ."""
    k, total = table.session.k, table.requests.total_tokens
    on_grid = (table.generated_tokens % k == 0) & (table.generated_tokens < total[table.request])
    places = np.stack([table.request, table.generated_tokens // k], axis=1)[on_grid]
    # There are ceil(total / k) multiples of k below the total: so many different ones are all.
    different = np.bincount(np.unique(places, axis=0)[:, 0], minlength=len(total))
    n_rows = np.bincount(table.request, minlength=len(total))
    complete = (different == -(-total // k)) & (n_rows == different) & (total > 0)
    ended = np.isin(table.requests.finish_reason, ("stop", "length"))
    left_out = LeftOut(
        unfinished=int((~ended)[chosen].sum()), incomplete=int((ended & ~complete)[chosen].sum())
    )
    return chosen[(ended & complete)[chosen]], left_out


def _curves(
    predictor: HiddenStateMLP, rows: RowTable
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    """Return the grid [E] and the curves as they would be without ``max_tokens`` [rows, E]."""
    if isinstance(predictor, SurvivalMLP):
        edges = predictor.edges.cpu().numpy().astype(np.float64)
    else:
        longest = max(int(rows.tokens_left().max()), _GRID_FLOOR)
        edges = survival_edges(longest).astype(np.float64)
    curves = np.empty((len(rows), len(edges)), dtype=np.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = np.arange(start, min(start + _ROWS_AT_ONCE, len(rows)))
        forecast: Forecast = predictor.forecast(request_rows(rows.select(some))).uncapped()
        if not isinstance(forecast, SurvivalForecast):
            forecast = forecast.on_grid(edges)
        curves[some] = in_steps(forecast.survival)
    return edges, curves


def _prompt_curves(
    prompts: PromptPredictor,
    table: RowTable,
    requests: IntArray,
    edges: npt.NDArray[np.float64],
) -> npt.NDArray[np.float32]:
    """Return the curves of requests' prompts on a grid [n, E], as without ``max_tokens``."""
    ids = [table.requests.prompt_token_ids[i] for i in requests]
    unknown = sum(one is None for one in ids)
    if unknown:
        raise ValueError(f"the tokens of {unknown} prompts were not recorded (tokens: false)")
    known = [one for one in ids if one is not None]
    no_cap = np.full(len(known), np.inf)
    forecast = prompts.forecast(known, table.requests.temperature[requests], no_cap)
    return in_steps(forecast.on_grid(edges).survival)


def _fingerprint(predictor: HiddenStateMLP) -> str:
    if isinstance(predictor, SurvivalMLP):
        return predictor.fingerprint()
    digest = hashlib.sha256()
    for name, values in sorted(predictor.state_dict().items()):
        digest.update(name.encode() + values.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]
