"""What tests do with vLLM's offline engine in this process, where they look between its steps.

Run in a process of its own, see `forked_vllm`, with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
"""

import time
from typing import Any


def forecasts_between_steps(model: str, checkpoint: str, max_tokens: int) -> dict[str, Any]:
    """Serve three prompts and look into the scheduler after every step."""
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
    from predictor.live.vllm_scheduler import KnownForecasts  # vLLM's start fails after numba's

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


def serve_waves(model: str, options: dict[str, Any], waves: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve requests that arrive in waves; return what was seen.

    Args:
        model: folder of the model.
        options: further arguments of vLLM's engine.
        waves: each with its ``requests`` and the steps ``after`` the wave before that they arrive;
            None: when nothing is left to do.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        block_size=32,
        **options,
    )
    core = engine.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    seen = Seen(scheduler)
    free = pool.get_num_free_blocks()
    waves = list(waves)
    outputs: dict[str, list[int]] = {}
    first_step: dict[str, int] = {}
    begun: dict[str, tuple[float, float]] = {}
    since = 0
    while waves or core.has_unfinished_requests():
        after = waves[0]["after"] if waves else None
        idle = not core.has_unfinished_requests()
        if waves and (idle or (after is not None and since >= after)):
            since = 0
            for request in waves.pop(0)["requests"]:
                sampling = SamplingParams(
                    temperature=0.0,
                    max_tokens=request["max_tokens"],
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=request.get("objectives"),
                )
                core.add_request(request["name"], {"prompt_token_ids": request["prompt"]}, sampling)
        for output in core.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        since += 1
        for name, request in scheduler.requests.items():
            if request.num_output_tokens and name.rpartition("-")[0] not in first_step:
                first_step[name.rpartition("-")[0]] = len(seen.steps)
                if seen.part is not None:
                    ttft = seen.part.objectives_of(request).ttft
                    begun[name.rpartition("-")[0]] = ttft, time.time() - request.arrival_time
    return {
        "scheduler": type(scheduler).__qualname__,
        "outputs": outputs,
        "first_step": first_step,
        "begun": begun,
        "steps": seen.steps,
        "preemptions": seen.preemptions,
        "prefix_hits": seen.prefix_hits,
        "blocks_lost": free - pool.get_num_free_blocks(),
        "left": [len(scheduler.requests), len(getattr(seen.part, "_objectives", ()))],
    }


class Seen:
    """Notes every step's plan and tokens, around the methods of the scheduler itself."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self.preemptions = self.prefix_hits = 0
        self._scheduler = scheduler
        self.part = None
        if type(scheduler).__name__.endswith("FairBatchingScheduler"):
            from rescheduler.batching.fair_batching import FairBatching  # once vLLM is up

            self.part = scheduler.part(FairBatching)
        self._schedule, self._preempt = scheduler.schedule, scheduler._preempt_request
        scheduler.schedule, scheduler._preempt_request = self.schedule, self.preempt

    def schedule(self, *args: Any) -> Any:
        scheduler = self._scheduler
        table = self._table()
        output = self._schedule(*args)
        for request in output.scheduled_new_reqs:
            self.prefix_hits += request.num_computed_tokens > 0
        tokens = output.num_scheduled_tokens
        step: dict[str, Any] = {"tokens": tokens}
        plan = getattr(self.part, "batch_plan", None)
        if plan is not None and table is not None:
            row = {name: i for i, name in enumerate(table.names)}
            decodes = table.slack[table.decoding]
            rules = self.part.times.rules
            context = sum(scheduler.requests[name].num_computed_tokens for name in tokens)
            spent = rules.constant + rules.per_new * sum(tokens.values())
            step |= {
                "planned": plan.tokens,
                "estimate": plan.seconds,
                "actual": spent + rules.per_context * context,
                "budget": max(decodes.min(), table.tpot.min()) if len(decodes) else None,
                "only_decodes": all(table.decoding[row[name]] for name in tokens),
            }
        self.steps.append(step)
        return output

    def _table(self) -> Any:
        """Read the requests as the scheduler is about to."""
        if self.part is None:
            return None
        from rescheduler.batching.fair_batching import read_table

        return read_table(self._scheduler, self.part.objectives_of, time.monotonic(), True)

    def preempt(self, *args: Any, **kwargs: Any) -> None:
        self.preemptions += 1
        self._preempt(*args, **kwargs)
