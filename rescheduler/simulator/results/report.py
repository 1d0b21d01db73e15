"""Simulated policies side by side: in a terminal, in Markdown, in JSON."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from data_collection.files import read_text, replace_file, write_text_atomically
from data_collection.versions import machine, source_commit, versions
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.metrics import RunResult, Summary

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's palette, which colour-blind people can distinguish, and a brown."""

_COMPARED = (
    ("imbalance", "imbalance, thousand tokens", 1e-3),
    ("throughput", "throughput, thousand tokens/s", 1e-3),
    ("tpot", "TPOT, ms", 1e3),
    ("energy", "energy, kJ", 1e-3),
)


def draw_loads(runs: Sequence[RunResult]) -> Any:
    """Return the load of every instance over the steps, a panel for each run.

    As in paper 000, Figure 6.
    """
    from matplotlib import colormaps

    figure, panels = create_panels(len(runs), columns=2, size=(5.6, 2.7))
    top = max((run.series.load.max(initial=0) for run in runs), default=0)
    for axes, run in zip(panels, runs, strict=True):
        colours = colormaps["viridis"](np.linspace(0.0, 0.92, run.n_instances))
        for g in range(run.n_instances):
            load = run.series.load[:, g] / 1e3
            axes.plot(run.series.step, load, color=colours[g], linewidth=0.6, alpha=0.85)
        axes.set_ylim(0, 1.05 * max(top, 1) / 1e3)
        axes.set_xlim(left=0)
        axes.set_title(run.policy, loc="left", fontweight="bold", fontsize="medium")
        axes.text(
            0.99,
            1.02,
            f"mean max − min {run.max_minus_min / 1e3:,.1f}k, idle {run.idle_share:.1%}",
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize="small",
            color="0.35",
        )
        finish_axes(axes)
    figure.supxlabel("step", fontsize="medium")
    figure.supylabel("context tokens on an instance, thousands", fontsize="medium")
    return figure


def draw_power(runs: Sequence[RunResult]) -> Any:
    """Return the mean power of a GPU over time, a line for each run.

    As in paper 000, Figure 7. Thin lines are steps, thick ones their running mean.
    """
    figure, (axes,) = create_panels(1, columns=1, size=(8.0, 3.6))
    for i, run in enumerate(runs):
        time, power = run.series.time, run.series.power
        if len(time) == 0:
            continue
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(time, power, color=colour, linewidth=0.5, alpha=0.25)
        label = f"{run.policy}: {run.energy_load_joules / 1e3:,.0f} kJ in {run.seconds:,.0f} s"
        axes.plot(time, running_mean(power, 50), color=colour, linewidth=1.8, label=label)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small", loc="lower left")
    finish_axes(axes, "time, s", "mean power of a GPU, W")
    return figure


def draw_comparison(summaries: Mapping[str, Summary]) -> Any:
    """Return the main figures of all policies as dots with their 95% intervals."""
    shown = [entry for entry in _COMPARED if any(entry[0] in s.mean for s in summaries.values())]
    height = 1.1 + 0.34 * len(summaries)
    figure, panels = create_panels(
        len(shown), columns=4, size=(3.1, height), sharex=False, sharey=True
    )
    rows = np.arange(len(summaries))
    for axes, (name, title, scale) in zip(panels, shown, strict=True):
        for row, summary in enumerate(summaries.values()):
            if name not in summary.mean:
                continue
            value = summary.mean[name] * scale
            half = summary.ci95.get(name, 0.0) * scale
            colour = COLOURS[row % len(COLOURS)]
            axes.errorbar(value, row, xerr=half, fmt="o", color=colour, markersize=6, capsize=3)
        axes.set_yticks(rows, list(summaries))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        if name == "imbalance":  # differs by factors, from a meaningful 0
            axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=5)
        finish_axes(axes, title)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all; return its path."""
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return path


def create_panels(
    n: int,
    columns: int,
    size: tuple[float, float],
    sharex: bool = True,
    sharey: bool | Literal["col"] = True,
) -> tuple[Any, list[Any]]:
    """Return a figure and its panels.

    Args:
        n: number of panels.
        columns: panels side by side, at most.
        size: inches of a panel.
        sharex: all panels have the same horizontal axis.
        sharey: all panels, or those of a column (``col``), have the same vertical axis.
    """
    from matplotlib.figure import Figure

    columns = min(n, columns)
    rows = -(-n // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
    panels = list(grid.flat)
    for spare in panels[n:]:
        spare.remove()
    return figure, panels[:n]


def running_mean(values: Any, parts: int, whole: bool = False) -> Any:
    """Return the mean of each value and its neighbours.

    Args:
        values: [n] of a series.
        parts: of the series, one of which a mean is over.
        whole: leave out the ends, where means are over fewer values otherwise.
    """
    n = len(values)
    width = max(n // parts, 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    if whole:
        return (sums[width:] - sums[:-width]) / width
    at = np.arange(n)
    low, high = np.maximum(at - width // 2, 0), np.minimum(at + width // 2 + 1, n)
    return (sums[high] - sums[low]) / (high - low)


def finish_axes(axes: Any, x: str = "", y: str = "", which: str = "major") -> None:
    """Label a panel's axes, and give it a grid and no frame."""
    if x:
        axes.set_xlabel(x)
    if y:
        axes.set_ylabel(y)
    axes.grid(alpha=0.25, which=which)
    axes.spines[["top", "right"]].set_visible(False)


def draw_rescheduling(runs: Sequence[RunResult], kv_capacity: int) -> Any:
    """Return step-time variance and highest KV usage over time, a row for each run.

    As in STAR (Wang et al. 2026), Figures 11 and 12: shaded where requests are preempted, ticks
    where requests move.
    """
    figure, panels = create_panels(2 * len(runs), 2, (5.0, 1.6), sharey="col")
    for left, right, run in zip(panels[::2], panels[1::2], runs, strict=True):
        series = run.series
        colour = COLOURS[0]
        left.plot(series.time, 1e6 * series.execution_variance, color=colour, linewidth=0.6)
        left.set_yscale("symlog", linthresh=0.1)
        mean = f"{run.policy}: {1e6 * run.execution_variance:.3f} ms² on average"
        left.set_title(mean, loc="left", fontsize="small")
        right.plot(series.time, 100 * series.held / kv_capacity, color=colour, linewidth=0.7)
        right.axhline(99, color="0.4", linestyle="--", linewidth=0.7)
        for time in series.time[1:][np.diff(series.preemptions) > 0]:
            right.axvspan(time - 4, time + 4, color=COLOURS[1], alpha=0.4, linewidth=0)
        moved = series.time[1:][np.diff(series.migrations) > 0]
        right.plot(moved, np.full(len(moved), 3.0), "|", color="0.25", markersize=5, alpha=0.6)
        counts = f"{run.preemptions} preemptions, {run.migrations} migrations"
        right.set_title(counts, loc="left", fontsize="small")
        right.set_ylim(0, 108)
        for axes in (left, right):
            axes.set_xlim(left=0)
            finish_axes(axes)
    figure.supxlabel("time, s", fontsize="medium")
    middle = len(runs) // 2 * 2
    panels[middle].set_ylabel("variance of step times, ms²")
    panels[middle + 1].set_ylabel("highest KV usage, %")
    return figure


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
