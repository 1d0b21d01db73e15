"""The tables and the figure of `benchmarks.fairbatching_live`."""

from collections import defaultdict
from math import isnan, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

__all__ = ["draw", "print_tables", "summarised"]

Result = dict[str, Any]


def summarised(results: list[Result]) -> dict[str, float]:
    """Return every system's figures at every load, and its peak, under every pair of objectives.

    Means over the rounds; ``effective_se`` is the standard error, where there are several.
    """
    merged = _merged(results)
    figures: dict[str, float] = {}
    for one in merged:
        ttft, tpot = (round(1e3 * seconds) for seconds in _objectives(one))
        case = f"{one['system']}_{one['load']:g}_{ttft}_{tpot}"
        for name in ("effective", "effective_se", "violated", "rejected", *_percentiles()):
            if not isnan(one[name]):
                figures[f"{case}_{name}"] = one[name]
        figures[f"{case}_violated_by_mean"] = one["violated_by_mean"]
    for (ttft_s, tpot_s), found in _grid(merged).items():
        for system, peak in _peaks(found).items():
            figures[f"{system}_{round(1e3 * ttft_s)}_{round(1e3 * tpot_s)}_peak"] = peak
    return figures


def print_tables(results: list[Result]) -> None:
    """Print a row a case, and the peaks of every pair of objectives beside the best baseline's."""
    merged = _merged(results)
    columns = ("in time, req/s", "late", "late by mean TPOT", "rejected")
    print(
        f"\n| TTFT, TPOT | load | system | {' | '.join(columns)} | "
        "TTFT P50, P95, P99 | TPOT P50, P95, P99 |"
    )
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for one in sorted(merged, key=lambda one: (_objectives(one), one["load"])):
        ttft = ", ".join(f"{one[f'ttft_p{p}']:.2f}" for p in (50, 95, 99))
        tpot = ", ".join(f"{1e3 * one[f'tpot_p{p}']:.0f}" for p in (50, 95, 99))
        print(
            f"| {one['ttft_s']:.2f} s, {1e3 * one['tpot_s']:.0f} ms | {one['load']:.0%} | "
            f"{one['system']} | {one['effective']:.2f} ± {one['effective_se']:.2f} | "
            f"{one['violated']:.0%} | {one['violated_by_mean']:.0%} | "
            f"{one['rejected'] / one['requests']:.0%} | {ttft} s | {tpot} ms |"
        )
    print("\n| TTFT | TPOT | system | peak, requests/s | against the best baseline |")
    print("|---:|---:|---|---:|---:|")
    for (ttft_s, tpot_s), found in sorted(_grid(merged).items()):
        peaks = _peaks(found)
        best = max((peaks[name] for name in ("vllm", "sarathi") if name in peaks), default=None)
        for system, peak in peaks.items():
            gain = f"{peak / best - 1:+.1%}" if best else ""
            print(f"| {ttft_s:.2f} s | {1e3 * tpot_s:.0f} ms | {system} | {peak:.2f} | {gain} |")


def draw(results: list[Result], path: Path) -> None:
    """Draw the requests in time over the load, a line a system, as the paper's Figure 5."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    lines = defaultdict(list)
    for one in _merged(results):
        if _objectives(one) == _objectives(results[0]):
            lines[one["system"]].append((100 * one["load"], one["effective"], one["effective_se"]))
    for system, points in lines.items():
        load, effective, error = zip(*sorted(points), strict=True)
        axis.errorbar(load, effective, error, fmt="o-", capsize=2, label=system.replace("_", " "))
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


def _objectives(one: Result) -> tuple[float, float]:
    return one["ttft_s"], one["tpot_s"]


def _merged(results: list[Result]) -> list[Result]:
    """Return a result for all rounds of a case, with their means."""
    cases = defaultdict(list)
    for one in results:
        cases[one["system"], one["load"], *_objectives(one)].append(one)
    merged = []
    for found in cases.values():
        mean = dict(found[0])
        for name in ("requests", "rejected", "effective", "violated", *_percentiles()):
            mean[name] = fmean(one[name] for one in found)
        mean["violated_by_mean"] = fmean(map(_late_by_mean, found))
        effective = [one["effective"] for one in found]
        mean["effective_se"] = stdev(effective) / sqrt(len(found)) if len(found) > 1 else nan
        merged.append(mean)
    return merged


def _grid(merged: list[Result]) -> dict[tuple[float, float], list[Result]]:
    grid = defaultdict(list)
    for one in merged:
        grid[_objectives(one)].append(one)
    return dict(grid)


def _peaks(merged: list[Result]) -> dict[str, float]:
    """Return the most requests in time that each system reaches at any load."""
    peaks: dict[str, float] = {}
    for one in merged:
        peaks[one["system"]] = max(peaks.get(one["system"], 0.0), one["effective"])
    return peaks
