"""The tables and the figure of `benchmarks.fairbatching_live`."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from rescheduler.simulator.results.report import markdown_table

Result = dict[str, Any]


def summarised(results: list[Result]) -> dict[str, float]:
    """Return every case's figures, and each system's peak, by part of the trace and objectives."""
    figures: dict[str, float] = {}
    for (part, ttft_s, tpot_s), found in _parts(results).items():
        where = f"part{part}_{round(1e3 * ttft_s)}_{round(1e3 * tpot_s)}"
        for one in found:
            case = f"{where}_{one['system']}_{one['load']:g}"
            for name in ("effective", "violated", "rejected", *_percentiles()):
                figures[f"{case}_{name}"] = one[name]
            figures[f"{case}_violated_by_mean"] = _late_by_mean(one)
        for system, peak in _peaks(found).items():
            figures[f"{where}_{system}_peak"] = peak
    return figures


def print_tables(results: list[Result]) -> None:
    rows, peak_rows = [], []
    for (part, ttft_s, tpot_s), found in _parts(results).items():
        where = [str(part), f"{ttft_s:.2f} s, {1e3 * tpot_s:.0f} ms"]
        for one in sorted(found, key=lambda one: float(one["load"])):
            ttft = ", ".join(f"{one[f'ttft_p{p}']:.2f}" for p in (50, 95, 99))
            tpot = ", ".join(f"{1e3 * one[f'tpot_p{p}']:.0f}" for p in (50, 95, 99))
            rejected = one["rejected"] / one["requests"]
            late = [one["violated"], _late_by_mean(one), rejected]
            figures = [f"{one['effective']:.2f}", *(f"{share:.0%}" for share in late)]
            case = [f"{one['load']:.0%}", one["system"]]
            rows.append([*where, *case, *figures, f"{ttft} s", f"{tpot} ms"])
        peaks = _peaks(found)
        best = max((peaks[name] for name in ("vllm", "sarathi") if name in peaks), default=None)
        for system, peak in peaks.items():
            gain = f"{peak / best - 1:+.1%}" if best else ""
            peak_rows.append([*where, system, f"{peak:.2f}", gain])
    where = ["part", "TTFT, TPOT"]
    shown = ["in time, req/s", "late", "late by mean TPOT", "rejected"]
    shown += ["TTFT P50, P95, P99", "TPOT P50, P95, P99"]
    print("", *markdown_table([*where, "load", "system", *shown], rows, "rlrl"), sep="\n")
    heads = [*where, "system", "peak, requests/s", "against the best baseline"]
    print("", *markdown_table(heads, peak_rows, "rll"), sep="\n")


def draw(results: list[Result], path: Path) -> None:
    """Draw the requests in time over the load, a line a system, as the paper's Figure 5."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    lines = defaultdict(list)
    for one in next(iter(_parts(results).values())):
        lines[one["system"]].append((100 * one["load"], one["effective"]))
    for system, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), "o-", label=system.replace("_", " "))
    axis.set(xlabel="load, % of capacity", ylabel="requests/s that meet both objectives")
    axis.set_ylim(bottom=0)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})
    plt.close(figure)


def _late_by_mean(one: Result) -> float:
    """Return the share that misses an objective when TPOT is the mean over a request's tokens."""
    late = [
        bool(request["error"])
        or request["ttft"] > one["ttft_s"]
        or (request["tpot"] or 0.0) > one["tpot_s"]
        for request in one["served"]
    ]
    return late.count(True) / len(late)


def _percentiles() -> list[str]:
    return [f"{name}_p{p}" for name in ("ttft", "tpot") for p in (50, 95, 99)]


def _parts(results: list[Result]) -> dict[tuple[int, float, float], list[Result]]:
    parts = defaultdict(list)
    for one in results:
        parts[one["round"], one["ttft_s"], one["tpot_s"]].append(one)
    return dict(sorted(parts.items()))


def _peaks(results: list[Result]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for one in results:
        peaks[one["system"]] = max(peaks.get(one["system"], 0.0), one["effective"])
    return peaks
