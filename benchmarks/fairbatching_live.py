"""FairBatching on a real engine: who meets both objectives as the load grows?

    python -m benchmarks.fairbatching_live --trace azure2023_conv.csv.gz [--quick]
        [--systems NAME ...] [--loads X ...] [--ttft-times X ...] [--tpot-times X ...]
        [--rounds N] [--out FOLDER] [--json OUT] [--png OUT]

One engine of SmolLM2 a system, on this machine's CPU; all but the one under load are idle. Requests
come at the times of the trace (open loop), which is stretched so that the load is a share of the
capacity that the profile gives. Lengths are the trace's, scaled down to what this model holds.
Every system gets the same requests; at each load the systems take turns in another order. Each
round goes on in the trace where the one before ended; its lengths differ, so that the same load in
requests may be another one in tokens.

Objectives are multiples of what a request takes that is alone. As in the paper, the TPOT of a
request is its worst running mean, a rejected request counts as late, and the effective rate is
that of requests which meet both objectives. Sarathi's token budget is the best of three.

What is finished is kept in the folder, and not run again; nor is a system that knows nothing of the
objectives, for others.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.support.live_runs import CONTINUOUS_USAGE, TimedAnswer, completed
from benchmarks.support.report import arguments, report
from data_collection.files import write_text_atomically
from data_collection.models import resolve_model
from rescheduler.commands.event_loop import ending_signals_raised
from rescheduler.demo.load import LoadRequest, serve_answers
from rescheduler.engines.deployment import EngineOptions
from rescheduler.engines.engine_command import check_versions, cpu_interpreter, lone_engine_command
from rescheduler.engines.launch_local import free_ports
from rescheduler.engines.launch_process import ServerGroup, ServerProcess
from rescheduler.engines.launch_progress import LaunchProgress
from rescheduler.profiling.profile_command import profile as measure_profile
from rescheduler.simulator.results.report import markdown_table
from rescheduler.simulator.workloads.trace import TraceBlock, first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile
from rescheduler.step_time.profile import Profile, load_profile

MODEL = "smollm2"
BATCHED_TOKENS = 2048
ENGINE = EngineOptions(
    dtype="float32", max_model_len=1024, max_num_seqs=16, kv_cache_gb=1, enforce_eager=True
)
SCHEDULER = "rescheduler.batching.vllm_scheduler.FairBatchingScheduler"
MIDDLEWARE = "rescheduler.batching.admission.AdmissionMiddleware"
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "vllm": None,  # vLLM's own scheduler, as it comes
    "sarathi": {"formation": "sarathi"},
    "fairbatching": {"formation": "fairbatching", "reserve": 0.0},  # as the paper has it
    "fairbatching_pab": {"formation": "fairbatching", "reserve": 0.0, "admission": True},
    "fairbatching_reserve": {"formation": "fairbatching", "reserve": 0.1},  # as it comes
    "fairbatching_reserve_pab": {"formation": "fairbatching", "reserve": 0.1, "admission": True},
    "fairbatching_fixed": {"formation": "fairbatching_fixed", "reserve": 0.0},
    "fairbatching_tokens": {"formation": "fairbatching_tokens", "reserve": 0.0},
}
DEADLINES = {"deadlines": "first_token"}  # the measure's, as in the paper's tables
MAIN = tuple(SYSTEMS)[:6]
BUDGETS = (64, 128, 256)
LOADS = (0.6, 0.8, 1.0, 1.2)
SECONDS = 60.0
PATIENCE = 120.0
"""Seconds without any token after which something hangs."""
LENGTH_SCALE = 1 / 6
LONGEST_PROMPT, LONGEST_OUTPUT = 700, 250
TTFT_TIMES, TPOT_TIMES = 5.0, 3.0
REQUESTS = 4_000
REJECTED = "HTTP 429"
PERCENTILES = tuple(f"{name}_p{p}" for name in ("ttft", "tpot") for p in (50, 95, 99))
_TOKENS = 10_000


@dataclass(frozen=True)
class Case:
    """One system under one load with one pair of objectives."""

    system: str
    load: float
    ttft_s: float
    tpot_s: float
    token_budget: int
    round: int = 0

    @property
    def informed(self) -> bool:
        return self.system.startswith("fairbatching")

    def file(self, folder: Path) -> Path:
        name = f"{self.system}-{self.token_budget}-{self.load:g}-{self.round}"
        if self.informed:
            name += f"-{self.ttft_s:.3f}-{self.tpot_s:.4f}"
        return folder / f"{name}.json"


def asked_of(salt: str, case: Case | None) -> Callable[[LoadRequest], dict[str, Any]]:
    """Return what is asked for a prompt of so many tokens, with the objectives it is given."""

    def asked(request: LoadRequest) -> dict[str, Any]:
        prompt = np.random.default_rng(request.seed).integers(1000, _TOKENS, int(request.prompt))
        body = {
            "model": MODEL,
            "prompt": prompt.tolist(),
            "max_tokens": request.max_tokens,
            "min_tokens": request.max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "cache_salt": salt,
            "stream_options": CONTINUOUS_USAGE,
        }
        if case is not None and case.informed:
            body["vllm_xargs"] = {"ttft_s": case.ttft_s, "tpot_s": case.tpot_s}
        return body

    return asked


def main() -> None:
    parser = arguments("FairBatching on a real engine")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(MAIN))
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--ttft-times", nargs="+", type=float, default=[TTFT_TIMES])
    parser.add_argument("--tpot-times", nargs="+", type=float, default=[TPOT_TIMES])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/fairbatching_live"))
    parser.add_argument("--png", type=Path, help="draw effective rate over load here")
    options = parser.parse_args()
    seconds = 20.0 if options.quick else SECONDS
    check_versions(moves=False)
    with ending_signals_raised():
        deployed = Deployed.measured(options.out, options.trace, seconds)
        budget = tuned_budget(deployed)
        results = deployed.results(
            [
                Case(system, load, *objectives, budget, number)
                for number in range(options.rounds)
                for objectives in deployed.objectives(options.ttft_times, options.tpot_times)
                for turn, load in enumerate(options.loads)
                for system in np.roll(options.systems, number + turn).tolist()
            ]
        )
    if options.png is not None:
        draw(results, options.png)
    print_tables(results)
    report("fairbatching_live", summarised(results), options.json)


Result = dict[str, Any]
"""The figures of a case, and what was served."""


@dataclass(frozen=True)
class Deployed:
    """What is known of an engine, and the trace that it serves for so many seconds a case."""

    folder: Path
    trace: TraceBlock
    capacity: float
    alone: dict[str, float]
    seconds: float

    @classmethod
    def measured(cls, folder: Path, trace: Path, seconds: float) -> "Deployed":
        """Measure what is not there yet."""
        folder.mkdir(parents=True, exist_ok=True)
        profile, block = profiled(folder), scaled_trace(trace)
        return cls(folder, block, capacity_of(profile, block), measured_alone(folder), seconds)

    def objectives(
        self,
        ttft_times: Sequence[float] = (TTFT_TIMES,),
        tpot_times: Sequence[float] = (TPOT_TIMES,),
    ) -> list[tuple[float, float]]:
        times = product(ttft_times, tpot_times)
        return [(ttft * self.alone["ttft"], tpot * self.alone["tpot"]) for ttft, tpot in times]

    def results(self, cases: Sequence[Case]) -> list[Result]:
        """Return the figures of cases, after those were served that were not yet."""
        missing = {
            case.file(self.folder): case for case in cases if not case.file(self.folder).is_file()
        }
        if missing:
            systems = dict.fromkeys(case.system for case in missing.values())
            budget = cases[0].token_budget
            with engines(self.folder, list(systems), budget) as urls:
                for number, (file, case) in enumerate(missing.items()):
                    served = self.serve(urls[case.system], case)
                    write_text_atomically(file, json.dumps(served))
                    result = figures_of(case, served, self.seconds)
                    shown = {k: round(result[k], 3) for k in ("effective", "violated", "ttft_p99")}
                    where = f"{number + 1}/{len(missing)}"
                    print(f"{where} {case}: {shown}", file=sys.stderr, flush=True)
        files = [case.file(self.folder).read_text() for case in cases]
        return [
            figures_of(case, json.loads(file), self.seconds)
            for case, file in zip(cases, files, strict=True)
        ]

    def serve(self, url: str, case: Case) -> list[dict[str, Any]]:
        rate, trace = case.load * self.capacity, self.trace
        used = int(rate * self.seconds)
        part = slice(case.round * used, (case.round + 1) * used)
        arrivals = trace.arrival[part] - trace.arrival[part.start]
        # The trace's own rate over the requests used decides how much it is stretched.
        arrivals = arrivals * (used / rate / (trace.arrival[part.stop] - trace.arrival[part.start]))
        rows = zip(trace.prompt[part], trace.output[part], arrivals, strict=True)
        load = [
            LoadRequest(f"{i}", str(int(prompt)), int(output), part.start + i, float(arrival))
            for i, (prompt, output, arrival) in enumerate(rows)
        ]
        served = [TimedAnswer(request) for request in load]
        asked = asked_of(f"{case.system}-{time.time():.0f}", case)
        asyncio.run(completed(serve_answers(url, served, asked), served, PATIENCE))
        failed = [one.error for one in served if one.error and not one.error.startswith(REJECTED)]
        if failed:
            raise RuntimeError(
                f"{case.system}: {len(failed)} requests failed, the first: {failed[0]}"
            )
        return [
            {
                "ttft": one.ttft,
                "worst_tpot": worst_tpot(one),
                "tpot": one.tpot,
                "error": one.error,
                "tokens": [[piece.tokens, round(piece.time - one.sent, 4)] for piece in one.chunks],
            }
            for one in served
        ]


def scaled_trace(path: Path) -> TraceBlock:
    """Return the trace's first requests, with lengths that this model holds."""
    trace = TraceFile(path)
    print(trace.read_as, file=sys.stderr)
    block = first_requests(trace, np.random.default_rng(0), REQUESTS)
    prompt = np.clip(np.rint(block.prompt * LENGTH_SCALE), 4, LONGEST_PROMPT)
    output = np.clip(np.rint(block.output * LENGTH_SCALE), 2, LONGEST_OUTPUT)
    return block._replace(prompt=prompt.astype(np.int64), output=output.astype(np.int64))


