"""Recordings of a predictor's forecasts: the file, and how large their error is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_collection.files import find_shipped, replace_file
from data_collection.parquet_file import UnusableParquetError, open_parquet
from predictor.forecasts.forecast import SurvivalForecast

IntArray = npt.NDArray[np.int64]

_KEY = b"headway"
_VERSION = 1
_STEPS = 65_535

MEASURED_SIGMA = 1.25
"""`error_sigma` of recordings/smollm2-135m-instruct.parquet."""

MEASURED_INTERVAL = 20
"""Tokens between two of the forecasts in it."""


@dataclass(frozen=True)
class ForecastRecording:
    """Requests that a model answered, and what a predictor forecast of them as they ran.

    Attributes:
        model: name of the serving model.
        predictor: fingerprint of the predictor.
        part: of the dataset, by the split of the predictor's training.
        interval: k, tokens between two forecasts of a request.
        edges: [E] tokens of the curves' grid, ascending from 0.
        prompt: [n] prompt tokens.
        output: [n] tokens generated.
        max_tokens: [n] output tokens at which the request was to be cut.
        cut: [n] whether it was.
        curves: [rows, E] P(remaining > edge) if ``max_tokens`` did not cut it; 1 at 0, never
            rising. The rows of a request follow one another, at 0, k, 2k ... generated tokens.
        first_row: [n] where the rows of each request begin.
        n_rows: [n] how many there are: as often as k goes into its output, rounded up.
        prompt_curves: [n, E] what was forecast from the prompts alone; None if nothing was.
        prompt_predictor: fingerprint of what forecast that.
    """

    model: str
    predictor: str
    part: str
    interval: int
    edges: npt.NDArray[np.float64]
    prompt: IntArray
    output: IntArray
    max_tokens: IntArray
    cut: npt.NDArray[np.bool_]
    curves: npt.NDArray[np.float32]
    first_row: IntArray
    n_rows: IntArray
    prompt_curves: npt.NDArray[np.float32] | None = None
    prompt_predictor: str = ""

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together."""
        lengths = np.stack([self.prompt, self.output, self.max_tokens])
        if len(self) == 0 or self.interval < 1 or lengths.min() < 1:
            raise ValueError("there must be requests, with at least one token each")
        if (self.n_rows != -(-self.output // self.interval)).any():
            raise ValueError(f"not one curve for every {self.interval} tokens of every request")
        if (self.first_row != np.cumsum(self.n_rows) - self.n_rows).any():
            raise ValueError("the curves of the requests do not follow one another")
        if self.n_rows.sum() != len(self.curves):
            raise ValueError(f"{len(self.curves)} curves, {self.n_rows.sum()} were expected")
        SurvivalForecast.new(self.edges, self.curves)
        if self.prompt_curves is not None:
            if len(self.prompt_curves) != len(self):
                raise ValueError(f"{len(self.prompt_curves)} forecasts of {len(self)} prompts")
            SurvivalForecast.new(self.edges, self.prompt_curves)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.output)


def error_sigma(recording: ForecastRecording) -> float:
    r"""Return the standard deviation of :math:`\log(\hat r / r)` of the median remaining length.

    Requests that were cut at their max_tokens count for nothing: how long they would have been
    is not known.

    Raises:
        ValueError: fewer than two forecasts of requests that ended on their own.
    """
    owner = np.repeat(np.arange(len(recording)), recording.n_rows)
    age = recording.interval * (np.arange(len(owner)) - recording.first_row[owner])
    limit = recording.max_tokens[owner] - age
    forecast = SurvivalForecast.new(recording.edges, recording.curves, limit)
    median = np.maximum(forecast.median(), 1.0)
    error = np.log(median / (recording.output[owner] - age))[~recording.cut[owner]]
    if len(error) < 2:
        raise ValueError("the recording has too few forecasts of requests that ended on their own")
    return float(error.std(ddof=1))


def in_steps(survival: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return probabilities rounded to 1/65535, as a recording keeps them.

    Rounding cannot make a curve rise, and leaves its 1 at 0 as it is.
    """
    steps = np.rint(np.asarray(survival, dtype=np.float64) * _STEPS)
    return np.asarray(steps / _STEPS, dtype=np.float32)


def write_recording(recording: ForecastRecording, out: Path) -> None:
    """Write a recording as one Parquet file, whole or not at all; its curves by `in_steps`.

    One row a request: ``prompt_tokens, output_tokens, max_tokens, cut``, and ``survival``, a list
    of forecasts, each a list of 65535·P(remaining > edge); ``prompt_survival`` is one of them.
    Everything else is in the metadata.
    """
    offsets = np.append(recording.first_row, len(recording.curves)).astype(np.int32)
    curves = _as_steps(recording.curves)
    columns = {
        "prompt_tokens": pa.array(recording.prompt, pa.int32()),
        "output_tokens": pa.array(recording.output, pa.int32()),
        "max_tokens": pa.array(recording.max_tokens, pa.int32()),
        "cut": pa.array(recording.cut),
        "survival": pa.ListArray.from_arrays(offsets, curves),
    }
    described: dict[str, Any] = {
        "version": _VERSION,
        "model": recording.model,
        "predictor": recording.predictor,
        "part": recording.part,
        "interval": recording.interval,
        "edges": recording.edges.astype(int).tolist(),
    }
    if recording.prompt_curves is not None:
        columns["prompt_survival"] = _as_steps(recording.prompt_curves)
        described["prompt_predictor"] = recording.prompt_predictor
    table = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(described)})
    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(out) as temporary:
        # Hardly any two steps are alike: without a dictionary a tenth less is left.
        pq.write_table(
            table, temporary, compression="zstd", compression_level=19, use_dictionary=False
        )


def _as_steps(curves: npt.NDArray[np.float32]) -> pa.FixedSizeListArray:
    steps = np.rint(curves.astype(np.float64) * _STEPS).astype(np.uint16)
    return pa.FixedSizeListArray.from_arrays(steps.ravel(), curves.shape[1])


def read_recording(path: Path) -> ForecastRecording:
    """Read a recording of forecasts, which may be a shipped one.

    Raises:
        ValueError: the file cannot be read, is not a recording, or does not hold together.
    """
    path = find_shipped(path)
    try:
        with open_parquet(path) as file:
            table = file.read()
        described = dict(json.loads((table.schema.metadata or {})[_KEY]))
    except UnusableParquetError as error:
        raise ValueError(str(error)) from error
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from error
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: no recording of forecasts; `headway evaluate --forecasts` makes one"
        ) from error
    if described.get("version") != _VERSION:
        raise ValueError(
            f"{path}: a recording of version {described.get('version')}, not {_VERSION}; make it "
            "again with `headway evaluate --forecasts`"
        )
    try:
        return _recording(table, described)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: a damaged recording, make it again: {error}") from error


def _recording(table: Any, described: dict[str, Any]) -> ForecastRecording:
    if empty := [name for name in table.column_names if table.column(name).null_count]:
        raise ValueError(f"empty values in {', '.join(empty)}")
    survival = table.column("survival").combine_chunks()
    edges = np.array(described["edges"], dtype=np.float64)
    steps = survival.flatten().flatten().to_numpy().reshape(-1, len(edges))
    n_rows = survival.value_lengths().to_numpy().astype(np.int64)
    of_prompts = None
    if "prompt_survival" in table.column_names:
        flat = table.column("prompt_survival").combine_chunks().flatten().to_numpy()
        of_prompts = in_steps(flat.reshape(-1, len(edges)) / _STEPS)

    def whole(name: str) -> IntArray:
        return np.asarray(table.column(name).to_numpy(), dtype=np.int64)

    return ForecastRecording(
        model=described["model"],
        predictor=described["predictor"],
        part=described["part"],
        interval=described["interval"],
        edges=edges,
        prompt=whole("prompt_tokens"),
        output=whole("output_tokens"),
        max_tokens=whole("max_tokens"),
        cut=table.column("cut").to_numpy(),
        curves=in_steps(steps / _STEPS),
        first_row=np.cumsum(n_rows) - n_rows,
        n_rows=n_rows,
        prompt_curves=of_prompts,
        prompt_predictor=described.get("prompt_predictor", ""),
    )
