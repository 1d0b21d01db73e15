"""`headway simulate`: routing policies on the same simulated cluster, side by side; and logged."""

import math
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from data_collection.files import refuse_unwritable, replace_file, write_text_atomically
from rescheduler.cluster.cluster_view import CANNOT_MOVE, ClusterView
from rescheduler.page.expectations import foreseen, known
from rescheduler.page.snapshot import (
    UNKNOWN,
    About,
    Instance,
    LogWriter,
    MoveReport,
    Phase,
    Requests,
    Snapshot,
)
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.runner import sweep
from rescheduler.simulator.experiments.workers import Figures, compile_notice, gather
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
from rescheduler.simulator.simulation import (
    Candidate,
    Simulation,
    create_candidates,
    run,
    run_setup,
)
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
        record: log the runs of the first seed to this file, for `headway demo --replay`; of several
            policies each gets a file of its own, with its label in the name.
        record_every: simulated seconds between two snapshots of the log.
        vary: key -> values. A policy is named by its label: policies.bfio.horizon.
        workers: processes at once; one per core if not set.
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


_SHOWN_WAITING = 64
_SHOWN_MOVES = 20


def log_paths(path: Path, labels: Iterable[str]) -> dict[str, Path]:
    """Return where each candidate's run is recorded: several get their labels into the name.

    Raises:
        ValueError: two labels make the same name.
    """
    names = list(labels)
    if len(names) == 1:
        return {names[0]: path}
    stem, dot, suffix = path.name.partition(".")
    found: dict[str, Path] = {}
    for label in names:
        place = path.with_name(f"{stem}-{re.sub(r'[^A-Za-z0-9_+=-]+', '-', label)}{dot}{suffix}")
        if place in found.values():
            raise ValueError(f"--record: {label!r} and another label both make {place.name}")
        found[label] = place
    return found


def record_run(candidate: Candidate, seed: int, label: str, path: Path, every: float) -> RunResult:
    """Simulate as `run` does, and log the cluster again and again.

    Raises:
        ValueError: as `run`.
        OSError: the log cannot be written.
    """
    planner = "" if candidate.planner is None else candidate.planner.name
    about = About(
        source="simulation",
        title=label,
        routing=candidate.policy.name,
        migration=planner,
        seconds=every,
    )
    simulation = Simulation(
        candidate.setup, candidate.policy, seed, candidate.planner, candidate.order
    )
    path.unlink(missing_ok=True)
    with LogWriter(path, about) as log:
        seen = _Seen(planner)
        for number in count():
            if not simulation.advance(number * every):
                break
            log.write(msgspec.json.encode(seen.snapshot(simulation, number * every)))
    return simulation.result(label)


class _Seen:
    """Turns views into snapshots, and tells from two of them what has moved.

    Args:
        planner: that moves.
    """

    def __init__(self, planner: str) -> None:
        self._planner = planner
        self._time = 0.0
        self._was: dict[int, tuple[int, int]] = {}
        self._moves: list[MoveReport] = []
        self._step_seconds: float | None = None
        self._step_seconds_of: dict[int, float] = {}

    def snapshot(self, simulation: Simulation, time: float) -> Snapshot:
        """Return the simulation as it is at a time."""
        view = simulation.view()
        running = simulation.running_numbers().tolist()
        waiting = simulation.waiting_numbers()[:_SHOWN_WAITING].tolist()
        self._compare(view, running, time)
        instances = [
            Instance(
                name=f"instance {g}",
                role="decode",
                in_service=True,
                draining=False,
                slots=known(view.slots[g]),
                kv_capacity=known(view.kv_capacity[g]),
                kv_tokens=0,
                step_seconds=self._step_seconds_of.get(g),
            )
            for g in range(view.n_instances)
        ]
        assert view.since_move is not None  # the simulator says it of every request
        stays = view.since_move == CANNOT_MOVE
        phases = [Phase.PLACED.value if stay else Phase.DECODING.value for stay in stays]
        numbers, shown = running + waiting, slice(len(waiting))
        unknown = [UNKNOWN] * len(numbers)
        requests = Requests(
            number=numbers,
            name=[f"#{number}" for number in numbers],
            phase=phases + [Phase.WAITING.value] * len(waiting),
            instance=view.instance.tolist() + [UNKNOWN] * len(waiting),
            target=unknown,
            prompt=view.prompt_tokens.tolist() + view.waiting_prompt_tokens[shown].tolist(),
            generated=view.generated_tokens.tolist()
            + view.waiting_generated_tokens[shown].tolist(),
            low=unknown,
            median=unknown,
            high=unknown,
        )
        snapshot = Snapshot(
            time=time,
            step_seconds=self._step_seconds,
            points=[],
            instances=instances,
            requests=requests,
            further_waiting=view.n_waiting - len(waiting),
            moves=self._moves[-_SHOWN_MOVES:],
            joules=simulation.joules,
        )
        return foreseen(snapshot, view, [one.name for one in instances])

    def _compare(self, view: ClusterView, running: list[int], time: float) -> None:
        """Find what has moved since the last view, and how long steps took, also by instance."""
        seen = zip(view.instance.tolist(), view.generated_tokens.tolist(), strict=True)
        now = dict(zip(running, seen, strict=True))
        gained: dict[int, list[int]] = {}
        for number, (g, generated) in now.items():
            before, tokens = self._was.get(number, (g, generated))
            if before != g:
                self._moves.append(self._move(number, before, g, generated, time))
            elif generated > tokens:
                gained.setdefault(g, []).append(generated - tokens)
        passed = time - self._time
        if gained:
            self._step_seconds = passed / float(
                np.median([n for of in gained.values() for n in of])
            )
        self._step_seconds_of = {g: passed / float(np.median(of)) for g, of in gained.items()}
        self._was, self._time = now, time

    def _move(self, number: int, source: int, target: int, tokens: int, time: float) -> MoveReport:
        return MoveReport(
            time=time,
            number=number,
            name=f"#{number}",
            source=f"instance {source}",
            target=f"instance {target}",
            tokens=tokens,
            reason=self._planner,
            outcome="moved",
        )