def capacity_of(profile: Profile, trace: TraceBlock) -> float:
    r"""Return the requests per second that the profile says an engine with full batches serves.

    A request takes its prompt's :math:`(b + c) p`, and for each token it generates b, its
    context's c and its share a / B of a step, with B places.
    """
    a, b, c = profile.batch
    p, d = trace.prompt.mean(), trace.output.mean()
    a_token = b + c * (trace.prompt + trace.output / 2).mean() + a / ENGINE.max_num_seqs
    return float(1 / ((b + c) * p + d * a_token))


def profiled(folder: Path) -> Profile:
    path = folder / "profile" / "profile.yaml"
    if not path.is_file():
        measure_profile(
            path.parent,
            model=MODEL,
            dtype=ENGINE.dtype,
            max_model_len=ENGINE.max_model_len,
            max_num_seqs=ENGINE.max_num_seqs,
            max_num_batched_tokens=BATCHED_TOKENS,
        )
    return load_profile(path)


@contextmanager
def engines(folder: Path, systems: Sequence[str], budget: int) -> Iterator[dict[str, str]]:
    ports, model, python = free_ports(len(systems)), resolve_model(MODEL), cpu_interpreter()
    servers, urls = [], {}
    profile = str((folder / "profile" / "profile.yaml").resolve())
    for system, port in zip(systems, ports, strict=True):
        urls[system] = url = f"http://127.0.0.1:{port}"
        flags = ["--max-num-batched-tokens", str(BATCHED_TOKENS)]
        batching = SYSTEMS[system]
        if batching is not None:
            section = {"profile": profile, "token_budget": budget, **DEADLINES, **batching}
            flags += ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
            flags += ["--additional-config", json.dumps({"headway": {"batching": section}})]
        command = lone_engine_command(replace(ENGINE, arguments=flags), model, MODEL, url, python)
        servers.append(ServerProcess(system, command, url, folder / f"{system}.log"))
    with (
        LaunchProgress(folder) as progress,
        closing(ServerGroup(servers, progress.report)) as group,
    ):
        group.start(list(systems), at_once=2)
        progress.finish()
        yield urls


