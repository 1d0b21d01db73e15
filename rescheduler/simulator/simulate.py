"""`headway simulate`: routing policies on the same simulated cluster, side by side."""

import math
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from data_collection.files import refuse_unwritable, replace_file, write_text_atomically
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.runner import sweep
from rescheduler.simulator.experiments.workers import Figures, compile_notice, gather
from rescheduler.simulator.record_run import log_paths, record_run
from rescheduler.simulator.results.metrics import RequestRecords, RunResult, run_metrics, summarise
from rescheduler.simulator.results.report import (
    about,
    document,
    draw_comparison,
    draw_loads,
    draw_power,
    draw_rescheduling,
    json_text,
    markdown_report,
    refuse_foreign_folder,
    terminal_table,
    write_report,
)
from rescheduler.simulator.simulation import Candidate, create_candidates, run, run_setup
from rescheduler.simulator.workloads.trace_files import announce_traces


def simulate(
    config: SimulationConfig,
    json: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    record: Path | None = None,
    record_every: float = 1.0,
    vary: dict[str, list[Any]] | None = None,
    workers: int | None = None,
    ray: str | None = None,
) -> int:
    """Simulate routing policies on one cluster, and compare them.

    Every key of the configuration can be given on the command line:
    ``--cluster.instances 32 --trace.requests 5000``. Every policy runs with every seed. Ctrl-C
    ends it early and keeps the runs that have finished.

    With --vary, or with --workers or --ray, every policy runs with every seed in every
    combination of some settings, on all cores: ``vary: {cluster.instances: [8, 16]}`` in the
    YAML file, or ``--vary cluster.instances=[8,16] --vary policies.bfio.horizon=[0,20,40]``.
    Each run is kept in --out as soon as it has finished. Give the command again to resume it,
    or to add values, policies or seeds: what is there is not computed again.

    Args:
        config: of the simulation.
        json: write the figures to this file.
        out: write figures, tables and pictures to this folder, and every request to
            requests.parquet in it. A folder of an earlier simulation is replaced. With --vary,
            of sweep.csv, sweep.json and the runs.
        overwrite: write to ``out`` whatever is in it.
        record: log the runs of the first seed to this file, for `headway replay`; of several
            policies each gets a file of its own, with its label in the name.
        record_every: simulated seconds between two snapshots of the log.
        vary: key -> values. A policy is named by its label: policies.bfio.horizon.
        workers: processes at once; one per core when not given.
        ray: compute on the Ray cluster of this address instead (auto, local, ray://...).

    Returns:
        The exit status.

    Raises:
        ValueError: a configuration or a trace that cannot be simulated, or a folder that must
            not be overwritten; or an interval that is not positive.
    """
    if vary is not None or workers is not None or ray is not None:
        if out is None:
            raise ValueError("--vary, --workers and --ray need a folder for the runs: --out FOLDER")
        if json is not None or record is not None:
            raise ValueError("--json and --record are of a simulation without --vary")
        return sweep(config, out, vary or {}, workers, ray, overwrite)
    candidates = create_candidates(run_setup(config))
    notes = about("simulate", config) | announce_traces("simulate", [config.trace])
    logs: dict[str, Path] = {}
    if record is not None:
        if not 0 < record_every < math.inf:
            raise ValueError(f"--record-every must be above 0 seconds, not {record_every:g}")
        record.parent.mkdir(parents=True, exist_ok=True)
        logs = log_paths(record, candidates)
        for path in logs.values():
            refuse_unwritable(path)
    if out is not None:
        refuse_foreign_folder(out, "simulate", "results.json", overwrite)
        out.mkdir(parents=True, exist_ok=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        refuse_unwritable(json)
    measured: dict[str, list[Figures]] = {label: [] for label in candidates}
    drawn: list[RunResult] = []
    with _requests_file(out / "requests.parquet" if out else None) as append:

        def keep(job: tuple[str, int], result: RunResult) -> None:
            append(result)
            measured[result.policy].append(run_metrics(result, config.slo))
            if result.seed == 0:  # for the pictures, which need no requests
                empty = RequestRecords._make(column[:0] for column in result.requests)
                drawn.append(replace(result, requests=empty))

        compile_notice()
        total = len(candidates) * config.seeds
        interrupted = gather(
            _runs(candidates, config.seeds, logs, record_every),
            total,
            keep,
            lambda job: f"{job[0]}, seed {job[1]}",
        )
        if not drawn:  # and leave nothing behind
            raise KeyboardInterrupt
    summaries = {label: summarise(runs) for label, runs in measured.items() if runs}
    text = json_text(document(summaries, notes), allow_nan=False)
    if out is not None:
        figures = {
            "comparison.png": draw_comparison(summaries),
            "loads.png": draw_loads(drawn),
            "power.png": draw_power(drawn),
        }
        if any(run.plans for run in drawn):
            figures["rescheduling.png"] = draw_rescheduling(drawn, config.cluster.capacity_tokens)
        table = markdown_report(summaries, config, [Path(name) for name in figures])
        write_report(out, {"table.md": table, "results.json": text}, figures)
    console = Console()
    if console.is_terminal:
        console.print(terminal_table(summaries))
    else:
        print(markdown_report(summaries, config))
    if json is not None:
        write_text_atomically(json, text)
    for path in filter(None, (json, out, *(logs.get(label) for label in summaries))):
        print(f"wrote {path}")
    if interrupted:
        done = sum(summary.runs for summary in summaries.values())
        print(f"headway simulate: interrupted; {done} of {total} runs", file=sys.stderr)
        return 130
    return 0


def _runs(
    candidates: dict[str, Candidate], seeds: int, logs: dict[str, Path], every: float
) -> Generator[tuple[tuple[str, int], RunResult], None, None]:
    """Yield every run, one seed after the other, so that policies stay comparable."""
    for seed in range(seeds):
        for label, candidate in candidates.items():
            if seed == 0 and label in logs:
                result = record_run(candidate, seed, label, logs[label], every)
            else:
                result = run(
                    candidate.setup,
                    candidate.policy,
                    seed,
                    label,
                    candidate.planner,
                    candidate.order,
                )
            yield (label, seed), result


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
        ("client", pa.int64()),
    ]
)
