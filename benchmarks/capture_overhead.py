"""What capture costs the engine, by thread CPU time, with the hook on and off in one run.

    python -m benchmarks.capture_overhead [--quick] --json OUT

One real engine serves the same load in alternating phases, its hook switched off and on by
vLLM's own `collective_rpc`. Reported: the CPU time of the hook (on the engine's thread) and
of the recorder's thread, over the CPU time of the whole worker process, per engine step.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support.report import arguments, report
from data_collection.models import resolve_model
from data_collection.workload.engine_options import engine_arguments
from data_collection.workload.prompts import load_prompts

CONCURRENCY = 64


def main() -> None:
    parser = arguments("what capture costs the engine")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--k", type=int, default=20)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.model, options.k, Path(folder), quick=options.quick)
    report("capture_overhead", figures, options.json)


def measure(model: str, k: int, folder: Path, quick: bool) -> dict[str, float]:
    """Alternate phases with the hook off and on; return times per step and their ratio."""
    from vllm import LLM, SamplingParams

    record = {"path": str(folder / "dataset"), "flush_seconds": 5}
    engine = LLM(
        **engine_arguments(
            resolve_model(model),
            {"headway": {"k": k, "record": record}},
            {
                "dtype": "float32",
                "max_model_len": 1024,
                "max_num_seqs": CONCURRENCY,
                "enforce_eager": True,
            },
        )
    )
    conversations: list[Any] = [prompt.messages for prompt in load_prompts("starter", CONCURRENCY)]
    sampling = SamplingParams(
        temperature=0.8, max_tokens=40 if quick else 160, ignore_eos=True, detokenize=False
    )
    phases: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(1 if quick else 3):
        for armed in (False, True):
            engine.collective_rpc("headway_arm", args=(armed,))
            before = status(engine)
            engine.chat(conversations, sampling, use_tqdm=False)
            after = status(engine)
            phases[armed].append({key: after[key] - before[key] for key in before})
    total = {
        armed: {key: sum(phase[key] for phase in found) for key in found[0]}
        for armed, found in phases.items()
    }
    steps = total[True]["engine_steps"]
    hook, sink = total[True]["hook_seconds"], total[True]["sink_seconds"]
    engine_on, engine_off = total[True]["process_seconds"], total[False]["process_seconds"]
    return {
        "steps": steps,
        "rows": total[True]["rows"],
        "dropped_rows": total[True]["dropped_rows"],
        "hook_us_per_step": 1e6 * hook / steps,
        "sink_us_per_step": 1e6 * sink / steps,
        "engine_ms_per_step_off": 1e3 * engine_off / total[False]["engine_steps"],
        "engine_ms_per_step_on": 1e3 * engine_on / steps,
        "share_of_engine_percent": 100 * (hook + sink) / engine_on,
    }


def status(engine: Any) -> dict[str, float]:
    (found,) = engine.collective_rpc("headway_status")
    names = ("engine_steps", "rows", "dropped_rows")
    return {key: found[key] for key in (*names, "hook_seconds", "sink_seconds", "process_seconds")}


if __name__ == "__main__":
    main()
