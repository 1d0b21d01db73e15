"""Pauses for Python's garbage: left to itself, and collected when nothing is urgent.

    python -m benchmarks.garbage_pauses [--quick] --json OUT

Two real engines, one after the other, serve the same requests in a process of their own, API and
engine in one. Reported of each, after its first step: collections, their milliseconds in all, the
longest, and how many took place while a prompt waited.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.report import arguments, report
from data_collection.models import resolve_model

CONCURRENCY = 16
_SCHEDULER = "rescheduler.batching.vllm_scheduler.FairBatchingScheduler"


def main() -> None:
    """Run both engines and print their pauses."""
    parser = arguments("what garbage collection costs the engine")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--serve", choices=["automatic", "timely"], help="be one of the engines")
    options = parser.parse_args()
    requests = 4 * CONCURRENCY if options.quick else 40 * CONCURRENCY
    if options.serve is not None:
        print(json.dumps(serve(options.model, requests, timely=options.serve == "timely")))
        return
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    figures: dict[str, float] = {}
    for mode in ("automatic", "timely"):
        command = [sys.executable, "-m", "benchmarks.garbage_pauses", "--serve", mode]
        command += ["--model", options.model, *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        done.check_returncode()
        found = json.loads(done.stdout.splitlines()[-1])
        figures |= {f"{mode}_{key}": value for key, value in found.items()}
    report("garbage_pauses", figures, options.json)


def serve(model: str, requests: int, timely: bool) -> dict[str, float]:
    """Serve requests that arrive one after another, and return what the pauses were."""
    from vllm import LLM, SamplingParams

    batching = {"formation": "vllm", "collect_garbage": timely}
    engine = LLM(
        model=resolve_model(model),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=CONCURRENCY,
        enforce_eager=True,
        scheduler_cls=_SCHEDULER,
        additional_config={"headway": {"batching": batching}},
    )
    core = engine.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    pauses = _Pauses(scheduler)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    steps, sent = 0, 0
    while sent < requests or core.has_unfinished_requests():
        while sent < requests and len(scheduler.requests) < CONCURRENCY:
            prompt = {"prompt_token_ids": [1000 + (7 * sent + i) % 9000 for i in range(200)]}
            core.add_request(str(sent), prompt, sampling)
            sent += 1
        core.step()
        steps += 1
        if steps == 1:
            gc.callbacks.append(pauses)
    return {
        "steps": steps,
        "collections": len(pauses.seconds),
        "collections_while_a_prompt_waits": pauses.while_a_prompt_waits,
        "pauses_ms": 1e3 * sum(pauses.seconds),
        "longest_pause_ms": 1e3 * max(pauses.seconds, default=0.0),
    }


class _Pauses:
    """Notes every collection."""

    def __init__(self, scheduler: Any) -> None:
        self.seconds: list[float] = []
        self.while_a_prompt_waits = 0
        self._scheduler = scheduler
        self._began = 0.0

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._began = now
            return
        self.seconds.append(now - self._began)
        waits = self._scheduler.waiting or any(r.is_prefill_chunk for r in self._scheduler.running)
        self.while_a_prompt_waits += bool(waits)


if __name__ == "__main__":
    main()
