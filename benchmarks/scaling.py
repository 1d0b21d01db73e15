"""Replicas over time by forecast against rules that react, where replicas take minutes to start.

    python -m benchmarks.scaling [--quick] [--report] [--traces DIR] [--out FOLDER] --json OUT
        [--png OUT]

Two traces with as much traffic as three or four replicas need at the busiest time of the season:
short answers (Azure's conversations) and long ones (DeepSeek-R1's reasoning), on smooth days and on
days with surges at the same times every day; without ``--traces`` drawn lengths. Every rule has
the cheapest target that keeps 99% of the requests in time on each of four days of training, and is
compared on four others. The rule of waiting requests fails, slowly: only long answers have it.
Where answers are long and replicas take eight minutes to start, the rules that use forecasts of
lengths get others, too: by age alone, and exact; and the rule of KV usage stops other replicas
first, which move or cut what they still run.

``hours_CELL_ARM`` in the file is the change of GPU-hours against the rule of KV usage, in percent,
paired by day, and ``in_time_CELL_ARM`` the share of requests in time. Cells are kept in the folder
and not simulated again while their settings stay the same; ``--report`` only prints what is there.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from benchmarks.support.report import Cells, arguments, resumable, write_report
from rescheduler.emulation.emulate_options import read_machine
from rescheduler.scaling.days import DayProfile
from rescheduler.scaling.outcome import (
    DRAWN,
    ShownDay,
    contrast,
    contrasts,
    document,
    draw_days,
    label,
    shown_day,
)
from rescheduler.scaling.rules import RULES
from rescheduler.scaling.scale import prepared, recorded_trace
from rescheduler.scaling.scale_config import ScaleConfig
from rescheduler.scaling.simulated_day import Operation
from rescheduler.scaling.study import FIXED, Arm, Found, ScalingStudy
from rescheduler.simulator.results.figures import save_figure
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.workloads.trace import ResampledTrace, first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile, create_trace

SURGES = DayProfile(surges=6)
CELLS = (
    ("short", "surges", SURGES, 480.0),
    ("long", "surges", SURGES, 480.0),
    ("long", "surges", SURGES, 120.0),
    ("short", "smooth", DayProfile(), 480.0),
)
OTHERS = (
    *(Arm("load_ahead", knows) for knows in ("age", "exact")),
    *(Arm("load_ahead+arrivals", knows) for knows in ("age", "exact")),
)
TRACES = {
    "short": ("azure2023_conv.csv.gz", "burstgpt_like", 3.0),
    "long": ("servegen_deepseek_r1_sampled.csv.gz", "star", 4.0),
}


class Cell(NamedTuple):
    name: str
    trace: str
    config: ScaleConfig
    further: bool


def main() -> None:
    parser = arguments("replicas by forecast against rules that react")
    parser.add_argument("--report", action="store_true", help="simulate nothing")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="with the published traces")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), metavar="FOLDER")
    parser.add_argument("--png", type=Path, metavar="OUT", help="draw a day of each cell")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with resumable(), Progress() as progress:
        for cell in progress.track(list(cells(options.quick)), description="simulating"):
            settings = {"cell": asdict(cell.config), "further": cell.further}
            kept = Cells(options.out, settings)
            name = cell.name if not options.quick else f"quick_{cell.name}"
            if kept.read(name) is None and not options.report:
                try:
                    kept.write(name, simulated(cell, options.traces))
                except ValueError as error:  # a trace that cannot be read
                    parser.error(str(error))
            if kept.read(name) is not None:
                found[cell.name] = kept.read(name)
    figures: dict[str, float | str] = {}
    for name, result in found.items():
        print(f"\n### {name}\n{result['table']}\n{result['parts']}\n{result['victims']}")
        figures |= {f"{kind}_{name}_{arm}": value for kind, arm, value in result["figures"]}
    kept_out = ("day", "figures")
    shown = {
        name: {key: value for key, value in one.items() if key not in kept_out}
        for name, one in found.items()
    }
    write_report("scaling", figures, options.json, cells=shown)
    if options.png is not None:
        days = {
            name.replace("_", ", "): ShownDay(*map(_arrays, one["day"]))
            for name, one in found.items()
        }
        print(f"wrote {save_figure(draw_days(days), options.png)}")


def cells(quick: bool) -> Iterator[Cell]:
    for trace, kind, day, start in CELLS:
        rules = [rule for rule in (FIXED, *RULES) if trace == "long" or rule != "queue"]
        peak = TRACES[trace][2]
        config = ScaleConfig(rules, [start], day=day, peak_replicas=peak, training=4, seeds=4)
        if quick:
            config = replace(config, day=replace(day, history=3), period_hours=1.0)
            config = replace(config, training=1, seeds=2, peak_replicas=2.0)
        further = trace == "long" and start == 480
        yield Cell(f"{trace}_{kind}_{start:g}s", trace, config, further)


def requests_of(name: str, folder: Path | None) -> ResampledTrace:
    file, generator, _ = TRACES[name]
    if folder is not None:
        return recorded_trace(TraceFile(folder / file))
    drawn = create_trace(generator, requests=5000)
    return ResampledTrace(generator, first_requests(drawn, np.random.default_rng(0), 5000), 5000)


def simulated(cell: Cell, folder: Path | None) -> dict[str, Any]:
    machine = read_machine(cell.config.machine)
    study = prepared(cell.config, requests_of(cell.trace, folder), machine)
    arms = [Arm(rule, cell.config.lengths) for rule in cell.config.names]
    usage = next(arm for arm in arms if arm.rule == "kv_usage")
    found = study.compare([*arms, *OTHERS] if cell.further else arms, cell.config.start_seconds[0])
    base = found[usage]
    figures: list[tuple[str, str, float]] = []
    for arm, one in found.items():
        figures.append(("hours", label(arm), contrast(one, base).hours))
        in_time = float(np.mean([day["slo"] for day in one.days.values()]))
        figures.append(("in_time", label(arm), in_time))
    needed = study.needed(study.seeds[0])
    day = shown_day({arm: found[arm] for arm in arms}, needed, DRAWN)
    return {
        "figures": figures,
        "table": rows(found, machine.gpus),
        "parts": "\n".join(f"- {text}: {one.text}" for text, one in contrasts(found).items()),
        "victims": victims(study, base, usage, cell) if cell.further else "",
        "requests_a_second": study.traffic.mean,
        "day": [day.needed.tolist(), {name: paid.tolist() for name, paid in day.paid.items()}],
        "found": document(found, machine.gpus),
    }


def rows(found: dict[Arm, Found], gpus: int) -> str:
    base = next(one for arm, one in found.items() if arm.rule == "kv_usage")
    lines = []
    for arm, one in found.items():
        mean = {name: np.mean([day[name] for day in one.days.values()]) for name in _figures(one)}
        against = contrast(one, base).text.removeprefix("GPU-hours ")
        lines.append(
            [
                label(arm) + ("" if max(t.slo for t in one.tried) >= 0.99 else " (fails)"),
                f"{one.target:.3g}",
                f"{100 * mean['slo']:.2f}",
                f"{mean['ttft_p99']:.1f}",
                f"{gpus * mean['hours']:.0f}",
                "" if one is base else against,
                f"{mean['starts']:.0f}",
                f"{mean['moved']:.0f}",
            ]
        )
    heads = ("rule", "target", "in time, %", "P99 TTFT, s", "GPU-hours", "against kv_usage")
    return "\n".join(markdown_table([*heads, "starts", "moved"], lines))


def victims(study: ScalingStudy, base: Found, arm: Arm, cell: Cell) -> str:
    """Return a table of which replica stops first, and of what becomes of its requests."""
    at_once = replace(study.operation, start_seconds=cell.config.start_seconds[0])
    waits = replace(at_once, drain_seconds=600.0)
    compared: list[tuple[str, Arm, Operation, bool]] = [
        ("soonest, recorded", arm, at_once, True),
        ("soonest, age", arm._replace(lengths="age"), at_once, True),
        ("soonest, exact", arm._replace(lengths="exact"), at_once, True),
        ("newest", arm, replace(at_once, victim="newest"), True),
        ("random", arm, replace(at_once, victim="random"), True),
        ("soonest, recorded", arm, waits, False),
        ("newest", arm, replace(waits, victim="newest"), False),
    ]
    lines = []
    for name, one, operation, moves in compared:
        study.machine = study.machine._replace(moves=moves)
        days = [study.simulate(one, operation, base.target, seed).figures for seed in study.seeds]
        mean = {key: float(np.mean([day[key] for day in days])) for key in days[0]}
        end = "moves" if moves else "cut"
        lines.append(
            [
                name,
                f"{operation.drain_seconds:g} s, then {end}",
                f"{mean['moved']:.0f}",
                f"{mean['cut']:.0f}",
                f"{mean['drain_hours']:.2f}",
                f"{mean['hours']:.1f}",
                f"{100 * mean['slo']:.2f}",
            ]
        )
    study.machine = study.machine._replace(moves=True)
    heads = ["stopped first", "requests", "moved", "cut", "hours draining", "hours", "in time, %"]
    return "\n".join(markdown_table(heads, lines, "ll"))


def _figures(one: Found) -> list[str]:
    return list(next(iter(one.days.values())))


def _arrays(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: np.array(values) for name, values in part.items()}
    return np.array(part)


if __name__ == "__main__":
    main()
