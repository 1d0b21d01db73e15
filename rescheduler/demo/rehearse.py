"""The verb ``rehearse``: a trace against a deployment whose engines are emulated."""

import asyncio
import csv
import io
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

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
from rescheduler.demo.load import (
    TPOT_S,
    TTFT_S,
    EmulatedAnswer,
    EmulatedRequest,
    answer_figures,
    asked_body,
    changed_answers,
    metric_total,
    moves,
    preemptions,
    say,
    scheduler_failures,
    serve_answers,
    step_sums,
    watched,
)
from rescheduler.emulation.emulate_options import MOST_EXCESS
from rescheduler.emulation.scripted_answers import LARGEST
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.emulated_deployment import emulated, emulated_engine, model_to_load
from rescheduler.engines.launch_engines import PROXY, Launched, launched
from rescheduler.simulator.config.simulation_config import SLOConfig
from rescheduler.simulator.results.report import json_text, refuse_foreign_folder
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.simulator.workloads.trace_formats import TraceFormatName

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
_INTERRUPTED = "interrupted"
_BUSY_SECONDS = 5.0
"""Of steps, below which one late one would count for much."""


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
    but for the model. A step lasts as long as on the GPU that they emulate. An answer has as many
    tokens as in the trace, but neither the scheduler nor the router knows this number. To compare
    two routing policies, orders or planners, run it twice, as in --routing '{name: headroom}'.
    Ctrl-C ends it early and reports what has been answered. Seconds are the emulated GPU's.

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
        The exit status: 0 if all was served, 130 after Ctrl-C, and 1 if the figures are not to be
        trusted: the machine did not keep up, or a server died.

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
    deployment = _prepared(config, steps)
    answers = [EmulatedAnswer(request) for request in load]
    about = {
        "made_by": "headway rehearse",
        "deployment": to_builtins(deployment),
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
    with launched(deployment, logs, serve=True, show=True, tethered=True) as running:
        last = _dilation(deployment) * max(request.arrives for request in load)
        say(
            f"Serving {len(load)} requests, the last of which comes after {last:,.0f} s. "
            f"See it in a browser: {deployment.admin_url}/ui (its token: see {logs}/proxy.log)"
        )
        since = time.perf_counter()
        try:
            ended = asyncio.run(_served(deployment, answers, running))
        except KeyboardInterrupt:
            ended = _INTERRUPTED
        with held_interrupts():  # an impatient Ctrl-C would lose what has been served
            answers = [answer for answer in answers if answer.tokens or answer.error]
            goals = slo or SLOConfig(TTFT_S, TPOT_S)
            counted = _counted(deployment)
            counted["excess"] = excess(
                [steps / f"{i.name}.csv" for i in deployment.instances], since
            )
            return _report(deployment, answers, counted, ended, goals, about, out)


def _prepared(deployment: Deployment, steps: Path) -> Deployment:
    """Return a deployment of one proxy, which logs its engines' steps, and has no past."""
    assert deployment.engine.emulate is not None
    if deployment.coordinator is not None:
        say("The coordinator is left out: one proxy places and moves all requests.")
    order = deployment.engine.order and {
        name: value for name, value in deployment.engine.order.items() if name != "past_file"
    }
    engine = replace(
        deployment.engine,
        emulate=replace(deployment.engine.emulate, logs=str(steps.absolute())),
        order=order,
    )
    # One address, which all requests come from, gets half of the connections.
    past = replace(deployment.proxy.past, file=None)
    proxy = replace(deployment.proxy, connections=None, past=past)
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


def _dilation(deployment: Deployment) -> float:
    assert deployment.engine.emulate is not None
    return deployment.engine.emulate.dilation


def _counted(deployment: Deployment) -> dict[str, float]:
    """Return how many requests were preempted, moved, and had their prompt computed twice."""
    metrics = f"{deployment.proxy_url}/metrics"
    try:
        return {
            "preemptions": preemptions(deployment),
            "moves": moves(deployment),
            "computed_twice": sum(
                metric_total(metrics, f"headway_proxy_{name}_total") for name in _TWICE
            ),
        }
    except OSError as error:
        say(f"How many requests were preempted and moved is unknown: {error}")
        return dict.fromkeys(("preemptions", "moves", "computed_twice"), np.nan)


def excess(logs: list[Path], since: float) -> float:
    """Return by how much steps were too long: all engines', or of one that had much to do.

    It is NaN where no engine has logged a step since.
    """
    logs = [log for log in logs if log.exists()]
    every = step_sums(logs, since)
    alone = (step_sums([log], since) for log in logs)
    busy = (one.excess for one in alone if one.asked > max(_BUSY_SECONDS, every.asked / 100))
    return max([every.excess, *busy]) if every.steps else np.nan


async def _served(deployment: Deployment, answers: list[EmulatedAnswer], running: Launched) -> str:
    """Serve the load; return why it ended early or went wrong, or nothing."""
    longest = max(answer.request.answer_tokens for answer in answers)
    asked = partial(asked_body, deployment.served_name, salt=time.time_ns(), max_tokens=longest)
    load = serve_answers(deployment.proxy_url, answers, asked, _dilation(deployment))
    columns = (
        TextColumn("serving"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("serving", total=len(answers), running=0)

        async def look() -> str:
            done = sum(bool(answer.tokens or answer.error) for answer in answers)
            sent = sum(answer.sent > 0 for answer in answers)
            progress.update(task, completed=done, running=sent - done)
            for server in running.take_ended():
                say(f"headway rehearse: {server.why_it_ended()}")
                if server.name == PROXY or not running.is_running:
                    return f"{server.name} ended"
            return ""

        if ended := await watched(load, 1.0, look):
            return ended
    with suppress(OSError):
        return await asyncio.to_thread(scheduler_failures, deployment)
    return ""


def _report(
    deployment: Deployment,
    answers: list[EmulatedAnswer],
    counted: dict[str, float],
    ended: str,
    slo: SLOConfig,
    about: dict[str, Any],
    out: Path,
) -> int:
    """Write and print what clients and servers saw; return the exit status."""
    dilation = _dilation(deployment)
    write_text_atomically(out / "requests.csv", rows_of(answers, dilation))
    figures: dict[str, float] = {}
    if any(not answer.error for answer in answers):
        figures = answer_figures(answers, dilation, slo.ttft_s, slo.tpot_s) | counted
        changed = changed_answers(answers, Path(model_to_load(deployment)))
        figures["changed"] = float(changed)
    document = {
        "_about": about,
        "ended_early": ended,
        "figures": {name: None if np.isnan(one) else one for name, one in figures.items()},
    }
    write_text_atomically(out / _REPORT, json_text(document, allow_nan=False))
    if figures:
        Console().print(_table(figures, slo))
    say(f"Written: {out / _REPORT}, {out / 'requests.csv'}")
    failed = [answer for answer in answers if answer.error]
    if dilation != 1:
        say(f"Seconds are the emulated GPU's; the run took {dilation:g} times as long.")
    if failed:
        say(f"{len(failed)} requests failed, the first: {failed[0].error}")
    if figures.get("changed"):
        say(f"{figures['changed']:.0f} answers differ from their scripts: please report this.")
    if ended:
        why = "Interrupted" if ended == _INTERRUPTED else ended
        say(f"{why}: the figures are of the requests answered until then.")
    elif not figures:
        say("No request was answered.")
    late = counted["excess"]
    if np.isnan(late):
        say("Whether the machine kept up is unknown: no engine has logged its steps.")
    elif late > MOST_EXCESS:
        say(
            f"Steps took {late:.1%} longer than they should, so that the figures are not "
            f"to be trusted: raise engine.emulate.dilation, which is {dilation:g}."
        )
    if ended == _INTERRUPTED:
        return 130
    return int(not (figures and not ended and late <= MOST_EXCESS))


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


def rows_of(answers: list[EmulatedAnswer], dilation: float) -> str:
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
