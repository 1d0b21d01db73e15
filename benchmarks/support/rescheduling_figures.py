"""The tables and the figure of `benchmarks.live_rescheduling`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.live_machine import Machine
from benchmarks.support.live_runs import FULL
from benchmarks.support.report import Estimate, mean_of, paired_difference
from rescheduler.simulator.results.report import markdown_table

Rounds = dict[str, dict[int, dict[str, Any]]]
"""Results by arm and round."""

TTFT_TIMES, TPOT_TIMES = 20.0, 4.0

FIGURES = (
    *("goodput", "met", "throughput", "tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99", "gap_p99"),
    *("preemptions", "migrations", "kv_use", "kv_full_share", "kv_difference", "seconds"),
    *("failed", "changed_answers"),
)
PAIRS = (
    ("star", "star_no_prediction"),
    ("survival", "star_no_prediction"),
    ("survival", "star"),
    ("headroom", "reserve"),
    ("headroom_survival", "reserve"),
    ("headroom_survival", "headroom"),
    ("headroom_survival", "survival"),
)
"""Arms that are compared beside all with the first."""

COLUMNS = {
    "goodput, req/min": ("goodput", 60.0, ".1f"),
    "TTFT P99, s": ("ttft_p99", 1.0, ".1f"),
    "TPOT P99, ms": ("tpot_p99", 1e3, ".0f"),
    "longest pause P99, s": ("gap_p99", 1.0, ".1f"),
    "preemptions": ("preemptions", 1.0, ".1f"),
    "KV in use, %": ("kv_use", 100.0, ".0f"),
    "migrations": ("migrations", 1.0, ".1f"),
    "answers changed": ("changed_answers", 1.0, ".0f"),
}

Estimates = dict[float, dict[str, dict[str, Estimate]]]
"""By load; by arm, or by "arm - other"; by figure."""


def summarised(loads: dict[float, Rounds], machine: Machine) -> tuple[dict[str, float], Estimates]:
    """Return every mean and difference by name, with half its interval, and as estimates.

    Goodput counts requests whose first token came within 20 times, and whose further tokens
    within 4 times, what those of a request take that is alone.
    """
    figures: dict[str, float] = {}
    estimates: Estimates = {}
    for load, rounds in loads.items():
        values = {arm: _values(found, rounds, machine) for arm, found in rounds.items()}
        first = next(iter(values))
        pairs = [(arm, first) for arm in values if arm != first]
        pairs += [pair for pair in PAIRS if set(pair) <= set(values) and pair not in pairs]
        estimates[load] = {
            arm: {name: mean_of(by_round[name]) for name in FIGURES}
            for arm, by_round in values.items()
        } | {
            f"{arm} - {other}": {
                name: paired_difference(values[arm][name], values[other][name]) for name in FIGURES
            }
            for arm, other in pairs
        }
        for what, found in estimates[load].items():
            for name, one in found.items():
                key = f"load{100 * load:g}_{what.replace(' - ', '_minus_')}_{name}"
                figures[key] = one.mean
                if one.rounds > 1:
                    figures[f"{key}_half_interval"] = one.half
                figures[f"{key}_rounds"] = one.rounds
    return figures, estimates


def _values(
    found: dict[int, dict[str, Any]], rounds: Rounds, machine: Machine
) -> dict[str, dict[int, float]]:
    ttft, tpot = TTFT_TIMES * machine.alone_ttft, TPOT_TIMES * machine.alone_tpot
    values: dict[str, dict[int, float]] = {name: {} for name in FIGURES}
    for number, result in found.items():
        requests = result["requests"]
        in_time = sum(_in_time(one, ttft, tpot) for one in requests)
        first = next(by_round[number] for by_round in rounds.values() if number in by_round)
        own = {
            "met": in_time / len(requests),
            "goodput": in_time / result["seconds"],
            "changed_answers": sum(
                one["text"] != other["text"]
                for one, other in zip(requests, first["requests"], strict=True)
            ),
        }
        for name in FIGURES:
            values[name][number] = float(own[name] if name in own else result[name])
    return values


def _in_time(request: dict[str, Any], ttft_s: float, tpot_s: float) -> bool:
    if request["error"] or request["ttft"] is None or request["ttft"] > ttft_s:
        return False
    return request["tpot"] is None or request["tpot"] <= tpot_s


def print_tables(estimates: Estimates, arms: Sequence[str]) -> None:
    for load, found in estimates.items():
        for title, rows in (
            ("means", [name for name in found if name in arms]),
            ("differences, paired by round", [name for name in found if name not in arms]),
        ):
            print(f"\nload {load:.0%}, {title}, with half a 95% interval; bold: it excludes 0")
            cells = []
            for row in rows:
                figures = [
                    _cell(found[row][name], scale, spec, bold=row not in arms)
                    for name, scale, spec in COLUMNS.values()
                ]
                cells.append([row, *figures, str(found[row]["goodput"].rounds)])
            print(*markdown_table(["", *COLUMNS, "rounds"], cells), sep="\n")


def _cell(one: Estimate, scale: float, spec: str, bold: bool) -> str:
    sign = "+" if bold else ""
    text = f"{scale * one.mean:{sign}{spec}}"
    if one.rounds > 1:
        text += f" ± {scale * one.half:{spec}}"
    return f"**{text}**" if bold and one.rounds > 1 and one.is_certain else text


def draw(rounds: Rounds, path: Path) -> None:
    """Draw the fullest decode engine's KV usage of each arm's first round, as STAR's Figure 12."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(rounds), 1, sharex=True, sharey=True, figsize=(8, 1.6 * len(rounds)), squeeze=False
    )
    for axis, (arm, found) in zip(axes[:, 0], rounds.items(), strict=True):
        result = found[min(found)]
        samples = result["samples"]
        seconds = np.array([one["seconds"] for one in samples])
        kv = np.array([one["kv"] for one in samples])
        axis.plot(seconds, 100 * kv.max(axis=1), color="tab:blue", linewidth=1.2)
        axis.plot(seconds, 100 * kv.min(axis=1), color="tab:blue", linewidth=0.7, alpha=0.4)
        axis.axhline(100 * FULL, color="black", linestyle="--", linewidth=0.7)
        axis.fill_between(
            seconds, 0, 100, where=kv.max(axis=1) > FULL, color="tab:red", alpha=0.2, step="mid"
        )
        for counted, colour in (("migrations", "tab:green"), ("preemptions", "tab:red")):
            counts = np.array([one[counted] for one in samples])
            at = seconds[np.flatnonzero(np.diff(counts, prepend=0))]
            axis.plot(at, np.full(len(at), 106.0), "|", color=colour, markersize=6)
        axis.set_title(
            f"{arm.replace('_', ' ')}: {result['migrations']:.0f} migrations, "
            f"{result['preemptions']:.0f} preemptions",
            fontsize=9,
            loc="left",
        )
        axis.set_ylim(0, 112)
    axes[-1, 0].set_xlabel("seconds; ticks: migrations (green), preemptions (red); red: full")
    figure.supylabel("KV cache in use, %: fuller and emptier decode engine", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})
    plt.close(figure)
