"""`headway simulate`: routing policies on the same simulated cluster, side by side."""

import json as json_format
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_collection.atomic_file import replace_file, write_text_atomically
from predictor.compilation import is_kept
from rescheduler.commands.interrupts import held_interrupts
from rescheduler.simulator.config.config_parser import config_parser, parsed_config
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.engine.engine import advance
from rescheduler.simulator.results.figures import (
    draw_comparison,
    draw_loads,
    draw_power,
    save_figure,
)
from rescheduler.simulator.results.metrics import Summary, run_metrics, summarise
from rescheduler.simulator.results.report import about, document, markdown_report, terminal_table
from rescheduler.simulator.results.rescheduling_figures import draw_rescheduling
from rescheduler.simulator.results.run_result import RequestRecords, RunResult
from rescheduler.simulator.run_setup import Contender, create_contenders, run_setup
from rescheduler.simulator.simulation import run

__all__ = [
    "compile_notice",
    "progress_bar",
    "refuse_foreign_folder",
    "simulate",
    "simulate_command",
]

_DESCRIPTION = """Simulate routing policies on one cluster and compare them. Every key of the
configuration can be given on the command line: --cluster.instances 32 --trace.requests 5000."""


def simulate_command(arguments: list[str]) -> int:
    """Run `simulate` with a command line; return the exit status."""
    parser = config_parser("simulate", _DESCRIPTION)
    parser.add_function_arguments(simulate, skip={"config", "overwrite"})
    parser.add_argument("--overwrite", action="store_true", help="write among other files too")
    given = parser.parse_args(arguments)
    config = parsed_config(parser, given)
    return simulate(config, given.json, given.out, given.overwrite)


def simulate(
    config: SimulationConfig,
    json: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
) -> int:
    """Simulate every policy with every seed, print a comparison; return the exit status.

    Ctrl-C ends it early and keeps the runs that have finished.

    Args:
        config: of the simulation.
        json: write the figures to this file.
        out: write figures, tables and pictures to this folder, and every request to
            requests.parquet in it. A folder of an earlier simulation is replaced.
        overwrite: write to ``out`` whatever is in it.

    Raises:
        ValueError: a configuration or a trace that cannot be simulated, or a folder that is
            not to be overwritten.
    """
    contenders = create_contenders(run_setup(config))
    if out is not None:
        refuse_foreign_folder(out, "simulate", "results.json", overwrite)
        out.mkdir(parents=True, exist_ok=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, list[dict[str, float]]] = {label: [] for label in contenders}
    drawn: list[RunResult] = []
    with _requests_file(out / "requests.parquet" if out else None) as append:

        def keep(result: RunResult) -> None:
            append(result)
            figures[result.policy].append(run_metrics(result, config.slo))
            if result.seed == 0:  # for the pictures, which need no requests
                nobody = RequestRecords._make(column[:0] for column in result.requests)
                drawn.append(replace(result, requests=nobody))

        interrupted = _run_all(contenders, config.seeds, keep)
        if not drawn:  # and leave nothing behind
            raise KeyboardInterrupt
    summaries = {label: summarise(runs) for label, runs in figures.items() if runs}
    results = document(summaries, about("simulate", config))
    text = json_format.dumps(results, indent=1, allow_nan=False) + "\n"
    report = markdown_report(summaries, config)
    if out is not None:
        pictures = [
            save_figure(draw_comparison(summaries), out / "comparison.png"),
            save_figure(draw_loads(drawn), out / "loads.png"),
            save_figure(draw_power(drawn), out / "power.png"),
        ]
        if any(run.plans for run in drawn):
            moving = draw_rescheduling(drawn, config.cluster.capacity_tokens)
            pictures.append(save_figure(moving, out / "rescheduling.png"))
        write_text_atomically(out / "table.md", markdown_report(summaries, config, pictures))
        write_text_atomically(out / "results.json", text)
    if json is not None:
        write_text_atomically(json, text)
    _show(summaries, report)
    for path in filter(None, (json, out)):
        print(f"wrote {path}")
    if interrupted:
        done = sum(summary.runs for summary in summaries.values())
        total = len(contenders) * config.seeds
        print(f"headway simulate: interrupted; {done} of {total} runs", file=sys.stderr)
        return 130
    return 0


def compile_notice() -> None:
    """Say on standard error that compiling takes a while, when nothing compiled is kept."""
    if not is_kept(advance):
        print("compiling the simulator: about a minute, only once", file=sys.stderr, flush=True)


def progress_bar() -> Progress:
    """Return a bar on standard error, which shows nothing where that is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def refuse_foreign_folder(folder: Path, verb: str, results: str, overwrite: bool) -> None:
    """Refuse to write among files that are not of an earlier run of the same verb.

    Raises:
        ValueError: the folder is none, or is not empty and holds no such results.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: not a folder")
    if overwrite or not folder.exists() or not any(folder.iterdir()):
        return
    try:
        made_by = json_format.loads((folder / results).read_text())["_about"]["made_by"]
    except (OSError, ValueError, KeyError, TypeError):
        made_by = None
    if made_by != f"headway {verb}":
        raise ValueError(
            f"{folder}: not empty, and not of an earlier `headway {verb}`; "
            "choose another folder or add --overwrite"
        )


def _run_all(
    contenders: dict[str, Contender],
    seeds: int,
    keep: Callable[[RunResult], None],
) -> bool:
    """Run all contenders with one seed after the other; return whether Ctrl-C ended that."""
    compile_notice()
    with progress_bar() as bar:
        task = bar.add_task("", total=len(contenders) * seeds)
        try:
            for seed in range(seeds):
                for label, (policy, planner, setup) in contenders.items():
                    bar.update(task, description=f"{label}, seed {seed}")
                    result = run(setup, policy, seed, label, planner)
                    with held_interrupts():
                        keep(result)
                    bar.advance(task)
        except KeyboardInterrupt:
            return True
    return False


@contextmanager
def _requests_file(path: Path | None) -> Iterator[Callable[[RunResult], None]]:
    """Yield what appends a run's requests to a Parquet file, or drops them without a path."""
    if path is None:
        yield lambda result: None
        return
    with replace_file(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:

        def append(result: RunResult) -> None:
            columns: dict[str, Any] = result.requests._asdict()
            n = len(result.requests.number)
            columns |= {"policy": [result.policy] * n, "seed": [result.seed] * n}
            writer.write_table(pa.table(columns).select(_SCHEMA.names).cast(_SCHEMA))

        yield append


_TIMES = ("arrival", "placed", "start", "first_token", "end")
_COUNTS = ("prompt", "output", "preemptions", "migrations")
_SCHEMA = pa.schema(
    [
        ("policy", pa.string()),
        ("seed", pa.int32()),
        ("number", pa.int64()),
        ("instance", pa.int64()),
        *((name, pa.float64()) for name in _TIMES),
        *((name, pa.int64()) for name in _COUNTS),
        ("tpot_worst", pa.float64()),
    ]
)


def _show(summaries: dict[str, Summary], report: str) -> None:
    console = Console()
    if console.is_terminal:
        console.print(terminal_table(summaries))
    else:
        print(report)
