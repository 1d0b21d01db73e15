"""Simulated policies side by side: in a terminal, in Markdown, in JSON."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from data_collection.files import read_text, write_text_atomically
from data_collection.versions import machine, source_commit, versions
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.figures import save_figure
from rescheduler.simulator.results.metrics import Summary

__all__ = [
    "Column",
    "about",
    "document",
    "figure_cell",
    "json_text",
    "main_columns",
    "markdown_report",
    "markdown_table",
    "refuse_foreign_folder",
    "signed_share",
    "terminal_table",
    "write_report",
    "write_study",
]


class Column(NamedTuple):
    """A column of figures.

    Attributes:
        title: of the column.
        name: of the figure that it shows.
        scale: multiplies the figure.
        form: format specification of the scaled figure, where `figure_cell` shows it.
    """

    title: str
    name: str
    scale: float = 1.0
    form: str = ""


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "l"
) -> list[str]:
    """Return the lines of a table.

    Args:
        heads: title of each column.
        rows: cells of each row, one for each column.
        align: ``l`` or ``r`` for each of the first columns; those after them are aligned right.
    """
    marks = ("---" if side == "l" else "---:" for side in align.ljust(len(heads), "r"))
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(marks)}|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def figure_cell(summary: Summary, column: Column) -> str:
    """Return a mean with half its interval: "1.25 ± 0.03"; a dash where there is no figure."""
    if column.name not in summary.mean:
        return "–"
    cell = format(summary.mean[column.name] * column.scale, column.form)
    half = summary.ci95.get(column.name)
    return cell if half is None else f"{cell} ± {format(half * column.scale, column.form)}"


def signed_share(share: float) -> str:
    """Return a change as "+4.1%" or "−4.1%"."""
    return f"{share:+.1%}".replace("-", "−")


_MAIN = (
    Column("imbalance, tokens", "imbalance"),
    Column("throughput, tokens/s", "throughput"),
    Column("TPOT, ms", "tpot", 1e3),
    Column("energy, kJ", "energy", 1e-3),
)
_SERVICE = (Column("goodput, requests/s", "goodput"), Column("violated, %", "violated", 100.0))
_REJECTED = Column("rejected", "rejected")
_MOVING = (
    Column("execution variance, ms²", "execution_variance", 1e6),
    Column("TPOT P99, ms", "tpot_p99", 1e3),
    Column("preemptions", "preemptions"),
    Column("migrations", "migrations"),
)
_LATENCY = tuple(
    Column(f"{title}{percentile and ' ' + percentile.upper()}, {unit}", f"{name}{suffix}", scale)
    for title, name, unit, scale in (
        ("request latency", "latency", "s", 1.0),
        ("TTFT", "ttft", "s", 1.0),
        ("wait", "wait", "s", 1.0),
        ("TPOT", "tpot", "ms", 1e3),
        ("worst TPOT", "tpot_worst", "ms", 1e3),
        ("ITL", "itl", "ms", 1e3),
    )
    for percentile in ("", "p50", "p95", "p99")
    for suffix in (percentile and f"_{percentile}",)
)
_REST = (
    Column("max − min, tokens", "max_minus_min"),
    Column("idle share, %", "idle_share", 100.0),
    Column("requests/s", "requests_per_s"),
    Column("energy (mfu), kJ", "energy_mfu", 1e-3),
    Column("makespan, s", "makespan"),
    Column("steps", "steps"),
    Column("execution variance, ms²", "execution_variance", 1e6),
    Column("KV peak, tokens", "kv_peak"),
    Column("preemptions", "preemptions"),
    Column("migrations", "migrations"),
)


def terminal_table(summaries: Mapping[str, Summary]) -> Table:
    """Return the main figures, each with its interval and how it compares with the first policy."""
    each = list(summaries.values())
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("policy", no_wrap=True)
    shown = _main(each)
    for figure in shown:
        table.add_column(figure.title.replace(", ", "\n"), justify="right", no_wrap=True)
    columns = [_cells(figure, each) for figure in shown]
    for row, (label, summary) in enumerate(summaries.items()):
        cells = []
        for figure, column in zip(shown, columns, strict=True):
            change = "" if row == 0 else _change(figure, summary, each[0])
            cells.append(Text.assemble(column[row], ("\n" + change, "dim cyan")))
        table.add_row(Text(label, style="bold"), *cells)
    return table


def main_columns(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """Return the main figures as columns of text: title -> a cell for each summary."""
    return {figure.title: _cells(figure, summaries) for figure in _main(summaries)}


def markdown_report(
    summaries: Mapping[str, Summary], config: SimulationConfig, figures: Sequence[Path] = ()
) -> str:
    """Return the report: the main figures, latencies and the rest, and the pictures."""
    each = list(summaries.values())
    runs = max(summary.runs for summary in each)
    compared = f"Changes are against {next(iter(summaries))}. " if len(each) > 1 else ""
    lines = [
        "# Simulated routing",
        "",
        f"{config.cluster.instances} instances × {config.cluster.slots} slots, "
        f"{config.clock} clock, {config.dispatch} dispatch, prefill {config.prefill.kind}, "
        f"trace {config.trace.get('name') or Path(config.trace['path']).name}, arrivals "
        f"{config.arrivals.kind}, forecast {config.forecast['name']}; means over "
        f"{runs} seed{'s' * (runs != 1)}"
        f"{', ± half a 95% confidence interval' * (runs > 1)}.",
        "",
        *_table(_main(each), summaries, compared=True),
        "",
        f"{compared}Imbalance is the mean over steps of G·max L − Σ L; a GPU's utilisation, for "
        "its energy, is its own load over the highest.",
        "",
        "## Latency",
        "",
        *_table(_known(_LATENCY, each), summaries, intervals=False),
        "",
        "## More",
        "",
        *_table(_known(_REST, each), summaries),
    ]
    lines += ["", *(f"![{path.stem}]({path.name})" for path in figures), ""]
    return "\n".join(lines)


def document(summaries: Mapping[str, Summary], notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON document: mean figures by policy, and ``_about`` what they depend on."""
    return {"_about": dict(notes)} | {label: each.plain for label, each in summaries.items()}


