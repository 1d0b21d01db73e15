"""Simulated policies side by side: in a terminal, in Markdown, in JSON."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.results.metrics import Summary
from rescheduler.simulator.results.tables import markdown_table, signed_share

__all__ = ["document", "main_columns", "markdown_report", "terminal_table"]


class _Figure(NamedTuple):
    """A column: its title, the figure it shows, and what that is multiplied by."""

    title: str
    name: str
    scale: float = 1.0


_MAIN = (
    _Figure("imbalance, tokens", "imbalance"),
    _Figure("throughput, tokens/s", "throughput"),
    _Figure("TPOT, ms", "tpot", 1e3),
    _Figure("energy, kJ", "energy", 1e-3),
)
_SERVICE = (
    _Figure("goodput, requests/s", "goodput"),
    _Figure("violated, %", "violated", 100.0),
)
_REJECTED = _Figure("rejected", "rejected")
_MOVING = (
    _Figure("execution variance, ms²", "execution_variance", 1e6),
    _Figure("TPOT P99, ms", "tpot_p99", 1e3),
    _Figure("preemptions", "preemptions"),
    _Figure("migrations", "migrations"),
)
_LATENCY = tuple(
    _Figure(f"{title}{percentile and ' ' + percentile.upper()}, {unit}", f"{name}{suffix}", scale)
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
    _Figure("max − min, tokens", "max_minus_min"),
    _Figure("idle share, %", "idle_share", 100.0),
    _Figure("requests/s", "requests_per_s"),
    _Figure("energy (mfu), kJ", "energy_mfu", 1e-3),
    _Figure("makespan, s", "makespan"),
    _Figure("steps", "steps"),
    _Figure("execution variance, ms²", "execution_variance", 1e6),
    _Figure("KV peak, tokens", "kv_peak"),
    _Figure("preemptions", "preemptions"),
    _Figure("migrations", "migrations"),
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


def _main(summaries: Sequence[Summary]) -> list[_Figure]:
    moving = any(summary.mean.get("migrations") for summary in summaries)
    rejecting = any(summary.mean.get("rejected") for summary in summaries)
    shown = (*_MAIN, *_SERVICE, *((_REJECTED,) if rejecting else ()), *(_MOVING if moving else ()))
    return _known(shown, summaries)


def _known(figures: Sequence[_Figure], summaries: Sequence[Summary]) -> list[_Figure]:
    return [f for f in figures if any(f.name in summary.mean for summary in summaries)]


def _table(
    figures: Sequence[_Figure],
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


def _cells(figure: _Figure, summaries: Sequence[Summary], intervals: bool = True) -> list[str]:
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


def _change(figure: _Figure, summary: Summary, first: Summary) -> str:
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
