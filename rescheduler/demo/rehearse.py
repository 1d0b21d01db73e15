"""The verb ``rehearse``: a trace against a deployment whose engines are emulated."""

import asyncio
import csv
import io
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from data_collection.files import write_text_atomically
from data_collection.versions import machine, source_commit, versions
from data_collection.workload.arrivals import TimeUnit
from rescheduler.commands.event_loop import held_interrupts, raise_open_files
from rescheduler.demo.demo_load import (
    metric_total,
    moves,
    preemptions,
    say,
    scheduler_failures,
)
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
from rescheduler.engines.emulated_deployment import emulated, emulated_engine, model_to_load
from rescheduler.engines.launch_engines import PROXY, Launched, launched
from rescheduler.simulator.config.simulation_config import SLOConfig
from rescheduler.simulator.results.report import json_text, refuse_foreign_folder
from rescheduler.simulator.workloads.trace_files import TraceFile, TraceFormatName

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
_TWICE = ("prompts_computed_twice", "kv_load_failures")
"""Counters of prompts whose blocks nobody could read any more, at the proxy and at an engine."""
_INTERRUPTED = 130


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
    Ctrl-C ends it early and reports what has been answered. Seconds are the
    emulated GPU's.

    Args:
        trace: file of requests: Azure's, BurstGPT's, Mooncake's or Headway's own columns, plain
            or gzipped.
        config: the deployment.
        emulate: Emulate this GPU: a shipped machine, such as h100-llama-8b, or a profile's file. If
            not set, as the deployment says.
        requests: Use only so many requests of the trace, from its beginning. If not set, all.
        rate: Requests a second, as a Poisson process. If not set, requests arrive as recorded.
        slo: {ttft_s, tpot_s} of the requests that goodput counts; 2 s and 50 ms if not set.
        format: headway, azure, burstgpt or mooncake; told by the first line if not set.
        time_unit: s, ms, us or ns, of the arrivals; if not set, as the format has it.
        out: folder of rehearsal.json, requests.csv, and the logs of engines and steps.
        overwrite: write to ``out`` whatever is in it.

    Returns:
        The exit status: 0 where all was served, 1 where figures are not to be trusted, since the
        machine did not keep up or a server died, 130 after Ctrl-C.

    Raises:
        ValueError: a file, an option or a request that cannot be rehearsed.
        LaunchError: an engine cannot be started.
    """
    if emulate is not None:
        config = emulated(config, emulate)
    if config.engine.emulate is None:
        raise ValueError("no GPU to emulate: pass --emulate h100-llama-8b or set engine.emulate")
    if rate is not None and not 0 < rate < np.inf:
        raise ValueError(f"--rate must be a positive number, not {rate}")
    refuse_foreign_folder(out, "rehearse", _REPORT, overwrite)
    read = TraceFile(trace, requests, True, format, time_unit, "--time-unit")
    load = _load(read, rate, emulated_engine(config.engine).max_model_len)
    say(read.read_as)
    steps = out / "steps" / time.strftime("%Y%m%d-%H%M%S")
    rehearsal = _Rehearsal(_prepared(config, steps), load, steps)
    about = {
        "made_by": "headway rehearse",
        "deployment": to_builtins(rehearsal.deployment),
        "trace": read.read_as,
        "commit": source_commit(),
        "machine": machine(),
        "versions": versions(),
    }
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _REPORT).exists():
        write_text_atomically(out / _REPORT, json_text({"_about": about}))
    raise_open_files()
    logs = out / "logs"
    with launched(rehearsal.deployment, logs, serve=True, show=True, tethered=True) as running:
        served = rehearsal.run(running)
        with held_interrupts():  # an impatient Ctrl-C would lose what has been served
            return _report(served, rehearsal, slo or SLOConfig(TTFT_S, TPOT_S), about, out)


def _prepared(deployment: Deployment, steps: Path) -> Deployment:
    """Return a deployment of one proxy, which logs its engines' steps."""
    assert deployment.engine.emulate is not None
    if deployment.coordinator is not None:
        say("The coordinator is left out: one proxy places and moves all requests.")
    engine = replace(
        deployment.engine,
        emulate=replace(deployment.engine.emulate, logs=str(steps.absolute())),
    )
    # One address, which all requests come from, gets half of the connections.
    proxy = replace(deployment.proxy, connections=None)
    deployment = replace(deployment, engine=engine, proxy=proxy, coordinator=None)
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
    if longest is not None and (too_long := int(np.count_nonzero(prompt + output > longest))):
        raise ValueError(
            f"{trace.name}: {too_long} of {len(prompt)} requests are longer than the engines' "
            f"context of {longest} tokens; the longest has {(prompt + output).max()}"
        )
    rows = zip(prompt.tolist(), output.tolist(), arrival.tolist(), strict=True)
    return [EmulatedRequest(i % LARGEST, *row) for i, row in enumerate(rows)]


