"""The table and the figure of `benchmarks.live_rescheduling`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FULL", "draw", "print_table", "summarised"]

FULL = 0.99
"""Share of the KV cache from which on it is full, as in STAR's Figure 12."""

SUMMARISED = (
    *("goodput", "met", "throughput", "tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99", "gap_p99"),
    *("preemptions", "migrations", "kv_full_share", "kv_difference", "seconds", "failed"),
)


def summarised(
    rounds: dict[str, list[dict[str, Any]]], ttft_s: float, tpot_s: float
) -> dict[str, float]:
    """Return every arm's means over its rounds, and their standard errors.

    Args:
        rounds: of every arm.
        ttft_s: longest time to the first token of a request that is in time.
        tpot_s: its longest mean time per further token.
    """
    figures: dict[str, float] = {"rounds": min(len(found) for found in rounds.values())}
    for arm, found in rounds.items():
        for result in found:
            in_time = sum(_in_time(one, ttft_s, tpot_s) for one in result["requests"])
            result["met"] = in_time / len(result["requests"])
            result["goodput"] = in_time / result["seconds"]
        for name in SUMMARISED:
            values = [result[name] for result in found]
            figures[f"{arm}_{name}"] = float(np.mean(values))
            if len(values) > 1:
                error = float(np.std(values, ddof=1)) / len(values) ** 0.5
                figures[f"{arm}_{name}_error"] = error
        figures[f"{arm}_changed_answers"] = sum(
            one["text"] != other["text"]
            for result, first in zip(found, rounds[next(iter(rounds))], strict=False)
            for one, other in zip(result["requests"], first["requests"], strict=True)
        )
    return figures


def _in_time(request: dict[str, Any], ttft_s: float, tpot_s: float) -> bool:
    if request["error"] or request["ttft"] is None or request["ttft"] > ttft_s:
        return False
    return request["tpot"] is None or request["tpot"] <= tpot_s


def print_table(figures: dict[str, float], arms: Sequence[str]) -> None:
    """Print a row an arm."""
    columns = {
        "goodput, req/min": ("goodput", 60.0, ".1f"),
        "in time": ("met", 100.0, ".0f"),
        "TPOT P99, ms": ("tpot_p99", 1e3, ".0f"),
        "TPOT P50, ms": ("tpot_p50", 1e3, ".0f"),
        "longest pause P99, s": ("gap_p99", 1.0, ".1f"),
        "TTFT P99, s": ("ttft_p99", 1.0, ".1f"),
        "preemptions": ("preemptions", 1.0, ".1f"),
        "migrations": ("migrations", 1.0, ".1f"),
        "KV full": ("kv_full_share", 100.0, ".0f"),
    }
    print(f"\n| arm | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for arm in arms:
        cells = []
        for name, scale, spec in columns.values():
            error = figures.get(f"{arm}_{name}_error")
            around = "" if error is None else f" ± {scale * error:{spec}}"
            percent = "%" if name in ("met", "kv_full_share") else ""
            cells.append(f"{scale * figures[f'{arm}_{name}']:{spec}}{around}{percent}")
        print(f"| {arm} | {' | '.join(cells)} |")


def draw(rounds: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the fullest decode engine's KV usage of each arm's first round, as STAR's Figure 12."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(rounds), 1, sharex=True, sharey=True, figsize=(8, 1.6 * len(rounds)), squeeze=False
    )
    for axis, (arm, found) in zip(axes[:, 0], rounds.items(), strict=True):
        samples = found[0]["samples"]
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
            f"{arm.replace('_', ' ')}: {found[0]['migrations']:.0f} migrations, "
            f"{found[0]['preemptions']:.0f} preemptions",
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
