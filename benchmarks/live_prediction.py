"""What forecasts and telemetry cost the engine, by CPU time, switched on and off in one run.

    python -m benchmarks.live_prediction [--quick] --json OUT

One real engine serves the same load in alternating phases, its hook switched off and on by
vLLM's own `collective_rpc`, while a subscriber reads the telemetry. Reported: the CPU time of
the hook with the predictions (on the engine's thread), of handing them on, and of the
telemetry's thread, over the CPU time of the whole worker process, per engine step.
"""

import os
import threading
from typing import Any

import zmq

from benchmarks.support.report import arguments, report
from data_collection.models import resolve_model
from data_collection.workload.prompts import load_prompts

CONCURRENCY = 64
_PARTS = ("hook", "handing_on", "telemetry")


def main() -> None:
    parser = arguments("what forecasts and telemetry cost the engine")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--checkpoint", default="checkpoints/smollm2-135m-instruct")
    parser.add_argument("--k", type=int, default=20)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    figures = measure(options.model, options.checkpoint, options.k, quick=options.quick)
    report("live_prediction", figures, options.json)


def measure(model: str, checkpoint: str, k: int, quick: bool) -> dict[str, float]:
    """Alternate phases with the hook off and on; return times per step and their ratio."""
    from vllm import LLM, SamplingParams

    telemetry = {"bind": "tcp://127.0.0.1:*"}
    forecast = {"checkpoint": os.path.abspath(checkpoint), "telemetry": telemetry}  # noqa: PTH100
    engine = LLM(
        model=resolve_model(model),
        worker_cls="predictor.live.vllm_worker.LiveHeadwayWorker",
        scheduler_cls="predictor.live.vllm_scheduler.LiveHeadwayScheduler",
        additional_config={"headway": {"k": k, "forecast": forecast}},
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=CONCURRENCY,
        enforce_eager=True,
    )
    messages = _Subscriber(status(engine)["telemetry_endpoint"])
    conversations: list[Any] = [prompt.messages for prompt in load_prompts("starter", CONCURRENCY)]
    sampling = SamplingParams(
        temperature=0.8, max_tokens=40 if quick else 160, ignore_eos=True, detokenize=False
    )
    names = ("engine_steps", "process_seconds", *(f"{part}_seconds" for part in _PARTS))
    phases: dict[bool, dict[str, float]] = {False: dict.fromkeys(names, 0.0)}
    phases[True] = dict.fromkeys(names, 0.0)
    for _ in range(1 if quick else 3):
        for armed in (False, True):
            engine.collective_rpc("headway_arm", args=(armed,))
            before = status(engine)
            engine.chat(conversations, sampling, use_tqdm=False)
            after = status(engine)
            for name in names:
                phases[armed][name] += after[name] - before[name]
    messages.stop()
    on, off = phases[True], phases[False]
    spent = {f"{part}_us_per_step": on[f"{part}_seconds"] for part in _PARTS}
    return {
        "steps": on["engine_steps"],
        "telemetry_messages": messages.count,
        "telemetry_kib": messages.bytes / 1024,
        **{name: 1e6 * seconds / on["engine_steps"] for name, seconds in spent.items()},
        "engine_ms_per_step_off": 1e3 * off["process_seconds"] / off["engine_steps"],
        "engine_ms_per_step_on": 1e3 * on["process_seconds"] / on["engine_steps"],
        "share_of_engine_percent": 100 * sum(spent.values()) / on["process_seconds"],
    }


def status(engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.collective_rpc("headway_status")[0]
    return found


class _Subscriber:
    """Reads and counts telemetry, so that it is really sent."""

    def __init__(self, endpoint: str) -> None:
        self.count = 0
        self.bytes = 0
        self._running = True
        self._endpoint = endpoint
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._running = False
        self._thread.join()

    def _read(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.connect(self._endpoint)
            subscriber.subscribe(b"")
            while self._running:
                if subscriber.poll(200):
                    self.count += 1
                    self.bytes += sum(map(len, subscriber.recv_multipart()))


if __name__ == "__main__":
    main()
