"""`headway dataset inspect`: what is in a dataset, as tables and as a picture."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from data_collection.dataset.dataset_schema import (
    DatasetError,
    IntArray,
    Session,
    read_columns,
    read_sessions,
    requests_files,
    rows_files,
    shown,
)
from data_collection.files import replace_file

_MOST = 15
_BINS = 40
_ENDED, _CUT, _LINE, _MUTED = "#2a6f97", "#f4a259", "#1b3a4b", "#6c757d"
_BARS: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}

Row = Sequence[str | int | float]


def inspect(dataset: Path, figure: Path | None = None) -> None:
    """Print counts and length distributions, and draw them.

    Hidden states are never read. So a dataset of any size is inspected at once.

    Args:
        dataset: folder of the dataset.
        figure: Write the PNG to this file. If not set, to ``inspect.png`` in the dataset.

    Raises:
        DatasetError: the folder is not a dataset, is empty, or a shard is damaged.
    """
    sessions = read_sessions(dataset)
    rows_shards = rows_files(dataset)
    names = ["prompt_tokens", "total_tokens", "censored", "finish_reason", "source", "task"]
    requests = read_columns(requests_files(dataset), names)
    rows = read_columns(rows_shards, ["generated_tokens"])
    if not requests.num_rows or not rows.num_columns:
        raise DatasetError(f"{dataset}: nothing was recorded yet")
    generated = _integers(rows, "generated_tokens")
    total = _integers(requests, "total_tokens")
    censored = requests["censored"].to_numpy()

    print(f"# {dataset.name}: {shown(sessions[-1].model)}\n")
    print(f"{len(generated):,} rows of {len(total):,} requests in {len(rows_shards)} shards\n")
    _print_table(
        "Sessions",
        ("session", "rows", "requests", "dropped rows", "refused rows", "closed"),
        [
            (s.name, s.rows, s.requests, s.dropped_rows, s.refused_rows, s.closed or "no")
            for s in sessions
        ],
    )
    _print_table(
        "Lengths in tokens",
        ("", "mean", "P50", "P90", "P95", "P99", "max"),
        [_lengths("output", total), _lengths("prompt", _integers(requests, "prompt_tokens"))],
    )
    reasons = Counter(requests["finish_reason"].to_pylist())
    _print_table(
        "How requests ended",
        ("finish reason", "requests", "share", "remaining length"),
        [
            (reason, n, f"{n / len(total):.1%}", "known" if reason == "stop" else "censored")
            for reason, n in reasons.most_common()
        ],
    )
    for column in ("task", "source"):
        _print_shares(column, requests[column].to_pylist())

    target = figure or dataset / "inspect.png"
    drawing = _draw(sessions[-1], total, censored, generated)
    with replace_file(target) as temporary:
        drawing.savefig(temporary, format="png", dpi=150)
    print(f"figure: {target}")


def _integers(table: pa.Table, column: str) -> IntArray:
    values: IntArray = table[column].to_numpy().astype(np.int64)
    return values


def _lengths(name: str, lengths: IntArray) -> Row:
    quantiles = np.quantile(lengths, (0.5, 0.9, 0.95, 0.99))
    return (name, float(lengths.mean()), *map(float, quantiles), int(lengths.max()))


def _print_table(title: str, header: Row, rows: Iterable[Row]) -> None:
    print(f"## {title}\n")
    print("| " + " | ".join(map(str, header)) + " |")
    print("| --- " + "| ---: " * (len(header) - 1) + "|")
    for row in rows:
        cells = [
            f"{cell:,.1f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int)
            else shown(cell) for cell in row
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")
    print()


def _print_shares(column: str, values: list[str]) -> None:
    counts = Counter(values)
    shown: list[Row] = [
        (name or "(none)", count, f"{count / len(values):.1%}")
        for name, count in counts.most_common(_MOST)
    ]
    if len(counts) > _MOST:
        rest = len(values) - sum(count for _, count in counts.most_common(_MOST))
        shown.append((f"{len(counts) - _MOST} others", rest, f"{rest / len(values):.1%}"))
    _print_table(f"Requests by {column}", (column, "requests", "share"), shown)


def _draw(
    session: Session, total: IntArray, censored: npt.NDArray[np.bool_], generated: IntArray
) -> Figure:
    """Draw the length histogram (as STAR, Figure 2), its ECDF, and rows by progress."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    title = f"{shown(session.model)}: {len(total):,} requests, {len(generated):,} rows"
    figure.suptitle(title, parse_math=False)
    lengths, cumulated, progress = figure.subplots(1, 3)
    edges = np.linspace(0, max(int(total.max()), 1), _BINS + 1)
    for axes in (lengths, cumulated, progress):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e3e6e8")
        axes.set_axisbelow(True)
        axes.set_xlim(0, 1.02 * edges[-1])
    lengths.hist(
        [total[~censored], total[censored]],
        bins=list(edges),
        weights=[np.full(int(part.sum()), 1 / len(total)) for part in (~censored, censored)],
        stacked=True,
        color=[_ENDED, _CUT],
        label=["ended on its own", "cut (lower bound)"],
        **_BARS,
    )
    lengths.yaxis.set_major_formatter(PercentFormatter(1))
    lengths.set(title="Output length", xlabel="output tokens", ylabel="share of requests")
    lengths.legend(frameon=False)
    _draw_ecdf(cumulated, total, censored)
    # Bars as wide as a multiple of k: others would hold more multiples of k by turns.
    width = session.k * max(1, round(float(edges[1]) / session.k))
    steps = np.arange(0, edges[-1] + width, width)
    progress.hist(generated, bins=list(steps), color=_LINE, **_BARS)
    progress.set(title="Where rows were captured", xlabel="generated tokens", ylabel="rows")
    return figure


def _draw_ecdf(axes: Axes, total: IntArray, censored: npt.NDArray[np.bool_]) -> None:
    axes.ecdf(total, color=_LINE, label="all requests")
    if censored.any() and not censored.all():
        axes.ecdf(total[~censored], color=_ENDED, linestyle="--", label="ended by themselves")
    for quantile in (0.5, 0.9):
        length = float(np.quantile(total, quantile))
        axes.plot([0, length, length], [quantile, quantile, 0], color=_MUTED, lw=0.8, ls=":")
        late = length > 0.7 * total.max()
        axes.annotate(
            f"P{100 * quantile:.0f}: {length:,.0f}",
            (length, quantile),
            xytext=(-5 if late else 5, 3 if late else -12),
            textcoords="offset points",
            horizontalalignment="right" if late else "left",
            color=_MUTED,
        )
    axes.set(title="Cumulative distribution", xlabel="output tokens", ylabel="share of requests")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, loc="lower right")
