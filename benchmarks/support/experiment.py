"""Arms compared in rotated rounds on emulated engines: run where missing, kept, and reported.

And the loads of drawn requests that they serve.
"""

import argparse
import asyncio
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from msgspec import to_builtins

from benchmarks.support.deployments import engines, patient, proxy, until_idle
from benchmarks.support.report import (
    Cells,
    Rounds,
    arguments,
    gain,
    relative_cells,
    resumable,
    rotated,
    write_report,
)
from rescheduler.demo.load import (
    EmulatedRequest,
    Prompt,
    answer_figures,
    changed_answers,
    drawn_prompt,
    moves,
    preemptions,
    scheduler_failures,
    serve_load,
    step_sums,
)
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions, ForecastQuality
from rescheduler.engines.deployment import Deployment, EngineOptions, Instance
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_local import local_deployment
from rescheduler.simulator.results.report import markdown_table

RECORDED = ForecastQuality(sigma=1.9, correlation=0.5)
"""As good as those recorded of SmolLM2."""
EXACT = ForecastQuality(sigma=0.0)
MOST_EXCESS = 0.0001
"""Of a run's steps; 0.000001 on quiet cores. With 0.0003, while tests ran beside it, a run's P99 of
pauses was four times what it was alone."""
PATIENCE = 600.0
QUIET = ("--no-enable-log-requests", "--disable-uvicorn-access-log")
_TRIES = 3
MEASURED_ROUND = 1_000_003
"""Whose requests no round has."""

Arms = Mapping[str, Rounds]
"""Figures of each arm, by round."""


class PromptLengths(NamedTuple):
    """Prompts of so many tokens, uniform in their logarithm."""

    shortest: int
    longest: int


def drawn_load(
    number: int, requests: int, rate: float, prompts: PromptLengths, law: AnswerLengths
) -> list[EmulatedRequest]:
    """Return a round's requests, a Poisson process; at an infinite rate all come at once.

    A round draws lengths and gaps of its own, the same every time; a rate only stretches its gaps.
    """
    generator = np.random.default_rng(number)
    gaps = generator.exponential(size=requests) / rate
    low, high = np.log(prompts.shortest), np.log(prompts.longest)
    prompt = np.exp(generator.uniform(low, high, requests)).astype(int)
    answer = law.median * np.exp(law.sigma * generator.standard_normal(requests))
    answer = np.clip(np.round(answer), 2, law.longest).astype(int)
    seeds = number * 1_000_000 + np.arange(requests)
    columns = (seeds.tolist(), prompt.tolist(), answer.tolist(), np.cumsum(gaps).tolist())
    return [EmulatedRequest(*row) for row in zip(*columns, strict=True)]


def steady_rate(ended: Iterable[float]) -> float:
    """Return how many of a load that came at once ended in a second, in its steady part."""
    times = np.sort(list(ended))
    low, high = int(0.2 * len(times)), int(0.7 * len(times))
    return float((high - low) / (times[high] - times[low]))


class Run(NamedTuple):
    load: float
    round: int
    arm: str


