"""`headway evaluate`: a predictor and its comparators, on the same test rows."""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from data_collection.dataset.dataset_schema import read_sessions, shown, split_requests
from data_collection.files import write_text_atomically
from data_collection.versions import machine, source_commit, versions
from predictor.evaluation.comparators import COMPARATORS, Comparator, KaplanMeier, create_comparator
from predictor.evaluation.record_forecasts import record_forecasts
from predictor.evaluation.report import (
    AgeScores,
    Calibration,
    Evaluation,
    MethodResult,
    draw_figures,
    markdown_report,
)
from predictor.evaluation.survival_metrics import (
    Outcomes,
    d_calibration,
    error_by_bin,
    levels_of,
    summarise_errors,
    survival_scores,
)
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from predictor.forecasts.kaplan_meier import observed_share
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import HiddenStateMLP
from predictor.models.survival_mlp import SurvivalMLP
from predictor.prompts.prompt_predictor import PromptPredictor
from predictor.training.row_table import RowTable, load_rows
from predictor.training.rows_data_module import request_rows

_BINS = 8


def median_latency_ms(call: Callable[[], object]) -> float:
    """Return the median time of a call in milliseconds, on one thread, after a warm-up.

    Called for two seconds, but at least 5 and at most 1,000 times.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call()
        times: list[float] = []
        deadline = time.perf_counter() + 2.0
        while len(times) < 5 or (len(times) < 1000 and time.perf_counter() < deadline):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return float(np.median(times)) * 1e3


def evaluate(
    dataset: Path,
    checkpoint: str,
    out: Path | None = None,
    comparators: dict[str, dict[str, Any]] | None = None,
    split_seed: int | None = None,
    part: Literal["validation", "test", "all"] = "test",
    on: Path | None = None,
    forecasts: Path | None = None,
    prompt_checkpoint: str | None = None,
) -> None:
    """Measure a predictor and its comparators on the test split of a dataset.

    Writes ``metrics.json``, ``report.md`` and figures, and prints the table. The split is
    the checkpoint's own. So its training never saw the test requests. With ``--on``, all requests
    of another dataset are measured instead of the test part. Such a dataset may have been
    collected after the last choice was made. The comparators still train on ``dataset``.

    With ``--forecasts`` it also writes the predictor's forecasts of the measured requests to a
    file. In `headway simulate`, the trace `{name: replay, recording: FILE}` repeats these requests,
    and the forecast `{name: replay, recording: FILE}` gives policies the forecasts.

    ``headway evaluate recalibrate`` refits a predictor's probabilities to served requests.

    Args:
        dataset: folder of the dataset.
        checkpoint: folder or Hugging Face id of a survival model or a regressor.
        out: Write to this folder. If not set, to ``evaluation`` in the measured dataset.
        comparators: name -> options; constant_median and kaplan_meier if not set. Others:
            regressor and regressor_cut_as_ended (with a checkpoint each), prompt_self_report,
            auxiliary_encoder, auxiliary_causal_lm.
        split_seed: Seed of the split. If not set, the checkpoint's own.
        part: The part to measure on. Use ``validation`` to choose between settings, and look at the
            test last. Use ``all`` for a dataset that was collected apart: no comparator learns
            from it.
        on: folder of another dataset to measure on. Its requests whose prompts ``dataset``
            has too are left out.
        forecasts: Write forecasts of the measured requests to this Parquet file, to simulate with.
        prompt_checkpoint: Add the forecasts of this predictor, which reads prompts, to the file. It
            must not have been trained on these requests: its split may differ.

    Raises:
        ModelMismatchError: the predictor is of another model; both are named.
        DatasetError: a dataset cannot be used.
        CheckpointError: the checkpoint cannot be used.
        ValueError: an unknown comparator; ``part`` is given with ``on``, or ``all`` with
            comparators; nothing can be measured or recorded.
    """
    chosen = {} if comparators is None else comparators
    if comparators is None and part != "all":
        chosen = {"constant_median": {}, "kaplan_meier": {}}
    if part == "all" and chosen:
        raise ValueError("--part all leaves nothing that comparators could learn from")
    for name in chosen:
        if name not in COMPARATORS:
            raise ValueError(f"unknown comparator {name!r}; known: {', '.join(COMPARATORS)}")
    if on is not None and part != "test":
        raise ValueError(f"--on measures a whole dataset, --part {part} a part of another")
    if on is not None and on.resolve() == dataset.resolve():
        raise ValueError("--on must be another dataset: the predictor has learned from this one")
    if prompt_checkpoint is not None and forecasts is None:
        raise ValueError("--prompt-checkpoint is of a file of forecasts: give --forecasts, too")
    for folder in filter(None, (dataset, on)):
        read_sessions(folder)  # before a checkpoint is looked for, here and on the hub
    predictor = load_predictor(checkpoint)
    table = load_rows(dataset, predictor.adapter)
    predictor.refuse_other_model(table.session)
    prompts = None if prompt_checkpoint is None else PromptPredictor.load(prompt_checkpoint)
    trained = predictor.provenance
    seed = trained.get("split_seed", 0) if split_seed is None else split_seed
    if type(seed) is not int or seed < 0:
        raise ValueError(f"split_seed must be a whole number from 0, not {shown(repr(seed))}")
    split: dict[str, npt.NDArray[np.int64]] = {"all": np.arange(len(table.requests))}
    split.update(split_requests(table.requests.group, seed).items())
    train, validation, whole = (
        table.select(np.isin(table.request, split[name])) for name in ("train", "validation", part)
    )
    notes: list[str] = []
    measured, requests = table, split[part]
    if on is not None:
        other = load_rows(on, predictor.adapter)
        predictor.refuse_other_model(other.session)
        known = _same_prompts(other, table)
        measured, requests = other, np.flatnonzero(~known)
        whole = other.select(~known[other.request])
        if known.any():
            notes.append(
                f"{known.sum()} requests of {on.resolve().name} are left out: "
                f"{dataset.resolve().name} has their prompts too."
            )
        for folder, rows in ((dataset, table), (on, other)):
            if unknown := rows.requests.prompt_token_ids.count(None):
                notes.append(
                    f"The prompts of {unknown} requests of {folder.resolve().name} were not "
                    f"recorded, so that requests of {on.resolve().name} may be among those that "
                    "the predictor learned from."
                )
    test = whole.ran_to_their_end()
    if len(test) == 0:
        kind = f"{part} request" if on is None else "request with a prompt of its own"
        raise ValueError(f"{on or dataset}: no {kind} ran to its end, nothing can be measured")
    if forecasts is not None:
        name = part if on is None else "all"
        recorded, left_out = record_forecasts(
            predictor, measured, requests, forecasts, name, prompts
        )
        print(
            f"wrote {forecasts}: {len(recorded)} {name} requests, {len(recorded.curves)} "
            f"forecasts, one every {recorded.interval} tokens, "
            f"{forecasts.stat().st_size / 1e6:.2f} MB\n"
            f"left out {left_out.unfinished} requests that did not run to their end, and "
            f"{left_out.incomplete} without a row every {recorded.interval} tokens"
        )
    own, found = _measure(
        test,
        partial(_forecast, predictor),
        sum(weights.numel() for weights in predictor.parameters()),
        float(trained.get("training_seconds", 0.0)),
    )
    results: dict[str, MethodResult] = {}
    for name, options in chosen.items():
        print(f"{name}: training", flush=True)
        comparator = create_comparator(name, options)
        started = time.monotonic()
        comparator.fit(train, validation)
        seconds = getattr(comparator, "training_seconds", time.monotonic() - started)
        print(f"{name}: predicting {len(test)} rows", flush=True)
        forecast = partial(_comparator_forecast, comparator)
        results[name], _ = _measure(test, forecast, comparator.parameters, seconds)
        notes += comparator.notes
    evaluation = Evaluation(
        own=own,
        comparators=results,
        calibration=_calibration(predictor, found, test),
        n_requests=len(np.unique(test.request)),
        n_rows=len(test),
        cut_rows=int(test.censored.sum()),
        left_out_rows=len(whole) - len(test),
        provenance={
            "model": f"{table.session.model} ({table.session.revision})",
            "dataset": f"{dataset.resolve().name}: {len(table.requests)} requests, "
            f"{len(table)} rows",
            "split_seed": seed,
            "part": part if on is None else on.resolve().name,
            "commit": source_commit(),
            "machine": machine(),
            "versions": versions(),
        },
        notes=notes,
    )
    _write(evaluation, test, found, out or (on or dataset) / "evaluation")


def _same_prompts(table: RowTable, other: RowTable) -> npt.NDArray[np.bool_]:
    """Return which requests have a prompt that the other table has too, [n_requests]."""
    known = {tuple(prompt) for prompt in other.requests.prompt_token_ids if prompt is not None}
    prompts = table.requests.prompt_token_ids
    return np.array([prompt is not None and tuple(prompt) in known for prompt in prompts])


def _forecast(predictor: HiddenStateMLP, rows: RowTable) -> Forecast:
    return predictor.forecast(request_rows(rows))


def _comparator_forecast(comparator: Comparator, rows: RowTable) -> Forecast:
    if isinstance(comparator, KaplanMeier):
        return comparator.forecast(rows)
    return PointForecast.new(comparator.predict(rows), rows.tokens_left())


def _outcomes(rows: RowTable) -> Outcomes:
    return Outcomes(rows.remaining_tokens, rows.censored, rows.tokens_left())


def _measure(
    test: RowTable,
    forecast: Callable[[RowTable], Forecast],
    parameters: int,
    training_seconds: float,
) -> tuple[MethodResult, Forecast]:
    # Timed first, while nothing is cached: ten rows of ten requests.
    _, first = np.unique(test.request, return_index=True)
    ten = test.select(np.resize(first, 10))
    one = test.select(first[:1])
    latencies = [median_latency_ms(partial(forecast, rows)) for rows in (one, ten)]
    found, outcomes = forecast(test), _outcomes(test)
    median, remaining = found.median(), test.remaining_tokens
    ended = ~test.censored
    total = test.requests.total_tokens[test.request]
    generated = test.generated_tokens
    by_generated = []
    for errors in error_by_bin(median, remaining, generated, _edges(generated)):
        rows = np.flatnonzero((generated >= errors.low) & (generated < errors.high))
        scores = survival_scores(found.select(rows), outcomes.select(rows))
        by_generated.append(AgeScores(**vars(errors), scores=scores))
    result = MethodResult(
        errors=summarise_errors(median, remaining),
        mae_ended=float(np.abs(median - remaining)[ended].mean()) if ended.any() else float("nan"),
        mae_mean=float(np.abs(found.mean() - remaining).mean()),
        scores=survival_scores(found, outcomes),
        parameters=parameters,
        training_seconds=training_seconds,
        latency_ms_batch1=latencies[0],
        latency_ms_batch10=latencies[1],
        by_generated=by_generated,
        by_total=error_by_bin(median, remaining, total, _edges(total)),
    )
    return result, found


def _calibration(predictor: HiddenStateMLP, found: Forecast, test: RowTable) -> Calibration | None:
    """Compare levels with shares, with and without the predictor's recalibration."""
    if not isinstance(predictor, SurvivalMLP) or not isinstance(found, SurvivalForecast):
        return None
    outcomes, cut = _outcomes(test), test.censored
    raw = levels_of(predictor.forecast_as_learned(request_rows(test)), outcomes)
    levels = levels_of(found, outcomes)
    first = test.generated_tokens == test.generated_tokens.min()
    shares, p_value = d_calibration(levels[first], cut[first])
    nominal = np.linspace(0.025, 0.975, 39)
    return Calibration(
        d_shares=shares.tolist(),
        d_p_value=p_value,
        nominal=nominal.tolist(),
        observed=observed_share(levels, cut, nominal).tolist(),
        observed_raw=observed_share(raw, cut, nominal).tolist(),
    )


def _edges(values: Any) -> Sequence[int]:
    """Return bin edges of equal width, rounded up to a multiple of ten."""
    width = max(10, -(-int(values.max() + 1) // (_BINS * 10)) * 10)
    return list(range(0, int(values.max()) + width + 1, width))


def _write(evaluation: Evaluation, test: RowTable, found: Forecast, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = json.dumps(evaluation.as_json(), indent=1) + "\n"
    write_text_atomically(out / "metrics.json", document)
    figures = draw_figures(evaluation, test.remaining_tokens, found.median(), out)
    report = markdown_report(evaluation, figures)
    write_text_atomically(out / "report.md", report)
    print("\n".join(map(shown, report.split("\n"))))  # it has names from files of others
    for path in (out / "metrics.json", out / "report.md", *figures):
        print(path)
