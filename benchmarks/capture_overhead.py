"""What capture costs the engine, by thread CPU time, with the hook on and off in one run.

    python -m benchmarks.capture_overhead [--quick] --json OUT

One real engine serves the same load in alternating phases, its hook switched off and on by
vLLM's own `collective_rpc`. Reported: the CPU time of the hook (on the engine's thread) and
of the recorder's thread, over the CPU time of the whole worker process, per engine step.
"""

import tempfile
from pathlib import Path

from benchmarks.support.hook_cost import ENGINE, per_step, phases, set_environment
from benchmarks.support.report import arguments, report
from data_collection.models import resolve_model
from data_collection.workload.engine_options import engine_arguments


def main() -> None:
    parser = arguments("what capture costs the engine")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--k", type=int, default=20)
    options = parser.parse_args()
    set_environment()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.model, options.k, Path(folder), quick=options.quick)
    report("capture_overhead", figures, options.json)


def measure(model: str, k: int, folder: Path, quick: bool) -> dict[str, float]:
    from vllm import LLM

    record = {"path": str(folder / "dataset"), "flush_seconds": 5}
    section = {"headway": {"k": k, "record": record}}
    engine = LLM(**engine_arguments(resolve_model(model), section, ENGINE))
    off, on = phases(engine, ("rows", "dropped_rows", "hook_seconds", "sink_seconds"), quick)
    hook, sink = on["hook_seconds"], on["sink_seconds"]
    return {
        "steps": on["engine_steps"],
        "rows": on["rows"],
        "dropped_rows": on["dropped_rows"],
        "hook_us_per_step": 1e6 * hook / on["engine_steps"],
        "sink_us_per_step": 1e6 * sink / on["engine_steps"],
        **per_step(off, on, hook + sink),
    }


if __name__ == "__main__":
    main()