def measured_alone(folder: Path) -> dict[str, float]:
    """Return TTFT and TPOT, seconds, of a request of the trace's mean lengths that is alone."""
    kept = folder / "alone.json"
    if not kept.is_file():
        load = [LoadRequest(f"alone-{i}", "180", 40, i, 4.0 * i) for i in range(6)]
        with engines(folder, ["vllm"], 0) as urls:
            answers = [TimedAnswer(request) for request in load]
            asyncio.run(serve_answers(urls["vllm"], answers, asked_of("alone", None)))
        served = answers[1:]  # the first warms up
        alone = {
            "ttft": float(np.mean([one.ttft for one in served])),
            "tpot": float(np.mean([one.tpot for one in served])),
        }
        write_text_atomically(kept, json.dumps(alone))
    found: dict[str, float] = json.loads(kept.read_text())
    return found


def tuned_budget(deployed: Deployed) -> int:
    """Return the token budget with which Sarathi serves the most requests in time."""
    kept = deployed.folder / "budget.json"
    if not kept.is_file():
        effective, ((ttft_s, tpot_s),) = {}, deployed.objectives()
        for budget in BUDGETS:
            case = Case("sarathi", 1.0, ttft_s, tpot_s, budget)
            with engines(deployed.folder, ["sarathi"], budget) as urls:
                served = deployed.serve(urls["sarathi"], case)
            effective[budget] = figures_of(case, served, deployed.seconds)["effective"]
            print(f"sarathi, budget {budget}: {effective[budget]:.3f}/s", file=sys.stderr)
        write_text_atomically(kept, json.dumps(effective))
    found: dict[str, float] = json.loads(kept.read_text())
    return int(max(found, key=found.__getitem__))


