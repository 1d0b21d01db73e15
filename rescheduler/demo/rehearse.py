"""The verb ``rehearse``: a trace against a deployment whose engines are emulated."""

import asyncio
import csv
import io
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from data_collection.atomic_file import write_text_atomically
from data_collection.versions import machine, source_commit, versions
from data_collection.workload.arrivals import TimeUnit
from rescheduler.demo.demo_load import metric_total, preemptions
from rescheduler.demo.scripted_load import (
    TPOT_S,
    TTFT_S,
    EmulatedAnswer,
    EmulatedRequest,
    answer_figures,
    changed_answers,
    serve_answers,
    step_sums,
)
from rescheduler.emulation.emulate_options import MOST_EXCESS
from rescheduler.emulation.scripted_answers import LARGEST
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.emulated_deployment import emulated, model_to_load
from rescheduler.engines.launch_engines import LaunchProgress, launched
from rescheduler.simulator.config.simulation_config import SLOConfig
from rescheduler.simulator.results.report import json_text, refuse_foreign_folder
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.simulator.workloads.trace_formats import TraceFormatName

__all__ = ["rehearse"]

_REPORT = "rehearsal.json"
_SHOWN = {
    "latency": "latency",
    "latency_p99": "latency, P99",
    "ttft": "time to first token",
    "ttft_p99": "time to first token, P99",
    "tpot": "time per output token",
    "tpot_p99": "time per output token, P99",
    "gap_p99": "longest pause of a stream, P99",
}
"""Figures in seconds, and what the table calls them."""
_INTERRUPTED = 130
_OTHERS = 64
"""Connections beside those of the requests."""


