"""What tests do with vLLM's offline engine; run in a process of its own, see `forked_vllm`."""

from typing import Any

__all__ = ["forecasts_between_steps"]


def forecasts_between_steps(model: str, checkpoint: str, max_tokens: int) -> dict[str, Any]:
    """Serve three prompts and look into the scheduler after every step.

    The engine must run in this process: ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        worker_cls="predictor.live.vllm_worker.LiveHeadwayWorker",
        scheduler_cls="predictor.live.vllm_scheduler.LiveHeadwayScheduler",
        additional_config={
            "headway": {"k": 4, "forecast": {"checkpoint": checkpoint, "telemetry": None}}
        },
    )
    core = engine.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    from predictor.live.known_forecasts import KnownForecasts  # vLLM's start fails after numba's

    latest = scheduler.part(KnownForecasts).latest
    for i in range(3):
        prompt = {"prompt_token_ids": list(range(100 + i, 110 + 2 * i))}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        core.add_request(f"request-{i}", prompt, sampling)
    names, forecasts = set(), []
    while core.has_unfinished_requests():
        core.step()
        for name, request in scheduler.requests.items():
            forecast = scheduler.remaining_forecast(request)
            if forecast is not None:
                names.add(name)
                made, row = latest[name]
                known = (request.num_output_tokens, int(made.generated_tokens[row]))
                forecasts.append((*known, float(forecast.mean()[0]), request.max_tokens))
    return {
        "scheduler": type(scheduler).__qualname__,
        "requests_forecast": len(names),
        "left_behind": len(latest),
        "forecasts": forecasts,
    }
