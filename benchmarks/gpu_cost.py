"""What forecasts and recording cost a step of a model as users serve it, by the clock.

    python -m benchmarks.gpu_cost MODEL [--requests 256] [--k 20] [--json OUT]

MODEL is an embedded model's name or a folder with a configuration and a tokenizer; its weights are
drawn unless --load-format says otherwise: a step takes as long with them. One engine, as vLLM
starts it (CUDA graphs, asynchronous scheduling), serves the same requests in alternating phases
with Headway's hook on and off, each first by turns. The predictor has the shipped one's layers,
inputs and averaging on this model's hidden states, untrained: what it says is worth nothing, what
it costs is the same. Reported: the time of a step with and without, and the mean of the pairs'
ratios with half its 95% interval.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.hook_cost import status
from benchmarks.support.report import arguments, mean_of, percent_change, report
from data_collection.models import identify, resolve_model
from data_collection.shipped_files import find_shipped
from data_collection.workload.collect import hidden_size
from predictor.models.checkpoint import export_checkpoint, read_config
from predictor.models.survival_mlp import SurvivalMLP

_SHIPPED = "checkpoints/smollm2-135m-instruct"
_SHARED = ("edges", "averaging_half_life", "widths", "inputs")
_PROMPT_TOKENS, _FIRST_TOKEN, _LAST_TOKEN = 64, 1000, 20_000
_COUNTED = ("dropped_rows", "forecasts", "hook_seconds", "handing_on_seconds")


def main() -> None:
    parser = arguments("what forecasts and recording cost a step, by the clock")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=256, help="that run at a time")
    parser.add_argument("--tokens", type=int, default=256, help="that each generates in a phase")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of phases")
    parser.add_argument("--k", type=int, default=20, help="steps between two forecasts")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tokens = 2, 40
    for name in ("requests", "tokens", "rounds", "k"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more, not {getattr(options, name)}")
    try:
        model = resolve_model(options.model)
    except (RuntimeError, OSError, ValueError) as error:
        parser.error(str(error))
    width = hidden_size(model)
    if width is None:
        parser.error(f"{options.model}: no configuration with a hidden size")
    with tempfile.TemporaryDirectory() as folder:
        _untrained_predictor(model, width, options.k, Path(folder) / "predictor")
        figures = _measure(model, Path(folder), options)
    report("gpu_cost", figures, options.json)


def _untrained_predictor(model: str, width: int, k: int, folder: Path) -> None:
    identity, shipped = identify(model), read_config(find_shipped(_SHIPPED))
    predictor = SurvivalMLP(
        **{name: shipped[name] for name in _SHARED},
        model=identity.name,
        model_revision=identity.revision or "",
        hidden_size=width,
        k=k,
    )
    export_checkpoint(predictor, folder, {})


def _measure(model: str, folder: Path, options: Any) -> dict[str, float]:
    from vllm import LLM

    section = {
        "k": options.k,
        "record": {"path": str(folder / "dataset")},
        "forecast": {
            "checkpoint": str(folder / "predictor"),
            "telemetry": {"bind": "tcp://127.0.0.1:*"},
        },
    }
    engine = LLM(
        model=model,
        dtype=options.dtype,
        load_format=options.load_format,
        max_model_len=4096,
        max_num_seqs=options.requests,
        max_num_batched_tokens=8192,
        enforce_eager=options.eager,
        enable_prefix_caching=False,
        worker_cls="predictor.live.vllm_worker.LiveHeadwayWorker",
        scheduler_cls="predictor.live.vllm_scheduler.LiveHeadwayScheduler",
        additional_config={"headway": section},
    )
    generator = np.random.default_rng(0)
    drawn = generator.integers(_FIRST_TOKEN, _LAST_TOKEN, (options.requests, _PROMPT_TOKENS))
    prompts = [{"prompt_token_ids": tokens} for tokens in drawn.tolist()]
    _phase(engine, prompts, 8, armed=True)  # what the first requests compile is in no phase
    step: dict[bool, dict[int, float]] = {False: {}, True: {}}
    counted = dict.fromkeys((*_COUNTED, "engine_steps"), 0.0)
    for number in range(options.rounds):
        for armed in (number % 2 == 0, number % 2 == 1):
            seconds, grown = _phase(engine, prompts, options.tokens, armed)
            step[armed][number] = 1e3 * seconds / grown["engine_steps"]
            print(f"round {number}, hook {'on' if armed else 'off'}: {step[armed][number]:.3f} ms")
            if armed:
                counted = {name: counted[name] + grown[name] for name in counted}
    engine.llm_engine.engine_core.shutdown()  # before its dataset's folder goes
    ratio = percent_change(step[True], step[False])
    steps = counted["engine_steps"]
    return {
        "requests": options.requests,
        "k": options.k,
        "rounds": options.rounds,
        "steps_with_hook": steps,
        "dropped_rows": counted["dropped_rows"],
        "forecasts": counted["forecasts"],
        "step_ms_off": mean_of(step[False]).mean,
        "step_ms_on": mean_of(step[True]).mean,
        "cost_percent": ratio.mean,
        "cost_percent_half_interval": ratio.half,
        "hook_cpu_ms_per_step": 1e3 * counted["hook_seconds"] / steps,
        "handing_on_cpu_ms_per_step": 1e3 * counted["handing_on_seconds"] / steps,
    }


def _phase(
    engine: Any, prompts: list[Any], tokens: int, armed: bool
) -> tuple[float, dict[str, float]]:
    """Serve all requests; return the seconds, and by how much the counters grew."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.collective_rpc("headway_arm", args=(armed,))
    before = status(engine)
    started = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = status(engine)
    return seconds, {name: after[name] - before[name] for name in (*_COUNTED, "engine_steps")}


if __name__ == "__main__":
    main()