def rehearse(
    trace: Path,
    config: Deployment,
    emulate: str | None = None,
    requests: int | None = None,
    rate: float | None = None,
    slo: SLOConfig | None = None,
    format: TraceFormatName | None = None,
    time_unit: TimeUnit | None = None,
    out: Path = Path("runs/rehearsal"),
    overwrite: bool = False,
) -> int:
    """Serve a trace with emulated engines, and print what its clients would have seen.

    Starts the deployment's engines and proxy on this machine, without a GPU, and sends each
    request of the trace when it came, with a prompt of as many tokens. The engines are vLLM's own
    but for the model: a step lasts as long as on the GPU that they emulate, and an answer has as
    many tokens as in the trace, which neither the scheduler nor the router is told. Compare two
    routing policies, orders or planners by running it twice, as in --routing '{name: headroom}'.
    Ctrl-C ends it early and reports what has been answered.

    Args:
        trace: file of requests: Azure's, BurstGPT's, Mooncake's or Headway's own columns, plain
            or gzipped.
        config: the deployment.
        emulate: a GPU to emulate: the name of a shipped machine, such as h100-llama-8b, or a
            profile's file; what the deployment says when null.
        requests: of the trace, from its beginning; all when null.
        rate: requests a second, as a Poisson process; when null they come as recorded.
        slo: {ttft_s, tpot_s} of the requests that goodput counts; 2 s and 50 ms when null.
        format: headway, azure, burstgpt or mooncake; told by the first line when null.
        time_unit: s, ms, us or ns, of the arrivals; as the format has it when null.
        out: folder of rehearsal.json, requests.csv, and the logs of engines and steps.
        overwrite: write to ``out`` whatever is in it.

    Returns:
        The exit status: 1 where the machine did not keep up, so that figures are not to be trusted,
        130 after Ctrl-C.

    Raises:
        ValueError: a file, an option or a request that cannot be rehearsed.
        LaunchError: an engine cannot be started.
    """
    if emulate is not None:
        config = emulated(config, emulate)
    if config.engine.emulate is None:
        raise ValueError("no engines to emulate: add --emulate h100-llama-8b, or engine.emulate")
    if rate is not None and not 0 < rate < np.inf:
        raise ValueError(f"--rate must be a positive number, not {rate}")
    refuse_foreign_folder(out, "rehearse", _REPORT, overwrite)
    read = TraceFile(trace, requests, True, format, time_unit, "--time-unit")
    load = _load(read, rate, config.engine.max_model_len)
    _say(read.read_as)
    objectives = slo or SLOConfig(ttft_s=TTFT_S, tpot_s=TPOT_S)
    rehearsal = _Rehearsal(_prepared(config, out, len(load)), load, out)
    about = _about(rehearsal.deployment, read.read_as)
    shutil.rmtree(out / "steps", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(out / _REPORT, json_text({"_about": about}))
    with ExitStack() as stack:
        progress = stack.enter_context(LaunchProgress(out / "logs"))
        stack.enter_context(
            launched(rehearsal.deployment, out / "logs", serve=True, report=progress.report)
        )
        progress.finish()
        served = rehearsal.run()
    return _report(rehearsal, served, objectives, about)


def _about(deployment: Deployment, read_as: str) -> dict[str, Any]:
    return {
        "made_by": "headway rehearse",
        "deployment": to_builtins(deployment),
        "trace": read_as,
        "commit": source_commit(),
        "machine": machine(),
        "versions": versions(),
    }


def _prepared(deployment: Deployment, out: Path, requests: int) -> Deployment:
    """Return a deployment that logs its steps, and takes all requests from one address."""
    assert deployment.engine.emulate is not None
    emulate = replace(deployment.engine.emulate, logs=str((out / "steps").absolute()))
    # One address gets half of the connections.
    proxy = replace(deployment.proxy, connections=2 * requests + _OTHERS)
    engine = replace(deployment.engine, emulate=emulate)
    deployment = replace(deployment, engine=engine, proxy=proxy)
    deployment.check()
    return deployment


def _load(trace: TraceFile, rate: float | None, longest: int | None) -> list[EmulatedRequest]:
    """Return the requests of a trace; raises where they have no times, or engines no room."""
    if rate is None and not trace.has_arrivals:
        raise ValueError(f"{trace.name}: no arrival times; add --rate, in requests a second")
    generator = np.random.default_rng(0)
    blocks = list(trace.blocks(generator))
    arrival, prompt, output = (
        np.concatenate([getattr(block, name) for block in blocks])
        for name in ("arrival", "prompt", "output")
    )
    if rate is not None:
        arrival = np.cumsum(generator.exponential(1 / rate, len(prompt)))
    most = int((prompt + output).max())
    if longest is not None and most > longest:
        number = int(np.count_nonzero(prompt + output > longest))
        raise ValueError(
            f"{trace.name}: {number} of {len(prompt)} requests are longer than "
            f"engine.max_model_len, {longest} tokens; the longest has {most}"
        )
    rows = zip(prompt.tolist(), output.tolist(), arrival.tolist(), strict=True)
    return [EmulatedRequest(i % LARGEST, *row) for i, row in enumerate(rows)]


class _Served(NamedTuple):
    """What clients and servers saw."""

    answers: list[EmulatedAnswer]
    preempted: float
    moved: float
    excess: float
    interrupted: bool


class _Rehearsal:
    """A load and the deployment that serves it."""

    def __init__(self, deployment: Deployment, load: list[EmulatedRequest], out: Path) -> None:
        self.deployment, self.out = deployment, out
        self._answers = [EmulatedAnswer(request) for request in load]
        assert deployment.engine.emulate is not None
        self.dilation = deployment.engine.emulate.dilation

    def run(self) -> _Served:
        """Serve the load, unless it is interrupted."""
        last = self.dilation * max(one.request.arrives for one in self._answers)
        _say(
            f"Serving {len(self._answers)} requests, the last of which comes after {last:,.0f} s. "
            f"See it in a browser: {self.deployment.admin_url}/ui "
            f"(its token: see {self.out}/logs/proxy.log)"
        )
        since, interrupted = time.perf_counter(), False
        try:
            asyncio.run(self._served())
        except KeyboardInterrupt:
            interrupted = True
        instances = self.deployment.decode
        logs = [self.out / "steps" / f"{instance.name}.csv" for instance in instances]
        return _Served(
            [one for one in self._answers if one.tokens or one.error],
            *self._counted(),
            step_sums([log for log in logs if log.exists()], since).excess,
            interrupted,
        )

    def _counted(self) -> tuple[float, float]:
        """Return how many requests were preempted and moved; NaN where nobody answers."""
        metrics = f"{self.deployment.proxy_url}/metrics"
        try:
            moved = metric_total(metrics, "headway_proxy_migrations_total", outcome="moved")
            return preemptions(self.deployment), moved
        except OSError as error:
            _say(f"how many requests were preempted and moved is unknown: {error}")
            return np.nan, np.nan

    async def _served(self) -> None:
        longest = max(one.request.answer_tokens for one in self._answers)
        deployment, salt = self.deployment, time.time_ns()
        serving = asyncio.create_task(
            serve_answers(
                *(deployment.proxy_url, deployment.served_name, self._answers),
                *(self.dilation, salt, longest),
            )
        )
        columns = (
            TextColumn("serving"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[running]} running"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("serving", total=len(self._answers), running=0)
            while not serving.done():
                await asyncio.wait([serving], timeout=0.5)
                ended = sum(bool(one.tokens or one.error) for one in self._answers)
                sent = sum(one.sent > 0 for one in self._answers)
                progress.update(task, completed=ended, running=sent - ended)
        await serving


def _report(rehearsal: _Rehearsal, served: _Served, slo: SLOConfig, about: dict[str, Any]) -> int:
    answers, out = served.answers, rehearsal.out
    failed = [one for one in answers if one.error]
    if len(failed) == len(answers):
        why = failed[0].error if failed else "interrupted before the first of them"
        raise ValueError(f"no request was answered: {why}")
    figures = answer_figures(answers, rehearsal.dilation, slo.ttft_s, slo.tpot_s) | {
        "preemptions": served.preempted,
        "moves": served.moved,
        "changed": float(changed_answers(answers, Path(model_to_load(rehearsal.deployment)))),
        "excess": served.excess,
    }
    table = Table("", "", box=None, show_header=False)
    table.add_row("requests answered", f"{len(answers) - len(failed)}")
    for key, name in _SHOWN.items():
        table.add_row(name, f"{figures[key]:.4g} s")
    table.add_row(
        f"goodput (first token within {slo.ttft_s:g} s, {slo.tpot_s:g} s a token)",
        f"{figures['goodput']:.4g} requests/s",
    )
    table.add_row("generated", f"{figures['tokens_per_s']:,.0f} tokens/s")
    table.add_row("preemptions, moves", f"{served.preempted:.0f}, {served.moved:.0f}")
    Console().print(table)
    document = {
        "_about": about,
        "interrupted": served.interrupted,
        "figures": figures,
    }
    write_text_atomically(out / "requests.csv", _rows(answers, rehearsal.dilation))
    write_text_atomically(out / _REPORT, json_text(document))
    _say(f"Written: {out / _REPORT}, {out / 'requests.csv'}")
    if figures["changed"]:
        _say(f"{figures['changed']:.0f} answers are not their scripts: please report this")
    if failed:
        _say(f"{len(failed)} requests failed, the first: {failed[0].error}")
    if served.interrupted:
        _say("Interrupted: the figures are of the requests answered until then.")
    if served.excess > MOST_EXCESS:
        _say(
            f"Steps took {served.excess:.1%} longer than they should, so that the figures are not "
            f"to be trusted: raise engine.emulate.dilation, which is {rehearsal.dilation:g}."
        )
    if served.interrupted:
        return _INTERRUPTED
    return int(served.excess > MOST_EXCESS)


def _rows(answers: list[EmulatedAnswer], dilation: float) -> str:
    """Return what each client saw, in seconds of the emulated engines."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "latency_s", "pause_s", "error")
    )
    for one in answers:
        request = one.request
        times: list[Any] = ["", "", ""]
        if not one.error:
            seen = (one.first - one.sent, one.last - one.sent, one.longest_gap)
            times = [f"{seconds / dilation:.4f}" for seconds in seen]
        lengths = (request.prompt_tokens, request.answer_tokens)
        writer.writerow((f"{request.arrives:.4f}", *lengths, *times, one.error))
    return text.getvalue()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