class Experiment(ABC):
    """A comparison of arms that get the same requests at the same times in every round.

    Attributes:
        options: of the command line: rounds, loads, arms, out, and those of its own.
        scratch: folder of logs, and of what the engines' steps were.
        capacity: what a load is a share of; measured before the first run, unless it was kept.
    """

    name: ClassVar[str]
    arms: ClassVar[Mapping[str, Any]]
    base: ClassVar[str]
    """The arm that others are compared with, and that is always run."""
    figures: ClassVar[Sequence[str]]
    counts: ClassVar[Sequence[str]] = ()
    more_is_better: ClassVar[frozenset[str]] = frozenset({"goodput"})
    most_excess: ClassVar[float] = MOST_EXCESS
    has_loads: ClassVar[bool] = True
    """Whether arms run at several shares of a capacity."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.scratch = Path("runs") / self.name
        self.capacity: Any = None

    @abstractmethod
    def engines_of(self, arm: str) -> Hashable:
        """Return what engines are started for; arms alike in it share them."""

    @abstractmethod
    def deployment(self, key: Any) -> Deployment:
        """Return the engines that serve all arms of a key."""

    @abstractmethod
    def settings(self, run: Run | None) -> dict[str, Any]:
        """Return what a result depends on, beside the code; None: what the capacity depends on."""

    @abstractmethod
    async def serve(self, deployment: Deployment, run: Run, salt: int) -> Mapping[str, float]:
        """Serve one run; ``excess`` is how much longer its steps took than they should."""

    async def measure(self, deployment: Deployment) -> Any:
        """Return the capacity; of an experiment that sets none."""
        raise NotImplementedError

    def emulated(self, law: AnswerLengths, exact: bool = False, **others: Any) -> EmulateOptions:
        """Return emulated engines that know lengths exactly, or as well as was recorded."""
        quality = EXACT if exact else RECORDED
        return EmulateOptions(
            lengths=law,
            forecast=quality,
            prompt_forecast=quality,
            logs=str((self.scratch / "steps").absolute()),
            **others,
        )

    def folder(self, run: Run) -> Path:
        out: Path = self.options.out
        return (out / f"{100 * run.load:.0f}" if self.has_loads else out) / f"round-{run.round}"

    def cells(self, run: Run) -> Cells:
        return Cells(self.folder(run), self.settings(run))

    def valid(self, run: Run) -> Any:
        """Return a kept run's figures; None if it was not run, or its steps took too long."""
        found = self.cells(run).read(run.arm)
        return found if found is not None and found["excess"] <= self.most_excess else None

    def run_missing(self, arms: Sequence[str], rounds: int) -> None:
        """Run what the folder does not have with these settings; each result is kept at once."""
        if self.capacity is None:
            self.capacity = Cells(self.options.out, self.settings(None)).read("capacity")
        keys = dict.fromkeys(self.engines_of(arm) for arm in arms)
        for number in range(rounds):
            for key in keys:
                alike = [arm for arm in arms if self.engines_of(arm) == key]
                runs = [
                    Run(load, number, arm)
                    for load in self.options.loads
                    for arm in rotated(alike, number)
                ]
                if self.capacity is None or any(self.valid(run) is None for run in runs):
                    self._run(self.deployment(key), runs)

    def _run(self, deployment: Deployment, runs: Sequence[Run]) -> None:
        with engines(deployment, self.scratch / "logs"):
            if self.capacity is None:
                self.capacity = asyncio.run(self.measure(deployment))
                Cells(self.options.out, self.settings(None)).write("capacity", self.capacity)
                print(f"capacity: {self.capacity}", file=sys.stderr, flush=True)
            for run in runs:
                if self.valid(run) is None:
                    self._keep_valid(deployment, run)

    def _keep_valid(self, deployment: Deployment, run: Run) -> None:
        """Run until the steps took as long as they should, at most three times; keep the last."""
        for attempt in range(_TRIES):
            salt = zlib.crc32(f"{run} {attempt}".encode())
            result = asyncio.run(self.serve(deployment, run, salt))
            shown = ", ".join(f"{key} {value:.3g}" for key, value in result.items())
            print(f"{time.strftime('%H:%M')} {run}: {shown}", file=sys.stderr, flush=True)
            if result["excess"] <= self.most_excess:
                break
        else:
            print(f"{run}: not valid, its steps took too long", file=sys.stderr, flush=True)
        self.cells(run).write(run.arm, result)

    def results(self, load: float, arms: Sequence[str]) -> Arms:
        """Return the valid results."""
        found: dict[str, dict[int, Mapping[str, float]]] = {arm: {} for arm in arms}
        for arm in arms:
            for number in range(self.options.rounds):
                result = self.valid(Run(load, number, arm))
                if result is not None:
                    found[arm][number] = result
        return found

    def tables(self, found: Mapping[float, Arms]) -> list[str]:
        """Return a table of each load: the base's means, and changes in percent."""
        return [self._table(load, runs) for load, runs in found.items()]

    def _table(self, load: float, runs: Arms) -> str:
        rows = []
        for arm, rounds in runs.items():
            if rounds:
                cells = relative_cells(runs, arm, self.base, self.figures)
                counts = [np.mean([one[name] for one in rounds.values()]) for name in self.counts]
                rows.append([arm, f"{len(rounds)}", *cells, *(f"{count:.0f}" for count in counts)])
        heads = ["arm", "rounds", *self.figures, *self.counts]
        return "\n".join([f"### {100 * load:.0f}% of the capacity", *markdown_table(heads, rows)])

    def summary(self, found: Mapping[float, Arms]) -> dict[str, float]:
        """Return the figures that are written: gains in percent with half their intervals."""
        figures: dict[str, float] = {"capacity": self.capacity}
        for load, runs in found.items():
            prefix = f"{100 * load:.0f}_"
            for arm, rounds in runs.items():
                figures[f"{prefix}rounds_{arm}"] = float(len(rounds))
                for name in self.figures if arm != self.base and rounds else ():
                    found_gain = gain(rounds, runs[self.base], name, name in self.more_is_better)
                    figures |= found_gain.figures(f"{prefix}{name}_gain_{arm}")
            figures |= {prefix + name: value for name, value in checks_of(runs).items()}
        return figures

    @classmethod
    def parser(cls, description: str, rounds: int) -> argparse.ArgumentParser:
        """Return the options that all experiments share."""
        parser = arguments(description)
        parser.add_argument("--rounds", type=int, default=rounds)
        parser.add_argument("--arms", nargs="+", choices=list(cls.arms), default=list(cls.arms))
        parser.add_argument("--report", action="store_true", help="run nothing, show what there is")
        parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / cls.name)
        parser.set_defaults(loads=[1.0])
        return parser

    def main(self, quick: dict[str, Any]) -> Mapping[float, Arms]:
        """Run what is missing, print the tables, write the figures; return the results."""
        options = self.options
        if options.quick:
            vars(options).update({"rounds": 1, "out": Path(f"runs/{self.name}_quick")} | quick)
        for folder in (options.out, self.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        arms = [arm for arm in self.arms if arm in {*options.arms, self.base}]
        with resumable():
            self.run_missing(arms, 0 if options.report else options.rounds)
        found = {load: self.results(load, arms) for load in options.loads}
        tables = self.tables(found)
        print("\n\n".join(tables))
        write_report(self.name, self.summary(found), options.json, tables=tables)
        return found


def excess_of(runs: Arms) -> dict[str, float]:
    """Return by how much the steps of all runs were longer than they should be."""
    every = [
        one["excess"] for rounds in runs.values() for one in rounds.values() if "excess" in one
    ]
    return {"excess_step_time": float(np.mean(every))} if every else {}


def checks_of(runs: Arms) -> dict[str, float]:
    """Return how true all runs were: their steps, and what their clients got."""
    every = [one for rounds in runs.values() for one in rounds.values()]
    if not every:
        return {}
    compared = [one["changed"] for one in every if "changed" in one]
    changed = {"answers_changed": float(sum(compared))} if compared else {}
    return excess_of(runs) | changed | {"requests_failed": sum(one["failed"] for one in every)}


def emulated_replicas(
    emulate: EmulateOptions,
    replicas: int,
    slots: int,
    *arguments: str,
    prefill: int = 0,
    max_model_len: int = 16_384,
) -> Deployment:
    """Return so many emulated engines that decode, and some that only prefill."""
    engine = EngineOptions(
        max_num_seqs=slots,
        block_size=32,
        max_model_len=max_model_len,
        emulate=emulate,
        arguments=[*QUIET, *arguments],
    )
    return patient(local_deployment("smollm2", engine, decode=replicas, prefill=prefill))


def of_results(options: EmulateOptions, *others: str) -> dict[str, Any]:
    """Return what of the options changes results: not logs, nor the others that are named."""
    return {k: v for k, v in to_builtins(options).items() if k not in ("logs", *others)}


async def steady_capacity(
    serving: Deployment, requests: int, prompts: PromptLengths, scratch: Path
) -> tuple[float, float]:
    """Return `steady_part` of a load that is drawn."""
    emulate = serving.engine.emulate
    assert emulate is not None
    most = max(200, requests // 2)
    load = drawn_load(MEASURED_ROUND, most, inf, prompts, emulate.lengths)
    return await steady_part(serving, load, scratch)


async def steady_part(
    serving: Deployment,
    load: Sequence[EmulatedRequest],
    scratch: Path,
    prompt: Prompt = drawn_prompt,
) -> tuple[float, float]:
    """Return the requests a second of a load at once, in its steady part, and tokens of each."""
    emulate = serving.engine.emulate
    assert emulate is not None
    with proxy(serving, scratch):
        url, model = serving.proxy_url, serving.served_name
        answers = await serve_load(
            url, model, load, emulate.dilation, MEASURED_ROUND, prompt=prompt
        )
    rate = steady_rate(one.last / emulate.dilation for one in answers)
    return rate, float(np.mean([one.tokens for one in answers]))


async def served(
    serving: Deployment,
    load: Sequence[EmulatedRequest],
    salt: int,
    scratch: Path,
    prompt: Prompt = drawn_prompt,
) -> dict[str, float]:
    """Serve a load, and return what its clients saw and what the engines' steps were."""
    emulate = serving.engine.emulate
    assert emulate is not None
    await until_idle(serving, PATIENCE)
    before = await asyncio.to_thread(preemptions, serving)
    began, since = time.monotonic(), time.perf_counter()
    with proxy(serving, scratch):
        url, model = serving.proxy_url, serving.served_name
        answers = await serve_load(url, model, load, emulate.dilation, salt, prompt=prompt)
        moved = await asyncio.to_thread(moves, serving)
        await asyncio.to_thread(check_schedulers, serving)
    await until_idle(serving, PATIENCE)
    sums = step_sums(step_logs(scratch, serving.instances), since)
    return answer_figures(answers, emulate.dilation) | {
        "preemptions": await asyncio.to_thread(preemptions, serving) - before,
        "moves": moved,
        "changed": float(changed_answers(answers, Path(model_to_load(serving)))),
        "excess": sums.excess,
        "jitter": sums.jitter,
        "steps": float(sums.steps),
        "wall": time.monotonic() - began,
    }


def check_schedulers(serving: Deployment) -> None:
    """Check that engines did what was asked of them.

    Raises:
        RuntimeError: one has left a decision to vLLM.
    """
    failures = scheduler_failures(serving)
    if failures:
        raise RuntimeError(failures)


def step_logs(scratch: Path, instances: Sequence[Instance]) -> list[Path]:
    """Return the files in which engines log their steps."""
    return [scratch / "steps" / f"{one.name}.csv" for one in instances]
