"""Everything that a machine with a GPU should verify, before anybody trusts it with Headway.

    python -m benchmarks.gpu_check [--only PART ...] [--at-once N] [--device cpu] [--json OUT]

The parts, in this order; each runs in a process of its own, in a bounded time:

    forecaster              the shipped predictor in a CUDA graph, against the CPU
    vllm                    vLLM imports, and runs its V2 model runner by default
    replayed_capture        recorded rows while a CUDA graph overwrites them (without vLLM)
    vectors_eager           captured vectors against transformers in float32,
    vectors_graphs              with full CUDA graphs,
    vectors_piecewise           with piecewise ones,
    vectors_sync                without asynchronous scheduling,
    vectors_stress              with chunked prompts, preemption and a prefix cache,
    vectors_averaged            the same of an earlier layer, averaged over the answer
    replayed_forecasts      forecasts while a CUDA graph overwrites their inputs (without vLLM)
    live_forecasts          forecasts of an engine against an offline pass
    fair_batching           batches by deadlines, with asynchronous scheduling
    migration               moves between two engines on this GPU, over NIXL
    vectors_v1              captured vectors of the V1 runner

Each is reported as passed, failed or not run, and why, in a table and with --json; the status is 1
if one failed. What they print is kept under runs/gpu_check. Those without vLLM need PyTorch alone.
"""

import platform
import subprocess
import sys
from contextlib import closing

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_check.parts import PARTS, Outcome, run_parts
from benchmarks.support.report import arguments, write_report
from rescheduler.commands.event_loop import ending_signals_raised


def main() -> int:
    parser = arguments("whether Headway works on this machine's GPU", quick=False)
    parser.prog = "python -m benchmarks.gpu_check"
    parser.epilog = f"parts: {', '.join(PARTS)}"
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        metavar="PART",
        help="run these; default: all",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="run up to N parts at a time: faster, but they slow each other's measured times",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, if there is one")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.at_once < 1:
        parser.error(f"--at-once must be 1 or more, not {options.at_once}")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here; --device cpu runs what a CPU can show")
    console = Console(markup=False)  # reasons may hold brackets
    hardware = _hardware(device)
    outcomes = {name: Outcome("not run", "the check was interrupted") for name in options.only}

    def write(quiet: bool) -> None:
        figures = {name: outcome.status for name, outcome in outcomes.items()}
        parts = {name: msgspec.to_builtins(outcome) for name, outcome in outcomes.items()}
        write_report("gpu_check", figures, options.json, quiet, hardware=hardware, parts=parts)

    try:
        write(quiet=True)
    except OSError as error:
        parser.error(f"--json: {error}")
    try:
        with ending_signals_raised():
            names = list(dict.fromkeys(options.only))
            most = sum(PARTS[name].seconds for name in names)
            with (
                closing(run_parts(names, device, options.at_once)) as ended,
                console.status(f"{len(names)} parts, at most {most:.0f} s"),
            ):
                for done, (name, outcome) in enumerate(ended, start=1):
                    outcomes[name] = outcome
                    reason = outcome.reason and f": {outcome.reason}"
                    console.print(f"{done}/{len(names)} {name}: {outcome.status}{reason}")
                    write(quiet=True)
    except KeyboardInterrupt:
        console.print("interrupted")
    table = Table("part", "", "measured")
    for name, outcome in outcomes.items():
        table.add_row(name, outcome.status, _in_words(outcome))
    console.print(table)
    write(quiet=False)
    return int(any(outcome.status == "failed" for outcome in outcomes.values()))


def _in_words(outcome: Outcome) -> str:
    figures = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in outcome.measured.items()
    ]
    return ", ".join(figures) or outcome.reason


def _hardware(device: str) -> dict[str, str]:
    if device == "cpu":
        return {"device": "cpu", "processor": platform.processor() or platform.machine()}
    try:
        major, minor = torch.cuda.get_device_capability()
        memory = torch.cuda.get_device_properties(0).total_memory
    except RuntimeError as error:
        return {"device": f"unknown ({error})", "driver": _driver()}
    return {
        "device": torch.cuda.get_device_name(),
        "memory_gib": f"{memory / 2**30:.1f}",
        "compute_capability": f"{major}.{minor}",
        "cuda": torch.version.cuda or "",
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return (done.stdout.split() or ["unknown"])[0]


if __name__ == "__main__":
    sys.exit(main())
