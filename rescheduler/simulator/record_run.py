"""A run of the simulator that is also recorded, for the page to replay."""

import re
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

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
from rescheduler.simulator.results.metrics import RunResult
from rescheduler.simulator.simulation import Candidate, Simulation

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
