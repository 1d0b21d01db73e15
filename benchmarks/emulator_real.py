"""How far an emulated engine is from the real one that it is profiled after.

    python -m benchmarks.emulator_real [--quick] [--rounds N] [--check] [--out FOLDER] [--json OUT]

An engine of SmolLM2 on this machine's CPU is measured with `headway profile`. Then it serves a load
whose answers have given lengths, with so small a KV cache that requests are preempted; an engine
that emulates it, by that profile and in real time, serves the same requests at the same times.

The profile and every round are kept under --out, and an interrupted measurement goes on there.
Prints latencies, preemptions and steps of both, and by how much they differ in percent: what is
left out of the emulation, and the error of a step time that is linear in tokens. With ``--check``
no mean may differ by more than 10%.
"""

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.support.deployments import engines, patient, proxy, until_idle
from benchmarks.support.emulated_load import PromptLengths, drawn_load
from benchmarks.support.report import Cells, arguments, percent_change, write_report
from rescheduler.demo.demo_load import preemptions
from rescheduler.demo.scripted_load import answer_figures, serve_load
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_local import local_deployment
from rescheduler.profiling.profile_command import profile
from rescheduler.simulator.results.report import markdown_table

MAX_MODEL_LEN, SEQS, BLOCK, BLOCKS = 1_024, 16, 32, 100
PROMPTS = PromptLengths(100, 500)
LAW = AnswerLengths(median=100, sigma=0.6, longest=400)
RATE = 0.6
"""Requests a second: about what the engine serves, so that its cache fills."""
MOST_ERROR = 10.0
COMPARED = ("latency", "latency_p99", "ttft", "tpot", "tokens_per_s", "preemptions")


def main() -> None:
    parser = arguments("an emulated engine against the real one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="fail where over 10%% differ")
    parser.add_argument("--out", type=Path, default=Path("runs/emulator_real"))
    options = parser.parse_args()
    rounds, requests = (1, 20) if options.quick else (options.rounds, 80)
    out = options.out / ("quick" if options.quick else "full")
    out.mkdir(parents=True, exist_ok=True)
    measured = out / "profile.yaml"
    if not measured.is_file():
        profile(
            out,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=SEQS,
            quick=options.quick,
        )
    real = EngineOptions(
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=SEQS,
        block_size=BLOCK,
        kv_blocks=BLOCKS,
        enforce_eager=True,
    )
    most = SEQS * MAX_MODEL_LEN  # as `headway launch` has it for engines on a CPU
    emulate = EmulateOptions(profile=str(measured), max_num_batched_tokens=most, forecast=None)
    settings = {"requests": requests, "rate": RATE, "profile": measured.read_text()}
    runs = {
        name: asyncio.run(served(engine, Cells(out / name, settings), out / name, rounds, requests))
        for name, engine in (("real", real), ("emulated", replace(real, emulate=emulate)))
    }
    figures: dict[str, float] = {}
    rows = []
    for name in COMPARED:
        values = {who: [one[name] for one in by_round] for who, by_round in runs.items()}
        mean = {who: float(np.mean(found)) for who, found in values.items()}
        by_round = {who: dict(enumerate(found)) for who, found in values.items()}
        errors = percent_change(by_round["emulated"], by_round["real"])
        figures |= {f"{name}_real": mean["real"], f"{name}_emulated": mean["emulated"]}
        figures[f"{name}_error"] = errors.mean
        cells = [f"{mean['real']:.4g}", f"{mean['emulated']:.4g}"]
        rows.append([name, *cells, f"{errors.mean:+.1f} ± {errors.half:.1f}%"])
    table = "\n".join(markdown_table(["figure", "real", "emulated", "difference"], rows))
    print(table)
    error = max(abs(figures[f"{name}_error"]) for name in COMPARED)
    figures["emulator_error"] = error
    write_report("emulator_real", figures, options.json, tables=[table])
    if options.check and error > MOST_ERROR:
        sys.exit(f"the emulated engine is off by {error:.1f}%, more than {MOST_ERROR:.0f}%")


async def served(
    engine: EngineOptions, cells: Cells, folder: Path, rounds: int, requests: int
) -> list[dict[str, float]]:
    """Return the figures of each round, of an engine that is started for all that are missing."""
    missing = [number for number in range(rounds) if cells.read(str(number)) is None]
    if missing:
        await _serve(engine, cells, folder, missing, requests)
    return [cells.read(str(number)) for number in range(rounds)]


async def _serve(
    engine: EngineOptions, cells: Cells, folder: Path, rounds: list[int], requests: int
) -> None:
    deployment: Deployment = patient(local_deployment("smollm2", engine, decode=1, prefill=0))
    folder.mkdir(parents=True, exist_ok=True)
    with engines(deployment, folder), proxy(deployment, folder):
        for number in (-1, *rounds):  # the first one warms up
            load = drawn_load(number + 1, requests if number >= 0 else 4, RATE, PROMPTS, LAW)
            before = await asyncio.to_thread(preemptions, deployment)
            url, name = deployment.proxy_url, deployment.served_name
            answers = await serve_load(url, name, load, 1.0, time.time_ns() % 2**31, exactly=True)
            await until_idle(deployment, 60.0)
            after = await asyncio.to_thread(preemptions, deployment)
            if number >= 0:
                figures = answer_figures(answers, 1.0) | {"preemptions": after - before}
                cells.write(str(number), figures)
                print(f"{folder.name}, round {number}: {figures['latency']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
