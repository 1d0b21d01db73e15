"""Serve three prompts in this process and look into the scheduler after every step.

usage: scheduler_forecasts.py MODEL CHECKPOINT
Prints what the scheduler knew as the last line, in JSON.
"""

import json
import sys

MAX_TOKENS = 12


def main() -> None:
    from vllm import LLM, SamplingParams

    model, checkpoint = sys.argv[1:]
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
    for i in range(3):
        prompt = {"prompt_token_ids": list(range(100 + i, 110 + 2 * i))}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
        )
        core.add_request(f"request-{i}", prompt, sampling)
    names, forecasts = set(), []
    while core.has_unfinished_requests():
        core.step()
        for name, request in scheduler.requests.items():
            forecast = scheduler.remaining_forecast(request)
            if forecast is not None:
                names.add(name)
                made, row = scheduler.headway_forecasts[name]
                known = (request.num_output_tokens, made.generated_tokens[row])
                forecasts.append((*known, float(forecast.mean()[0]), request.max_tokens))
    seen = {
        "requests_forecast": len(names),
        "left_behind": len(scheduler.headway_forecasts),
        "forecasts": forecasts,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
