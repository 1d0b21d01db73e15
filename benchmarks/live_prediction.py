"""What forecasts and telemetry cost the engine, by CPU time, switched on and off in one run.

    python -m benchmarks.live_prediction [--quick] --json OUT

One real engine serves the same load in alternating phases, its hook switched off and on by
vLLM's own `collective_rpc`, while a subscriber reads the telemetry. Reported: the CPU time of
the hook with the predictions (on the engine's thread), of handing them on, and of the
telemetry's thread, over the CPU time of the whole worker process, per engine step.
"""

import os
import threading

import zmq

from benchmarks.support.hook_cost import ENGINE, per_step, phases, set_environment, status
from benchmarks.support.report import arguments, report
from data_collection.models import resolve_model

_PARTS = ("hook", "handing_on", "telemetry")


def main() -> None:
    parser = arguments("what forecasts and telemetry cost the engine")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--checkpoint", default="checkpoints/smollm2-135m-instruct")
    parser.add_argument("--k", type=int, default=20)
    options = parser.parse_args()
    set_environment()
    figures = measure(options.model, options.checkpoint, options.k, quick=options.quick)
    report("live_prediction", figures, options.json)


def measure(model: str, checkpoint: str, k: int, quick: bool) -> dict[str, float]:
    from vllm import LLM

    telemetry = {"bind": "tcp://127.0.0.1:*"}
    forecast = {"checkpoint": os.path.abspath(checkpoint), "telemetry": telemetry}  # noqa: PTH100
    engine = LLM(
        model=resolve_model(model),
        worker_cls="predictor.live.vllm_worker.LiveHeadwayWorker",
        scheduler_cls="predictor.live.vllm_scheduler.LiveHeadwayScheduler",
        additional_config={"headway": {"k": k, "forecast": forecast}},
        **ENGINE,
    )
    messages = _Subscriber(status(engine)["telemetry_endpoint"])
    off, on = phases(engine, [f"{part}_seconds" for part in _PARTS], quick)
    messages.stop()
    spent = {part: on[f"{part}_seconds"] for part in _PARTS}
    return {
        "steps": on["engine_steps"],
        "telemetry_messages": messages.count,
        "telemetry_kib": messages.bytes / 1024,
        **{f"{part}_us_per_step": 1e6 * spent[part] / on["engine_steps"] for part in _PARTS},
        **per_step(off, on, sum(spent.values())),
    }


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
