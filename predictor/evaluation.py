"""`headway evaluate`: a predictor and its comparators, on the same test rows."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_collection.atomic_file import write_text_atomically
from data_collection.split import split_requests
from data_collection.versions import machine, source_commit, versions
from predictor.comparators import COMPARATORS
from predictor.evaluation_report import draw_figures, markdown_report
from predictor.evaluation_result import OWN_NAME, Evaluation, MethodResult
from predictor.latency import median_latency_ms
from predictor.metrics import error_by_bin, summarise_errors
from predictor.remaining_length_mlp import RemainingLengthMLP
from predictor.row_table import RowTable, load_rows

__all__ = ["evaluate"]

_BINS = 8


def evaluate(
    dataset: Path,
    checkpoint: str,
    out: Path | None = None,
    comparators: dict[str, dict[str, Any]] | None = None,
    split_seed: int | None = None,
) -> None:
    """Measure a predictor and its comparators on the test split of a dataset.

    Writes ``metrics.json``, ``report.md`` and figures, and prints the table. The split is
    the one of the checkpoint's training, so the test requests were never seen.

    Args:
        dataset: folder of the dataset.
        checkpoint: folder or Hugging Face id of a predictor.
        out: where to write; ``DATASET/evaluation`` when not given.
        comparators: name -> options; constant_median and kaplan_meier when not given. Others:
            prompt_self_report, auxiliary_encoder, auxiliary_causal_lm.
        split_seed: of the split; the checkpoint's own when not given.

    Raises:
        ModelMismatchError: the predictor is of another model; both are named.
        DatasetError: the dataset cannot be used.
        CheckpointError: the checkpoint cannot be used.
        ValueError: an unknown comparator.
    """
    chosen = {"constant_median": {}, "kaplan_meier": {}} if comparators is None else comparators
    for name in chosen:
        if name not in COMPARATORS:
            raise ValueError(f"unknown comparator {name!r}; known: {', '.join(COMPARATORS)}")
    predictor = RemainingLengthMLP.load(checkpoint)
    table = load_rows(dataset)
    predictor.refuse_other_model(table.session)
    trained = predictor.provenance
    seed = trained.get("split_seed", 0) if split_seed is None else split_seed
    parts = {
        name: table.select(np.isin(table.request, requests))
        for name, requests in split_requests(table.requests.group, seed).items()
    }
    test = parts["test"].uncensored()
    if len(test) == 0:
        raise ValueError(f"{dataset}: every test row is censored, nothing can be measured")
    own = _measure(
        test,
        lambda rows: predictor.predict(rows.vectors()),
        sum(weights.numel() for weights in predictor.parameters()),
        float(trained.get("training_seconds", 0.0)),
    )
    results: dict[str, MethodResult] = {}
    notes: list[str] = []
    for name, options in chosen.items():
        print(f"{name}: training", flush=True)
        comparator = COMPARATORS[name](**options)
        started = time.monotonic()
        comparator.fit(parts["train"], parts["validation"])
        seconds = time.monotonic() - started
        print(f"{name}: predicting {len(test)} test rows", flush=True)
        results[name] = _measure(test, comparator.predict, comparator.parameters, seconds)
        notes += comparator.notes
    evaluation = Evaluation(
        own=own,
        comparators=results,
        n_requests=len(np.unique(test.request)),
        n_rows=len(test),
        censored_rows=len(parts["test"]) - len(test),
        provenance={
            "model": f"{table.session.model} ({table.session.revision})",
            "dataset": dataset.resolve().name,
            "split_seed": seed,
            "commit": source_commit(),
            "machine": machine(),
            "versions": versions(),
        },
        notes=notes,
    )
    _write(evaluation, test, predictor, out or dataset / "evaluation")


def _measure(
    test: RowTable,
    predict: Callable[[RowTable], npt.NDArray[np.float32]],
    parameters: int,
    training_seconds: float,
) -> MethodResult:
    # Timed first, while nothing is cached: ten rows of ten requests.
    _, first = np.unique(test.request, return_index=True)
    ten = test.select(np.resize(first, 10))
    one = test.select(first[:1])
    latencies = [median_latency_ms(partial(predict, rows)) for rows in (one, ten)]
    predicted = predict(test)
    remaining, generated = test.remaining_tokens, test.generated_tokens
    total = test.requests.total_tokens[test.request]
    return MethodResult(
        errors=summarise_errors(predicted, remaining),
        parameters=parameters,
        training_seconds=training_seconds,
        latency_ms_batch1=latencies[0],
        latency_ms_batch10=latencies[1],
        by_generated=error_by_bin(predicted, remaining, generated, _edges(generated)),
        by_total=error_by_bin(predicted, remaining, total, _edges(total)),
    )


def _edges(values: npt.NDArray[np.int64]) -> list[int]:
    """Return bin edges of equal width, rounded up to a multiple of ten."""
    width = max(10, -(-int(values.max() + 1) // (_BINS * 10)) * 10)
    return list(range(0, int(values.max()) + width + 1, width))


def _write(
    evaluation: Evaluation, test: RowTable, predictor: RemainingLengthMLP, out: Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = json.dumps(evaluation.as_json(), indent=1) + "\n"
    write_text_atomically(out / "metrics.json", document)
    figures = draw_figures(
        {OWN_NAME: evaluation.own, **evaluation.comparators},
        test.remaining_tokens,
        predictor.predict(test.vectors()),
        out,
    )
    report = markdown_report(evaluation, figures)
    write_text_atomically(out / "report.md", report)
    print(report)
    for path in (out / "metrics.json", out / "report.md", *figures):
        print(path)
