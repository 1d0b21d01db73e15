"""Whether requests finish when they are forecast to, and whether promises of it are kept.

    python -m benchmarks.finish_times [--fleets emulated real] [--loads X ...] [--rounds N]
        [--runs watched promised] [--requests N] [--quick] [--report] [--out FOLDER] [--json OUT]

Each request is a stream that asks when it will finish (``stream_options: {"headway": true}``), at
50, 100 and 120% of the capacity, which is measured first. What is told at arrival, and once at
random later, is held against what its client saw: of 80% intervals, 8 of 10 should hold. The first
fifth of a run's requests, from which the proxy learns, does not count.

Fleets: ``emulated``, four emulated H100s with an 8B model behind ``headway serve``, placed by
least load (``jsq_load``: what waits does so in the engines) and by ``headroom`` (it does so in the
proxy); ``real``, one engine of SmolLM2 on this machine's CPU.

Promises: every request has a deadline, 0.3 to 10 times the median seconds of service, drawn evenly
in the logarithm. In the ``watched`` runs all are taken, and it is noted who would have had a
promise: by P(finished in time) >= 0.95, or by the median being in time. In the ``promised`` runs
every second request asks for one, and the proxy refuses what it cannot promise. Kept is the share
of promises that were kept, refused needlessly that of the requests that finished in time to which a
rule would have promised nothing.

What is finished is kept in the folder and not run again while its settings stay the same.
"""

import asyncio
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from msgspec.structs import replace

from benchmarks import emulated_fleet, live_order
from benchmarks.support.deployments import engines, patient, proxy, until_idle
from benchmarks.support.experiment import (
    MEASURED_ROUND,
    PATIENCE,
    drawn_load,
    steady_rate,
    step_logs,
)
from benchmarks.support.live_runs import round_load
from benchmarks.support.report import Cells, arguments, mean_of, resumable, write_report
from rescheduler.demo.load import asked_body, load_session, step_sums
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.results.report import markdown_table

LOADS = (0.5, 1.0, 1.2)
LEVEL = 0.95
LEARNS_FROM = 5
"""A proxy has learnt from the first fifth of a run's requests, which do not count."""
REQUESTS = {"emulated": 1_600, "real": 150}
DILATION = 2.0
SCRATCH = Path("runs/finish_times")
ROUTING = {"jsq_load": {"name": "jsq_load"}, "headroom": {"name": "headroom"}}
WHEN = ("arrival_start", "arrival_finish", "later_finish")


class Run(NamedTuple):
    """Fleets of the same kind differ in where requests wait, by the routing policy."""

    fleet: str
    routing: str
    load: float
    round: int
    promises: str

    @property
    def group(self) -> str:
        return f"{self.fleet}_{self.routing}_{100 * self.load:.0f}"


Outcome = dict[str, Any]
"""Of a request: the intervals told and what came, and the probability of being in time."""


