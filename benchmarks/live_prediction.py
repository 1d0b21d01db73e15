"""What forecasts and telemetry cost the engine, by CPU time, switched on and off in one run.

    python -m benchmarks.live_prediction [--quick] --json OUT

One real engine serves the same load in alternating phases, its hook switched off and on by
vLLM's own `collective_rpc`, while a subscriber reads the telemetry. Reported: the CPU time of
the hook with the predictions (on the engine's thread), of handing them on, and of the
telemetry's thread, over the CPU time of the whole worker process, per engine step.
"""

import os

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
    # Not before: vLLM's start fails after numba's.
    from rescheduler.telemetry.subscriber import TelemetrySubscriber

    with TelemetrySubscriber(status(engine)["telemetry_endpoint"]):
        off, on = phases(engine, [f"{part}_seconds" for part in _PARTS], quick)
    spent = {part: on[f"{part}_seconds"] for part in _PARTS}
    return {
        "steps": on["engine_steps"],
        **{f"{part}_us_per_step": 1e6 * spent[part] / on["engine_steps"] for part in _PARTS},
        **per_step(off, on, sum(spent.values())),
    }


if __name__ == "__main__":
    main()