def figures_of(case: Case, served: Sequence[dict[str, Any]], seconds: float) -> Result:
    in_time = sum(met(case, one) for one in served)
    figures: Result = {
        **dataclasses.asdict(case),
        "requests": len(served),
        "rejected": sum(one["error"].startswith(REJECTED) for one in served),
        "violated": 1 - in_time / len(served),
        "effective": in_time / seconds,
        "served": served,
    }
    columns = {
        "ttft": [one["ttft"] for one in served if one["ttft"] is not None],
        "tpot": [one["worst_tpot"] for one in served if one["tpot"] is not None],
    }
    for name, values in columns.items():
        for percentile in (50, 95, 99):
            figures[f"{name}_p{percentile}"] = float(np.percentile(values, percentile))
    return figures


def met(case: Case, one: dict[str, Any]) -> bool:
    if one["error"] or one["ttft"] is None:
        return False
    return bool(one["ttft"] <= case.ttft_s and one["worst_tpot"] <= case.tpot_s)


def worst_tpot(one: TimedAnswer) -> float:
    """Return the greatest running mean of seconds per token after the first, 0 for one token."""
    first = one.chunks[0] if one.chunks else None
    return max(
        ((p.time - first.time) / (p.tokens - first.tokens) for p in one.chunks[1:] if first),
        default=0.0,
    )


