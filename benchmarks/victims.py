"""Whom to suspend in STAR's setting: means over seeds of a simulation, and paired differences.

    headway simulate --config configs/simulate/victims.yaml --out runs/victims
    python -m benchmarks.victims runs/victims [--json OUT]

Prints a table of each rate: means with half a 95% interval over seeds. Beside them stand, with each
victim's, the changes against `newest` with the same moves, paired by seed, and the worst ratio of a
seed's P99 of TPOT to that of no moves and `newest`.
"""

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.report import Rounds, arguments, by_round, change, mean_of, write_report
from rescheduler.simulator.results.report import markdown_table

FIGURES = {
    "tpot_p99": ("P99 TPOT, ms", 1e3),
    "ttft_p99": ("P99 TTFT, s", 1.0),
    "latency": ("mean latency, s", 1.0),
    "latency_p99": ("P99 latency, s", 1.0),
    "goodput": ("goodput, /s", 1.0),
    "itl_max": ("longest gap, s", 1.0),
    "preemptions": ("preemptions", 1.0),
}
PAIRED = ("tpot_p99", "latency", "goodput", "itl_max")
BASE = "newest"


class Arm(NamedTuple):
    rate: str
    moves: str
    victim: str


def read(folder: Path) -> dict[Arm, Rounds]:
    """Return the figures of all runs of a folder, by arm and seed."""
    arms: dict[Arm, dict[int, dict[str, float]]] = {}
    for path in sorted((folder / "cells").glob("*.json")):
        run = json.loads(path.read_text())
        moves, *varied = run["title"].split(", ")
        values = dict(one.split("=") for one in varied if "=" in one)
        arm = Arm(values["arrivals.rate"], moves, values["cluster.victim"])
        arms.setdefault(arm, {})[run["seed"]] = {name: run["figures"][name] for name in FIGURES}
    return dict(sorted(arms.items()))


def main() -> None:
    parser = arguments("whom to suspend in STAR's setting", quick=False)
    parser.add_argument("runs", type=Path, help="folder that `headway simulate --out` wrote")
    options = parser.parse_args()
    arms = read(options.runs)
    if not arms:
        parser.error(f"{options.runs} has no runs: headway simulate --out {options.runs}")
    figures, tables = dict[str, float](), []
    for rate in dict.fromkeys(arm.rate for arm in arms):
        rows = []
        for arm, runs in arms.items():
            if arm.rate != rate:
                continue
            name, cells = "_".join(arm), []
            for figure, (_, factor) in FIGURES.items():
                mean = mean_of(by_round(runs, figure))
                figures |= mean.figures(f"{figure}_{name}")
                cells.append(f"{factor * mean.mean:.3g} ± {factor * mean.half:.2g}")
            for figure in PAIRED:
                base = arms[arm._replace(victim=BASE)]
                difference = change(runs, base, figure)
                figures |= difference.figures(f"{figure}_change_{name}")
                cells.append(f"{difference.mean:+.1f} ± {difference.half:.1f}%")
            none = arms[Arm(rate, "none", BASE)]
            worst = max(run["tpot_p99"] / none[seed]["tpot_p99"] for seed, run in runs.items())
            figures[f"worst_seed_{name}_against_none"] = worst
            rows.append([arm.moves, arm.victim, f"{len(runs)}", *cells, f"{worst:.2f}"])
        heads = ["moves", "victim", "seeds", *(title for title, _ in FIGURES.values())]
        heads += [f"{name} against {BASE}" for name in PAIRED]
        heads.append("worst seed")
        tables.append("\n".join([f"### {rate} requests/s", *markdown_table(heads, rows)]))
    print("\n\n".join(tables))
    write_report("victims", figures, options.json, tables=tables)


if __name__ == "__main__":
    main()
