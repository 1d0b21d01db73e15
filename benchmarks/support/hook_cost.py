"""What an engine's hook costs: phases of the same load with the hook off and on, in one run."""

import os
from collections.abc import Iterable
from typing import Any

from data_collection.workload.prompts import load_prompts

CONCURRENCY = 64
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": CONCURRENCY,
    "enforce_eager": True,
}


def set_environment() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def status(engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.collective_rpc("headway_status")[0]
    return found


def phases(
    engine: Any, names: Iterable[str], quick: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return by how much counters grew in the phases without the hook, and with it."""
    from vllm import SamplingParams

    conversations: list[Any] = [prompt.messages for prompt in load_prompts("starter", CONCURRENCY)]
    sampling = SamplingParams(
        temperature=0.8, max_tokens=40 if quick else 160, ignore_eos=True, detokenize=False
    )
    off, on = (dict.fromkeys(("engine_steps", "process_seconds", *names), 0.0) for _ in range(2))
    for _ in range(1 if quick else 3):
        for armed, total in ((False, off), (True, on)):
            engine.collective_rpc("headway_arm", args=(armed,))
            before = status(engine)
            engine.chat(conversations, sampling, use_tqdm=False)
            after = status(engine)
            for name in total:
                total[name] += after[name] - before[name]
    return off, on


def per_step(off: dict[str, float], on: dict[str, float], spent: float) -> dict[str, float]:
    """Return the CPU time of a step without the hook and with it, and the share spent."""
    return {
        "engine_ms_per_step_off": 1e3 * off["process_seconds"] / off["engine_steps"],
        "engine_ms_per_step_on": 1e3 * on["process_seconds"] / on["engine_steps"],
        "share_of_engine_percent": 100 * spent / on["process_seconds"],
    }
