"""What was found of prompt-time prediction, as tables, a figure and a JSON document."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_collection.atomic_file import replace_file, write_text_atomically
from rescheduler.papers.prompt_length.buckets import LengthBuckets
from rescheduler.papers.prompt_length.prompt_table import AnsweredPrompts
from rescheduler.papers.prompt_length.scores import LengthScores
from rescheduler.papers.prompt_length.study import METHODS, TaskScores

__all__ = ["LengthResults", "write_results"]

_FEW = 10
"""Test requests below which a task has no row of its own: its accuracies would say nothing."""


@dataclass(frozen=True)
class LengthResults:
    """Everything that was measured.

    Attributes:
        test: the test requests.
        buckets: each choice of buckets.
        scores: for each, those of the methods.
        tasks: how well tasks were classified, or None where there is one.
        notes: what a reader must know.
        provenance: dataset, model, commit, machine, versions.
    """

    test: AnsweredPrompts
    buckets: dict[str, LengthBuckets]
    scores: dict[str, dict[str, LengthScores]]
    tasks: TaskScores | None
    notes: list[str]
    provenance: dict[str, Any]


def write_results(results: LengthResults, out: Path) -> None:
    """Write ``results.json``, ``report.md`` and ``results.png``, and print the report."""
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "buckets": {name: list(buckets.edges) for name, buckets in results.buckets.items()},
        "scores": {
            scheme: {name: asdict(scores) for name, scores in methods.items()}
            for scheme, methods in results.scores.items()
        },
        "tasks": asdict(results.tasks) if results.tasks else None,
        "test": [asdict(row) for row in _task_rows(results.test)],
        "notes": results.notes,
        "provenance": results.provenance,
    }
    report = _report(results)
    write_text_atomically(out / "results.json", json.dumps(document, indent=1) + "\n")
    write_text_atomically(out / "report.md", report)
    with replace_file(out / "results.png") as temporary:
        _figure(results).savefig(temporary, dpi=150, format="png")
    print(report)
    for name in ("results.json", "report.md", "results.png"):
        print(out / name)


@dataclass(frozen=True)
class _TaskRow:
    """The test requests of one task: how many, their mean tokens, the share that the cap cut."""

    task: str
    requests: int
    prompt_tokens: float
    answer_tokens: float
    cut: float


def _task_rows(test: AnsweredPrompts) -> list[_TaskRow]:
    task = np.array(test.prompts.task)
    rows = []
    for name in (*np.unique(task), None):
        here = np.ones(len(task), dtype=np.bool_) if name is None else task == name
        rows.append(
            _TaskRow(
                "all" if name is None else str(name),
                int(here.sum()),
                float(test.prompts.prompt_tokens[here].mean()),
                float(test.total_tokens[here].mean()),
                float(test.cut[here].mean()),
            )
        )
    return rows


def _report(results: LengthResults) -> str:
    test, tasks = results.test, results.tasks
    lines = [
        f"# Answer lengths of {results.provenance['model']}, predicted from prompts",
        "",
        f"{len(test)} test requests that nothing was trained on, "
        f"{test.cut.mean():.1%} of them ended by their max_tokens. The truth is the tokens that "
        "came, and every forecast knows the cap.",
    ]
    if tasks:
        lines += [
            "",
            f"Task classified from the prompt: {tasks.accuracy:.2%} (always the most frequent: "
            f"{tasks.majority:.2%}).",
        ]
    for scheme, buckets in results.buckets.items():
        methods = results.scores[scheme]
        lines += ["", f"## Buckets: {scheme}", "", *_shares(buckets, test), ""]
        lines += [*_scores(methods), "", *_by_task(methods, test)]
    if results.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in results.notes)]
    return "\n".join([*lines, "", "![Scores of all methods](results.png)", ""])


def _shares(buckets: LengthBuckets, test: AnsweredPrompts) -> list[str]:
    shares = np.bincount(buckets.of(test.total_tokens), minlength=len(buckets)) / len(test)
    return [
        "| tokens | " + " | ".join(buckets.names) + " |",
        "|---|" + "---:|" * len(buckets),
        "| test requests | " + " | ".join(f"{share:.1%}" for share in shares) + " |",
    ]


def _scores(methods: dict[str, LengthScores]) -> list[str]:
    lines = [
        "| method | accuracy | macro F1 | log loss | CRPS, tokens | MAE of the median "
        "| concordance | 80% covers |",
        "|---|" + "---:|" * 7,
    ]
    for name, scores in methods.items():
        concordance = "–" if scores.concordance is None else f"{scores.concordance:.3f}"
        covered = "–" if scores.coverage is None else f"{scores.coverage['80']:.1%}"
        lines.append(
            f"| {METHODS[name]} | {scores.accuracy:.2%} | {scores.macro_f1:.3f} "
            f"| {scores.log_loss:.3f} | {scores.crps:.1f} | {scores.mae:.1f} | {concordance} "
            f"| {covered} |"
        )
    return lines


def _by_task(methods: dict[str, LengthScores], test: AnsweredPrompts) -> list[str]:
    shown = [name for name in METHODS if name in methods and name != "kaplan_meier"]
    lines = [
        "| task | test requests | prompt tokens | answer tokens | cut | "
        + " | ".join(METHODS[name] for name in shown)
        + " |",
        "|---|" + "---:|" * (4 + len(shown)),
    ]
    for row in _task_rows(test):
        if row.requests < _FEW:
            continue
        accuracies = [
            methods[name].accuracy if row.task == "all" else methods[name].by_task[row.task]
            for name in shown
        ]
        lines.append(
            f"| {row.task} | {row.requests} | {row.prompt_tokens:.0f} | {row.answer_tokens:.0f} "
            f"| {row.cut:.0%} | " + " | ".join(f"{value:.1%}" for value in accuracies) + " |"
        )
    return lines


def _figure(results: LengthResults) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels: tuple[tuple[str, Callable[[LengthScores], float]], ...] = (
        ("accuracy of the bucket, %", lambda scores: 100 * scores.accuracy),
        ("CRPS of the curve, tokens", lambda scores: scores.crps),
    )
    names = [name for name in METHODS if any(name in m for m in results.scores.values())]
    height = 0.8 / len(results.scores)
    for i, (title, value) in enumerate(panels):
        axes = figure.add_subplot(1, 2, i + 1)
        for j, (scheme, methods) in enumerate(results.scores.items()):
            places = np.arange(len(names)) + (j - (len(results.scores) - 1) / 2) * height
            axes.barh(places, [value(methods[name]) for name in names], height, label=scheme)
        axes.set_yticks(np.arange(len(names)), [METHODS[name] for name in names] if i == 0 else [])
        axes.invert_yaxis()
        axes.set_xlabel(title)
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    bars, schemes = figure.axes[0].get_legend_handles_labels()
    figure.legend(bars, schemes, loc="outside upper center", ncols=len(schemes), frameon=False)
    return figure
