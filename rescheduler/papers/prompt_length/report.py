"""What was found of prompt-time prediction, as tables, a figure and a JSON document."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rescheduler.papers.prompt_length.buckets import LengthBuckets
from rescheduler.papers.prompt_length.prompt_table import AnsweredPrompts
from rescheduler.papers.prompt_length.scores import LengthScores
from rescheduler.papers.prompt_length.study import METHODS, TaskScores
from rescheduler.simulator.results.figures import create_panels, finish_axes
from rescheduler.simulator.results.report import markdown_table, write_report

__all__ = ["LengthResults", "write_results"]

_FEW = 10
"""Test requests below which a task has no row of its own: its accuracies would say nothing."""


@dataclass(frozen=True)
class LengthResults:
    """Everything that was measured: scores by the choice of buckets, then by method."""

    test: AnsweredPrompts
    buckets: dict[str, LengthBuckets]
    scores: dict[str, dict[str, LengthScores]]
    tasks: TaskScores | None
    notes: list[str]
    provenance: dict[str, Any]


def write_results(results: LengthResults, out: Path) -> None:
    """Write ``results.json``, ``report.md`` and ``results.png``, and print the report."""
    document = {
        "buckets": {name: list(buckets.edges) for name, buckets in results.buckets.items()},
        "scores": {
            scheme: {name: asdict(scores) for name, scores in methods.items()}
            for scheme, methods in results.scores.items()
        },
        "tasks": asdict(results.tasks) if results.tasks else None,
        "test": _task_rows(results.test),
        "notes": results.notes,
        "provenance": results.provenance,
    }
    texts = {"results.json": json.dumps(document, indent=1) + "\n", "report.md": _report(results)}
    figures = {"results.png": _figure(results)}
    write_report(out, texts, figures)
    print(texts["report.md"])
    for name in (*texts, *figures):
        print(out / name)


def _task_rows(test: AnsweredPrompts) -> list[dict[str, Any]]:
    """Return, of the test requests of each task and of all, means and the share that was cut."""
    task = np.array(test.prompts.task)
    here = {str(name): task == name for name in np.unique(task)} | {"all": task == task}
    return [
        {
            "task": name,
            "requests": int(rows.sum()),
            "prompt_tokens": float(test.prompts.prompt_tokens[rows].mean()),
            "answer_tokens": float(test.total_tokens[rows].mean()),
            "cut": float(test.cut[rows].mean()),
        }
        for name, rows in here.items()
    ]


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
        shares = np.bincount(buckets.of(test.total_tokens), minlength=len(buckets)) / len(test)
        row = ["test requests", *(f"{share:.1%}" for share in shares)]
        lines += ["", f"## Buckets: {scheme}", ""]
        lines += [*markdown_table(["tokens", *buckets.names], [row]), ""]
        lines += [*_scores(methods), "", *_by_task(methods, test)]
    if results.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in results.notes)]
    return "\n".join([*lines, "", "![Scores of all methods](results.png)", ""])


def _scores(methods: dict[str, LengthScores]) -> list[str]:
    heads = ["method", "accuracy", "macro F1", "log loss", "CRPS, tokens", "MAE of the median"]
    rows = [
        [
            METHODS[name],
            f"{scores.accuracy:.2%}",
            f"{scores.macro_f1:.3f}",
            f"{scores.log_loss:.3f}",
            f"{scores.crps:.1f}",
            f"{scores.mae:.1f}",
            "–" if scores.concordance is None else f"{scores.concordance:.3f}",
            "–" if scores.coverage is None else f"{scores.coverage['80']:.1%}",
        ]
        for name, scores in methods.items()
    ]
    return markdown_table([*heads, "concordance", "80% covers"], rows)


def _by_task(methods: dict[str, LengthScores], test: AnsweredPrompts) -> list[str]:
    shown = [name for name in METHODS if name in methods and name != "kaplan_meier"]
    rows = []
    for row in _task_rows(test):
        task = row["task"]
        if row["requests"] >= _FEW:
            of = [methods[name] for name in shown]
            accuracies = [one.accuracy if task == "all" else one.by_task[task] for one in of]
            means = [f"{row[name]:.0f}" for name in ("requests", "prompt_tokens", "answer_tokens")]
            rows.append([task, *means, f"{row['cut']:.0%}", *(f"{x:.1%}" for x in accuracies)])
    heads = ["task", "test requests", "prompt tokens", "answer tokens", "cut"]
    return markdown_table([*heads, *(METHODS[name] for name in shown)], rows)


def _figure(results: LengthResults) -> Any:
    figure, panels = create_panels(2, 2, (5.5, 4.4), sharex=False)
    shown = (("accuracy", 100, "accuracy of the bucket, %"), ("crps", 1, "CRPS, tokens"))
    names = [name for name in METHODS if any(name in m for m in results.scores.values())]
    height = 0.8 / len(results.scores)
    for axes, (what, scale, title) in zip(panels, shown, strict=True):
        for j, (scheme, methods) in enumerate(results.scores.items()):
            places = np.arange(len(names)) + (j - (len(results.scores) - 1) / 2) * height
            values = [scale * getattr(methods[name], what) for name in names]
            axes.barh(places, values, height, label=scheme)
        axes.set_yticks(np.arange(len(names)), [METHODS[name] for name in names])
        finish_axes(axes, title)
    panels[0].invert_yaxis()
    bars, schemes = panels[0].get_legend_handles_labels()
    figure.legend(bars, schemes, loc="outside upper center", ncols=len(schemes), frameon=False)
    return figure
