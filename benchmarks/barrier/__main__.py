"""Whether data-parallel ranks wait for the fullest of them, and what routing makes of it.

    python -m benchmarks.barrier [--quick] [--only {grid,routing}] [--rounds N] [--out FOLDER]
        [--json OUT] [--png OUT]

Two engines of a small mixture of experts with random weights compute on a core each. Contexts come
out of the prefix cache, as they come from a prefill instance, so that engines decode all the time.

- *Grid*: both decode loads that differ in requests and in tokens of context, and the time of their
  steps is compared, of two ranks of a group (which split the experts) and of two engines without a
  group, on the same cores. What the latter owe to each other is not the barrier's.
- *Routing*: twenty requests of mixed lengths are under way all the time, twelve of which are
  decoded. They go through vLLM's own balancer (one server for both ranks), in whose engines the
  others wait; to the two ranks' own servers in turns; and through `headway serve` before these, in
  which they wait themselves. In a round all have the same requests; ratios are of the same rounds.

Nothing else should run. What is finished is kept in the folder, and not measured again: the same
command goes on after an interruption.
"""

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.barrier.engines import ENGINE, Kind, running
from benchmarks.barrier.findings import (
    draw,
    grid_figures,
    grid_table,
    routing_figures,
    routing_table,
    verdict,
)
from benchmarks.barrier.grid import POINTS, Measured, fill_caches, measured
from benchmarks.barrier.routing import ARMS, BALANCER, asks_of, served_by
from benchmarks.support.report import Cells, arguments, write_report

_GRIDS: tuple[Kind, ...] = ("ranks", "lone")
_STEPS, _REQUESTS, _ROUNDS = 40, 60, 6
"""Steps of a point, requests of a run, rounds of an arm."""
_QUICK_STEPS, _QUICK_REQUESTS = 10, 24


def main() -> None:
    parser = arguments("whether data-parallel ranks wait for each other")
    parser.prog = "python -m benchmarks.barrier"
    parser.add_argument("--only", choices=["grid", "routing"], help="default: both")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("runs/barrier"))
    parser.add_argument("--png", type=Path, help="draw the grid here")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are required, one for each rank")
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: an interval needs them")
    if options.quick:
        options.out /= "quick"
        options.rounds = 2
    figures: dict[str, float] = {}
    further: dict[str, Any] = {}
    try:
        if options.only != "routing":
            grids = {kind: measure_grid(kind, options) for kind in _GRIDS}
            said = verdict(grids)
            print(f"\n{grid_table(grids)}\n\n{said}")
            figures |= grid_figures(grids)
            further |= {"verdict": said.split("\n"), "grid": msgspec.to_builtins(grids)}
            if options.png is not None:
                draw(grids, options.png)
        if options.only != "grid":
            rounds = measure_routing(options)
            print(f"\n{routing_table(rounds)}")
            figures |= routing_figures(rounds)
            further["rounds"] = rounds
    except RuntimeError as error:
        sys.exit(f"{error}\nThe same command goes on with what is missing.")
    write_report("barrier", figures, options.json, **further)


def measure_grid(kind: Kind, options: Namespace) -> list[Measured]:
    points = POINTS[::5] if options.quick else POINTS
    steps = _QUICK_STEPS if options.quick else _STEPS
    cells = Cells(options.out / "grid" / kind, {**_engine(), "steps": steps})
    missing = [point for point in points if cells.read(point.name) is None]
    if missing:
        with running(kind, options.out) as engines:
            asyncio.run(fill_caches(engines))
            for number, point in enumerate(missing):
                found = asyncio.run(measured(engines, point, steps))
                cells.write(point.name, msgspec.to_builtins(found))
                _progress(f"{kind} {number + 1}/{len(missing)} {point.name}", found.seconds)
    return [msgspec.convert(cells.read(point.name), Measured) for point in points]


def measure_routing(options: Namespace) -> dict[str, dict[int, dict[str, float]]]:
    requests = _QUICK_REQUESTS if options.quick else _REQUESTS
    cells = Cells(options.out / "routing", {**_engine(), "requests": requests, "arms": ARMS})
    runs = [
        (number, arm) for number in range(options.rounds) for arm in np.roll(list(ARMS), -number)
    ]
    missing = [run for run in runs if cells.read(_name(*run)) is None]
    if missing:
        with ExitStack() as stack:
            balanced = stack.enter_context(running("balanced", options.out))
            ranks = stack.enter_context(running("ranks", options.out))
            for engines in (balanced, ranks):
                asyncio.run(fill_caches(engines))
            for done, (number, arm) in enumerate(missing):
                engines = balanced if arm == BALANCER else ranks
                found = served_by(engines, arm, asks_of(number, requests), options.out)
                cells.write(_name(number, arm), found)
                shown = [found[name] for name in ("throughput", "tpot_mean", "fullest")]
                _progress(f"routing {done + 1}/{len(missing)} {_name(number, arm)}", shown)
    return {
        arm: {number: cells.read(_name(number, arm)) for number in range(options.rounds)}
        for arm in ARMS
    }


def _engine() -> dict[str, Any]:
    """Return what results depend on; where this checkout is does not matter."""
    return {"engine": msgspec.to_builtins(replace(ENGINE, environment={}))}


def _name(number: int, arm: str) -> str:
    return f"round-{number}/{arm}"


def _progress(what: str, values: Sequence[float]) -> None:
    print(f"{what}: {', '.join(f'{value:.4g}' for value in values)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