def _main(summaries: Sequence[Summary]) -> list[Column]:
    moving = any(summary.mean.get("migrations") for summary in summaries)
    rejecting = any(summary.mean.get("rejected") for summary in summaries)
    shown = (*_MAIN, *_SERVICE, *((_REJECTED,) if rejecting else ()), *(_MOVING if moving else ()))
    return _known(shown, summaries)


def _known(figures: Sequence[Column], summaries: Sequence[Summary]) -> list[Column]:
    return [f for f in figures if any(f.name in summary.mean for summary in summaries)]


def _table(
    figures: Sequence[Column],
    summaries: Mapping[str, Summary],
    compared: bool = False,
    intervals: bool = True,
) -> list[str]:
    each = list(summaries.values())
    compared = compared and len(each) > 1
    heads: list[str] = []
    for figure in figures:
        heads += [figure.title, "change"] if compared else [figure.title]
    rows: list[list[str]] = []
    columns = [_cells(figure, each, intervals) for figure in figures]
    for row, (label, summary) in enumerate(summaries.items()):
        cells = [label]
        for figure, column in zip(figures, columns, strict=True):
            cells.append(column[row])
            if compared:
                cells.append("" if row == 0 else _change(figure, summary, each[0]))
        rows.append(cells)
    return markdown_table(["policy", *heads], rows)


def _cells(figure: Column, summaries: Sequence[Summary], intervals: bool = True) -> list[str]:
    """Return a column's cells, all with the decimals that its largest value deserves."""
    values = [summary.mean.get(figure.name, math.nan) for summary in summaries]
    largest = max((abs(value) * figure.scale for value in values if value == value), default=0.0)
    decimals = min(max(3 - math.floor(math.log10(largest)), 0), 4) if largest > 0 else 0
    cells = []
    for value, summary in zip(values, summaries, strict=True):
        if math.isnan(value):
            cells.append("–")
            continue
        cell = f"{value * figure.scale:,.{decimals}f}"
        if intervals and figure.name in summary.ci95:
            cell += f" ± {summary.ci95[figure.name] * figure.scale:,.{decimals}f}"
        cells.append(cell)
    return cells


def _change(figure: Column, summary: Summary, first: Summary) -> str:
    """Return how a figure compares: ``-94.1%`` reads badly where ``17.0× less`` is meant."""
    value, base = summary.mean.get(figure.name), first.mean.get(figure.name)
    if value is None or not base:
        return "–"
    ratio = value / base
    if 0 < ratio < 0.5:
        return f"{1 / ratio:.1f}× less"
    if ratio > 2:
        return f"{ratio:.1f}× more"
    return signed_share(ratio - 1)


def about(verb: str, config: SimulationConfig) -> dict[str, Any]:
    """Return what a result depends on: configuration, machine, versions, commit."""
    return {
        "made_by": f"headway {verb}",
        "config": asdict(config),
        "commit": source_commit(),
        "machine": machine(),
        "versions": versions(),
    }


def json_text(document: Any, allow_nan: bool = True) -> str:
    """Return a document as the text of a file."""
    return json.dumps(document, indent=1, allow_nan=allow_nan) + "\n"


def refuse_foreign_folder(folder: Path, verb: str, results: str, overwrite: bool) -> None:
    """Refuse to write among files that are not of an earlier run of the same verb.

    Raises:
        ValueError: the path is not a folder, or the folder is not empty and holds no such results.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: not a folder")
    if overwrite or not folder.exists() or not any(folder.iterdir()):
        return
    try:
        made_by = str(json.loads(read_text(folder / results))["_about"]["made_by"])
    except (ValueError, KeyError, TypeError):
        made_by = ""
    earlier = {"sweep": "simulate"}  # what is `simulate --vary` now; and `study X` is `papers X`
    last = made_by.split()[-1:]
    if [earlier.get(word, word) for word in last] != verb.split()[-1:]:
        raise ValueError(
            f"{folder}: not empty, and not written by `headway {verb}`; "
            "choose another folder or add --overwrite"
        )


def write_report(out: Path, texts: Mapping[str, str], figures: Mapping[str, Any]) -> None:
    """Write the files of a report to a folder, each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save_figure(figure, out / name)
    for name, text in texts.items():
        write_text_atomically(out / name, text)


def write_study(
    out: Path,
    notes: Mapping[str, Any],
    rows: Sequence[Any],
    table: Sequence[str],
    figures: Mapping[str, Any],
) -> None:
    """Write study.json, table.md and figures, and print the table.

    Args:
        out: the folder.
        notes: what the rows depend on, see `about`.
        rows: plain values, one mapping per row.
        table: lines in Markdown.
        figures: file's name -> matplotlib figure.
    """
    text = "\n".join(table) + "\n"
    document = json_text({"_about": dict(notes), "rows": list(rows)})
    write_report(out, {"study.json": document, "table.md": text}, figures)
    print(text)
    print(f"wrote {out}")