def summarised(results: list[Result]) -> dict[str, float]:
    """Return every case's figures, and each system's peak, by part of the trace and objectives."""
    figures: dict[str, float] = {}
    for (part, ttft_s, tpot_s), found in _parts(results).items():
        where = f"part{part}_{round(1e3 * ttft_s)}_{round(1e3 * tpot_s)}"
        for one in found:
            case = f"{where}_{one['system']}_{one['load']:g}"
            for name in ("effective", "violated", "rejected", *PERCENTILES):
                figures[f"{case}_{name}"] = one[name]
            figures[f"{case}_violated_by_mean"] = _late_by_mean(one)
        for system, peak in _peaks(found).items():
            figures[f"{where}_{system}_peak"] = peak
    return figures


def print_tables(results: list[Result]) -> None:
    rows, peak_rows = [], []
    for (part, ttft_s, tpot_s), found in _parts(results).items():
        where = [str(part), f"{ttft_s:.2f} s, {1e3 * tpot_s:.0f} ms"]
        for one in sorted(found, key=lambda one: float(one["load"])):
            ttft = ", ".join(f"{one[f'ttft_p{p}']:.2f}" for p in (50, 95, 99))
            tpot = ", ".join(f"{1e3 * one[f'tpot_p{p}']:.0f}" for p in (50, 95, 99))
            rejected = one["rejected"] / one["requests"]
            late = [one["violated"], _late_by_mean(one), rejected]
            figures = [f"{one['effective']:.2f}", *(f"{share:.0%}" for share in late)]
            case = [f"{one['load']:.0%}", one["system"]]
            rows.append([*where, *case, *figures, f"{ttft} s", f"{tpot} ms"])
        peaks = _peaks(found)
        best = max((peaks[name] for name in ("vllm", "sarathi") if name in peaks), default=None)
        for system, peak in peaks.items():
            gain = f"{peak / best - 1:+.1%}" if best else ""
            peak_rows.append([*where, system, f"{peak:.2f}", gain])
    where = ["part", "TTFT, TPOT"]
    shown = ["in time, req/s", "late", "late by mean TPOT", "rejected"]
    shown += ["TTFT P50, P95, P99", "TPOT P50, P95, P99"]
    print("", *markdown_table([*where, "load", "system", *shown], rows, "rlrl"), sep="\n")
    heads = [*where, "system", "peak, requests/s", "against the best baseline"]
    print("", *markdown_table(heads, peak_rows, "rll"), sep="\n")


def draw(results: list[Result], path: Path) -> None:
    """Draw the requests in time over the load, a line a system, as the paper's Figure 5."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    lines = defaultdict(list)
    for one in next(iter(_parts(results).values())):
        lines[one["system"]].append((100 * one["load"], one["effective"]))
    for system, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), "o-", label=system.replace("_", " "))
    axis.set(xlabel="load, % of capacity", ylabel="requests/s that meet both objectives")
    axis.set_ylim(bottom=0)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})
    plt.close(figure)


def _late_by_mean(one: Result) -> float:
    """Return the share that misses an objective when TPOT is the mean over a request's tokens."""
    late = [
        bool(request["error"])
        or request["ttft"] > one["ttft_s"]
        or (request["tpot"] or 0.0) > one["tpot_s"]
        for request in one["served"]
    ]
    return late.count(True) / len(late)


def _parts(results: list[Result]) -> dict[tuple[int, float, float], list[Result]]:
    parts = defaultdict(list)
    for one in results:
        parts[one["round"], one["ttft_s"], one["tpot_s"]].append(one)
    return dict(sorted(parts.items()))


def _peaks(results: list[Result]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for one in results:
        peaks[one["system"]] = max(peaks.get(one["system"], 0.0), one["effective"])
    return peaks


if __name__ == "__main__":
    main()