def main() -> None:
    parser = arguments("whether requests finish when they are forecast to")
    parser.add_argument("--fleets", nargs="+", choices=list(REQUESTS), default=["emulated"])
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    kinds = ("watched", "promised")
    parser.add_argument("--runs", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help=f"of a run ({REQUESTS})")
    parser.add_argument("--report", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/finish_times"))
    options = parser.parse_args()
    if options.quick:
        options.requests = 150
        options.rounds = 1
        options.loads = [1.0]
        options.out = SCRATCH / "quick"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    found: dict[Run, dict[str, float]] = {}
    with resumable():
        for fleet in options.fleets:
            requests = options.requests or REQUESTS[fleet]
            runs = [
                Run(fleet, routing, load, number, promises)
                for number in range(options.rounds)
                for routing in (ROUTING if fleet == "emulated" else ["fcfs"])
                for load in options.loads
                for promises in options.runs
            ]
            bench = Bench(options.out, fleet, requests)
            if not options.report:
                bench.run_missing(runs)
            found |= {run: kept for run in runs if (kept := bench.cells(run).read(run.promises))}
    figures = all_figures(found)
    tables = [coverage_table(figures, found), promises_table(figures, found)]
    print("\n\n".join(tables))
    write_report("finish_times", figures, options.json, tables=tables)


COMMENT = b": headway "


class Told(NamedTuple):
    """A comment of a stream: when it came, and what it said."""

    at: float
    told: dict[str, Any]


@dataclass
class Asked:
    """A request, and what its client saw; times are real seconds on the monotonic clock."""

    body: dict[str, Any]
    arrives: float
    finish_in: float | None = None
    sent: float = 0.0
    first: float = inf
    last: float = inf
    probability: float | None = None
    told: list[Told] = field(default_factory=list)
    status: int = 0
    error: str = ""

    @property
    def complete(self) -> bool:
        return self.status == 200 and not self.error and self.last < inf


async def serve_asking(url: str, load: Sequence[Asked], level: float | None = None) -> None:
    """Send requests when their time comes, and wait for all answers.

    With a ``level``, those with a deadline ask for a promise of that probability; at 0 all get one.
    """
    started = time.monotonic()
    async with load_session() as session:

        async def serve(one: Asked) -> None:
            await asyncio.sleep(max(0.0, started + one.arrives - time.monotonic()))
            try:
                await _serve(session, url, one, level)
            except (TimeoutError, aiohttp.ClientError) as error:
                one.error = f"{type(error).__name__}: {error}"

        await asyncio.gather(*(serve(one) for one in load))


async def _serve(session: aiohttp.ClientSession, url: str, one: Asked, level: float | None) -> None:
    body = {**one.body, "stream": True, "stream_options": {"headway": True}}
    if level is not None and one.finish_in is not None:
        body |= {"finish_in_s": one.finish_in, "finish_level": level}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    one.sent = time.monotonic()
    async with session.post(url + path, json=body) as response:
        one.status = response.status
        if response.status != 200:
            return
        given = response.headers.get("X-Headway-Finish-Probability")
        one.probability = float(given) if given is not None else None
        async for line in response.content:
            now = time.monotonic()
            if line.startswith(COMMENT):
                one.told.append(Told(now, json.loads(line[len(COMMENT) :])))
            elif line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    one.error = str(chunk["error"])
                elif chunk.get("choices"):
                    one.first, one.last = min(one.first, now), now


class Bench:
    """Runs what is missing of a fleet."""

    def __init__(self, out: Path, fleet: str, requests: int) -> None:
        self.out = out
        self.fleet = fleet
        self.requests = requests
        self.settings = {"requests": requests, "fleet": fleet, "learns": LEARNS_FROM}

    def cells(self, run: Run) -> Cells:
        return Cells(self.out / run.group / f"round-{run.round}", self.settings)

    def run_missing(self, runs: Sequence[Run]) -> None:
        missing = [run for run in runs if self.cells(run).read(run.promises) is None]
        if not missing:
            return
        kept = Cells(self.out, self.settings)
        deployment = deployment_of(self.fleet)
        with engines(deployment, SCRATCH / "logs"):
            measured = kept.read(f"capacity_{self.fleet}")
            if measured is None:
                measured = self._serve(deployment, "fcfs", self._load(MEASURED_ROUND, inf), None)[1]
                kept.write(f"capacity_{self.fleet}", measured)
            print(f"{self.fleet}: {measured}", file=sys.stderr, flush=True)
            for run in missing:
                load = self._load(run.round, run.load * measured["capacity"])
                draw = random.Random(run.round)
                for one in load[:: 2 if run.promises == "promised" else 1]:
                    one.finish_in = measured["seconds"] * 10 ** draw.uniform(-0.5, 1)
                level = LEVEL if run.promises == "promised" else 0.0
                began, since = time.monotonic(), time.perf_counter()
                outcomes, _ = self._serve(deployment, run.routing, load, level)
                figures = summary(outcomes[len(outcomes) // LEARNS_FROM :])
                if self.fleet == "emulated":
                    logs = step_logs(SCRATCH, deployment.instances)
                    figures["excess_step_time"] = step_sums(logs, since).excess
                known = {name: None if isnan(value) else value for name, value in figures.items()}
                self.cells(run).write(run.promises, known)
                seconds = time.monotonic() - began
                print(
                    f"{time.strftime('%H:%M')} {run}: {seconds:.0f} s", file=sys.stderr, flush=True
                )

    def _load(self, number: int, rate: float) -> list[Asked]:
        """Return a round's requests, with the times of their arrivals in real seconds."""
        if self.fleet == "real":
            wanted = [
                (one.prompt, one.seed, one.max_tokens, one.arrives)
                for part in range(-(-self.requests // 40))
                for one in round_load(100 * number + part, 40, 1.0, 300)
            ]
            gaps = np.random.default_rng(number).exponential(size=len(wanted)) / rate
            return [
                Asked(
                    {
                        "model": "smollm2",
                        "messages": [{"role": "user", "content": prompt}],
                        "seed": seed,
                        "max_tokens": most,
                    },
                    float(at),
                )
                for (prompt, seed, most, _), at in zip(wanted, np.cumsum(gaps), strict=True)
            ][: self.requests]
        law = emulated_fleet.LAW
        load = drawn_load(number, self.requests, rate, emulated_fleet.PROMPTS, law)
        return [Asked(asked_body("smollm2", one, 0, law.longest), one.arrives) for one in load]

    def _serve(
        self, deployment: Deployment, routing: str, load: list[Asked], level: float | None
    ) -> tuple[list[Outcome], dict[str, float]]:
        """Serve a load; return what came of each request, and capacity and seconds of service.

        The capacity is requests a second in the steady part; of the seconds it is the median.
        """
        serving = replace(deployment, routing=ROUTING.get(routing, ROUTING["jsq_load"]))

        async def served() -> None:
            await until_idle(deployment, PATIENCE)
            with proxy(serving, SCRATCH):
                await serve_asking(serving.proxy_url, load, level)

        asyncio.run(served())
        failed = [one.error or f"HTTP {one.status}" for one in load if not one.complete]
        failed = [error for error in failed if error != "HTTP 429"]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, as with {failed[0]}")
        ended = [one.last for one in load if one.complete]
        seconds = [one.last - one.first for one in load if one.complete]
        measured = {"capacity": steady_rate(ended), "seconds": float(np.median(seconds))}
        return [_outcome(one, i) for i, one in enumerate(load)], measured


def deployment_of(fleet: str) -> Deployment:
    """Return the engines of a fleet."""
    if fleet == "emulated":
        emulated = emulated_fleet.EmulatedFleet(Namespace(dilation=DILATION))
        emulated.scratch = SCRATCH
        return emulated.deployment((False, 0.0, "newest"))
    return patient(local_deployment("smollm2", live_order.ENGINE, decode=1, prefill=0))


def _outcome(one: Asked, number: int) -> Outcome:
    """Return the first comment and a random one of the others, against what came."""
    outcome: Outcome = {"status": one.status, "probability": one.probability}
    outcome["asked"] = one.finish_in is not None
    if one.finish_in is not None and one.complete:
        outcome |= {"in_time": one.last - one.sent <= one.finish_in}
    if not one.complete or not one.told:
        return outcome
    at, told = one.told[0]
    if "start_s" in told:
        outcome["arrival_start"] = [*told["start_s"], one.first - at]
    outcome["arrival_finish"] = [*told["finish_s"], one.last - at]
    outcome["by_median"] = one.finish_in is not None and told["finish_s"][1] <= one.finish_in
    running = [comment for comment in one.told if comment.told["state"] == "running"]
    if running:
        at, told = random.Random(number).choice(running)
        outcome["later_finish"] = [*told["finish_s"], one.last - at]
    return outcome


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the figures of a run: how intervals came out, and what rules would have promised."""
    figures: dict[str, float] = {}
    for when in WHEN:
        rows = np.array([one[when] for one in outcomes if when in one]).reshape(-1, 4)
        if len(rows):
            low, median, high, actual = rows.T
            figures |= {
                f"{when}_requests": float(len(rows)),
                f"{when}_within": _share((low <= actual) & (actual <= high)),
                f"{when}_earlier": _share(actual < low),
                f"{when}_later": _share(actual > high),
                f"{when}_median_error": float(
                    np.exp(np.median(np.abs(np.log(np.maximum(actual, 1e-3) / median)))) - 1
                ),
                f"{when}_width": float(np.median(high / np.maximum(low, 1e-3))),
            }
    rules: dict[str, Callable[[Outcome], bool]] = {
        "calibrated": lambda one: (one["probability"] or 0.0) >= LEVEL,
        "median": lambda one: bool(one.get("by_median")),
        "none": lambda one: True,
    }
    # Before anything is known, nothing is promised.
    ended = [one for one in outcomes if "in_time" in one and one["probability"] is not None]
    in_time = np.array([one["in_time"] for one in ended], dtype=bool)
    for name, rule in rules.items():
        given = np.array([rule(one) for one in ended], dtype=bool)
        figures[f"given_{name}"] = _share(given)
        figures[f"kept_{name}"] = _share(in_time[given])
        figures[f"refused_needlessly_{name}"] = _share(~given[in_time])
    figures["promises"] = float(len(ended))
    figures["promises_kept"] = float(in_time.sum())
    figures["asked"] = float(sum(one["asked"] for one in outcomes))
    return figures


def all_figures(found: Mapping[Run, Mapping[str, float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for group in dict.fromkeys(run.group for run in found):
        runs = {run: kept for run, kept in found.items() if run.group == group}
        watched = {run.round: one for run, one in runs.items() if run.promises == "watched"}
        promised = [one for run, one in runs.items() if run.promises == "promised"]
        names = [name for name in next(iter(watched.values()), {}) if "promises" not in name]
        for name in names:
            values = {
                n: float(one[name]) for n, one in watched.items() if one.get(name) is not None
            }
            figures |= mean_of(values).figures(f"{group}_{name}")
        if promised:
            given, kept, asked = (
                sum(one[name] for one in promised)
                for name in ("promises", "promises_kept", "asked")
            )
            figures[f"{group}_promises"] = given
            figures[f"{group}_promises_given"] = given / asked
            figures[f"{group}_promises_kept"] = kept / given if given else float("nan")
    return figures


def _share(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def coverage_table(figures: dict[str, float], found: Mapping[Run, Mapping[str, float]]) -> str:
    rows = []
    for group in dict.fromkeys(run.group for run in found):
        for when in WHEN:
            at = f"{group}_{when}"
            if f"{at}_within" not in figures:
                continue
            half = figures[f"{at}_within_half_interval"]
            rows.append(
                [
                    group,
                    when,
                    f"{figures[f'{at}_requests']:.0f}",
                    f"{100 * figures[f'{at}_within']:.1f}"
                    + ("" if half != half else f" ± {100 * half:.1f}"),
                    f"{100 * figures[f'{at}_earlier']:.1f}",
                    f"{100 * figures[f'{at}_later']:.1f}",
                    f"{100 * figures[f'{at}_median_error']:.0f}%",
                    f"{figures[f'{at}_width']:.1f}",
                ]
            )
    heads = ["fleet", "told", "requests", "within, %", "earlier, %", "later, %"]
    heads += ["typical error of the median", "high / low"]
    return "\n".join(["### 80% intervals", *markdown_table(heads, rows)])


def promises_table(figures: dict[str, float], found: Mapping[Run, Mapping[str, float]]) -> str:
    rows = []
    for group in dict.fromkeys(run.group for run in found):
        for rule in ("none", "median", "calibrated"):
            if f"{group}_kept_{rule}" in figures:
                values = [
                    figures[f"{group}_{name}_{rule}"]
                    for name in ("given", "kept", "refused_needlessly")
                ]
                rows.append([group, rule, *(f"{100 * value:.1f}" for value in values)])
        if f"{group}_promises_kept" in figures:
            given, kept = figures[f"{group}_promises_given"], figures[f"{group}_promises_kept"]
            rows.append(
                [group, "calibrated, others refused", f"{100 * given:.1f}", f"{100 * kept:.1f}", ""]
            )
    heads = ["fleet", "rule", "given, %", "kept, %", "in time but refused, %"]
    return "\n".join(["### Promises at level 0.95", *markdown_table(heads, rows)])


if __name__ == "__main__":
    main()