_BUSY_SECONDS = 5.0
"""Of steps, below which one late one would count for much."""


class _Served(NamedTuple):
    """What clients and servers saw.

    Preemptions, moves and prompts computed twice are NaN where nobody says, ``excess`` where no
    engine logged its steps.
    """

    answers: list[EmulatedAnswer]
    preempted: float
    moved: float
    computed_twice: float
    excess: float
    ended: str
    """Why it ended early, or nothing."""
    interrupted: bool


class _Rehearsal:
    """A load and the deployment that serves it."""

    def __init__(self, deployment: Deployment, load: list[EmulatedRequest], steps: Path) -> None:
        self.deployment, self._steps = deployment, steps
        self._answers = [EmulatedAnswer(request) for request in load]
        assert deployment.engine.emulate is not None
        self.dilation = deployment.engine.emulate.dilation

    def run(self, running: Launched) -> _Served:
        """Serve the load, unless it is interrupted or there is nobody left to serve it."""
        last = self.dilation * max(one.request.arrives for one in self._answers)
        say(
            f"Serving {len(self._answers)} requests, the last of which comes after {last:,.0f} s. "
            f"See it in a browser: {self.deployment.admin_url}/ui "
            f"(its token: see {running.logs}/proxy.log)"
        )
        since, ended, interrupted = time.perf_counter(), "", False
        try:
            ended = asyncio.run(self._served(running))
        except KeyboardInterrupt:
            interrupted = True
        with held_interrupts():
            answers = [one for one in self._answers if one.tokens or one.error]
            return _Served(answers, *self._counted(), self._excess(since), ended, interrupted)

    def _counted(self) -> tuple[float, float, float]:
        """Return how many requests were preempted, moved, and had their prompt computed twice."""
        metrics = f"{self.deployment.proxy_url}/metrics"
        try:
            twice = sum(metric_total(metrics, f"headway_proxy_{name}_total") for name in _TWICE)
            return preemptions(self.deployment), moves(self.deployment), twice
        except OSError as error:
            say(f"How many requests were preempted and moved is unknown: {error}")
            return np.nan, np.nan, np.nan

    def _excess(self, since: float) -> float:
        """Return by how much steps were too long: all engines', or of one that had much to do."""
        logs = [self._steps / f"{one.name}.csv" for one in self.deployment.instances]
        logs = [log for log in logs if log.exists()]
        every = step_sums(logs, since)
        alone = (step_sums([log], since) for log in logs)
        busy = (one.excess for one in alone if one.asked > max(_BUSY_SECONDS, every.asked / 100))
        return max([every.excess, *busy]) if every.steps else np.nan

    async def _served(self, running: Launched) -> str:
        longest = max(one.request.answer_tokens for one in self._answers)
        url, name = self.deployment.proxy_url, self.deployment.served_name
        serving = asyncio.create_task(
            serve_answers(url, name, self._answers, self.dilation, time.time_ns(), longest)
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
                await asyncio.wait([serving], timeout=1.0)
                done = sum(bool(one.tokens or one.error) for one in self._answers)
                sent = sum(one.sent > 0 for one in self._answers)
                progress.update(task, completed=done, running=sent - done)
                for server in running.take_ended():
                    say(f"headway rehearse: {server.why_it_ended()}")
                    if server.name == PROXY or not running.is_running:
                        serving.cancel()
                        await asyncio.gather(serving, return_exceptions=True)
                        return f"{server.name} ended"
        await serving
        with suppress(OSError):
            return await asyncio.to_thread(scheduler_failures, self.deployment)
        return ""


def _report(
    served: _Served, rehearsal: _Rehearsal, slo: SLOConfig, about: dict[str, Any], out: Path
) -> int:
    answers = served.answers
    answered = [one for one in answers if not one.error]
    write_text_atomically(out / "requests.csv", _rows(answers, rehearsal.dilation))
    figures: dict[str, float] = {}
    if answered:
        figures = answer_figures(answers, rehearsal.dilation, slo.ttft_s, slo.tpot_s) | {
            "preemptions": served.preempted,
            "moves": served.moved,
            "computed_twice": served.computed_twice,
            "changed": float(changed_answers(answers, Path(model_to_load(rehearsal.deployment)))),
            "excess": served.excess,
        }
    document = {
        "_about": about,
        "ended_early": "interrupted" if served.interrupted else served.ended,
        "figures": {name: None if np.isnan(one) else one for name, one in figures.items()},
    }
    write_text_atomically(out / _REPORT, json_text(document, allow_nan=False))
    if figures:
        Console().print(_table(figures, slo))
    say(f"Written: {out / _REPORT}, {out / 'requests.csv'}")
    return _remarks(served, figures, rehearsal.dilation)


def _table(figures: dict[str, float], slo: SLOConfig) -> Table:
    table = Table("", "", box=None, show_header=False)
    answered = figures["requests"] - figures["failed"]
    table.add_row("requests answered, failed", f"{answered:.0f}, {figures['failed']:.0f}")
    for key, name in _SHOWN.items():
        table.add_row(name, f"{figures[key]:.4g} s")
    table.add_row(
        f"goodput (first token within {slo.ttft_s:g} s, {slo.tpot_s:g} s a token)",
        f"{figures['goodput']:.4g} requests/s",
    )
    table.add_row("generated", f"{figures['tokens_per_s']:,.0f} tokens/s")
    for key in ("preemptions", "moves", "computed_twice"):
        name = "prompts computed twice" if key == "computed_twice" else key
        table.add_row(name, "unknown" if np.isnan(figures[key]) else f"{figures[key]:.0f}")
    return table


def _remarks(served: _Served, figures: dict[str, float], dilation: float) -> int:
    """Print what makes the figures doubtful; return the exit status."""
    failed = [one for one in served.answers if one.error]
    if dilation != 1:
        say(f"Seconds are the emulated GPU's; the run took {dilation:g} times as long.")
    if failed:
        say(f"{len(failed)} requests failed, the first: {failed[0].error}")
    if figures.get("changed"):
        say(f"{figures['changed']:.0f} answers differ from their scripts: please report this.")
    if served.interrupted or served.ended:
        why = "Interrupted" if served.interrupted else served.ended
        say(f"{why}: the figures are of the requests answered until then.")
    elif not figures:
        say("No request was answered.")
    if np.isnan(served.excess):
        say("Whether the machine kept up is unknown: no engine has logged its steps.")
    elif served.excess > MOST_EXCESS:
        say(
            f"Steps took {served.excess:.1%} longer than they should, so that the figures are not "
            f"to be trusted: raise engine.emulate.dilation, which is {dilation:g}."
        )
    if served.interrupted:
        return _INTERRUPTED
    sound = figures and not served.ended and served.excess <= MOST_EXCESS
    return int(not sound)


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
