"""What recording and forecasts cost an engine: CPU time of a step, and its time by the clock.

    python -m benchmarks.engine_cost [MODEL] [--parts record forecast] [--requests 64] [--k 20]
        [--layer N] [--quick] [--json OUT]

MODEL is an embedded model's name (``smollm2`` by default) or a folder with a configuration and a
tokenizer; its weights are drawn unless --load-format says otherwise: a step takes as long with
them. One engine, as vLLM starts it on this machine, serves the same requests in alternating phases,
each first by turns: in one its hook is on, in the other vLLM's own `collective_rpc` has switched
it off. With forecasts a subscriber reads the telemetry. The predictor has the shipped one's layers
and inputs, untrained: its cost is the same. As the shipped one does, it reads averages of states
after two thirds of the model's layers; with ``--layer 0`` the last layer's newest state.

Reported per step: the CPU time of the hook (on the engine's thread), of handing forecasts on, and
of the threads of recorder and telemetry; their share of the CPU time of the whole worker process;
the time of a step with and without by the clock, and the mean of the pairs' ratios with half its
95% interval.
"""

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.report import arguments, mean_of, percent_change, report
from data_collection.files import find_shipped
from data_collection.models import identify, resolve_model
from data_collection.workload.collect import hidden_layers, hidden_size
from predictor.models.checkpoint import export_checkpoint, read_config
from predictor.models.survival_mlp import SurvivalMLP

_SHIPPED = "checkpoints/smollm2-135m-instruct"
_HALF_LIFE = 30.0
_SHARED = ("edges", "widths", "inputs")
_PROMPT_TOKENS, _FIRST_TOKEN, _LAST_TOKEN = 64, 1000, 20_000
_SPENDING = {
    "hook": ("record", "forecast"),
    "sink": ("record",),
    "handing_on": ("forecast",),
    "telemetry": ("forecast",),
}
"""What takes CPU time -> the parts that have it."""
_COUNTS = {"rows": "record", "dropped_rows": "record", "forecasts": "forecast"}


def main() -> None:
    parser = arguments("what recording and forecasts cost an engine's step")
    parser.add_argument("model", nargs="?", default="smollm2")
    parts = ("record", "forecast")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--requests", type=int, default=64, help="that run at a time")
    parser.add_argument("--tokens", type=int, default=160, help="that each generates in a phase")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of phases")
    parser.add_argument("--k", type=int, default=20, help="steps between two forecasts")
    parser.add_argument("--layer", type=int, help="whose averages are read (two thirds); 0: none")
    parser.add_argument("--dtype", help="float32 on a CPU, the model's own elsewhere")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--eager", action="store_true", help="without compilation; so on a CPU")
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
    layers = hidden_layers(model) or 0
    options.layer = 2 * layers // 3 if options.layer is None else options.layer
    if not 0 <= options.layer <= layers:
        parser.error(f"--layer must be from 0 to {layers}, not {options.layer}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        _untrained_predictor(model, width, options, Path(folder) / "predictor")
        figures = _measure(model, Path(folder), options)
    report("engine_cost", figures, options.json)


def _untrained_predictor(model: str, width: int, options: Any, folder: Path) -> None:
    identity, shipped = identify(model), read_config(find_shipped(_SHIPPED))
    predictor = SurvivalMLP(
        **{name: shipped[name] for name in _SHARED},
        model=identity.name,
        model_revision=identity.revision or "",
        hidden_size=width,
        k=options.k,
        layer=str(options.layer or "last"),
        state_half_life=_HALF_LIFE if options.layer else 0.0,
    )
    export_checkpoint(predictor, folder, {})


def _engine(model: str, folder: Path, options: Any) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    sections = {
        "record": {"path": str(folder / "dataset")},
        "forecast": {
            "checkpoint": str(folder / "predictor"),
            "telemetry": {"bind": "tcp://127.0.0.1:*"},
        },
    }
    on_cpu = current_platform.is_cpu()
    return LLM(
        model=model,
        dtype=options.dtype or ("float32" if on_cpu else "auto"),
        load_format=options.load_format,
        max_model_len=4096,
        max_num_seqs=options.requests,
        max_num_batched_tokens=8192,
        enforce_eager=options.eager or on_cpu,
        enable_prefix_caching=False,
        worker_cls="predictor.live.vllm_worker.LiveHeadwayWorker",
        scheduler_cls="predictor.live.vllm_scheduler.LiveHeadwayScheduler",
        additional_config={
            "headway": {
                "k": options.k,
                "layer": options.layer,
                "state_half_life": _HALF_LIFE if options.layer else 0.0,
                **{part: sections[part] for part in options.parts},
            }
        },
    )


def _measure(model: str, folder: Path, options: Any) -> dict[str, float]:
    engine = _engine(model, folder, options)
    spending = [one for one, parts in _SPENDING.items() if {*parts} & {*options.parts}]
    counts = [name for name, part in _COUNTS.items() if part in options.parts]
    counters = ["engine_steps", "process_seconds", *counts, *(f"{one}_seconds" for one in spending)]
    generator = np.random.default_rng(0)
    drawn = generator.integers(_FIRST_TOKEN, _LAST_TOKEN, (options.requests, _PROMPT_TOKENS))
    prompts = [{"prompt_token_ids": tokens} for tokens in drawn.tolist()]
    step: dict[bool, dict[int, float]] = {False: {}, True: {}}
    total = {armed: dict.fromkeys(counters, 0.0) for armed in step}
    with ExitStack() as stack:
        if "forecast" in options.parts:
            # Not before: vLLM's start fails after numba's.
            from rescheduler.telemetry.subscriber import TelemetrySubscriber

            endpoint = _status(engine)["telemetry_endpoint"]
            stack.enter_context(TelemetrySubscriber(endpoint))
        _phase(engine, prompts, 8, True, counters)  # what they compile is in no phase
        for number in range(options.rounds):
            for armed in (number % 2 == 0, number % 2 == 1):
                seconds, grown = _phase(engine, prompts, options.tokens, armed, counters)
                step[armed][number] = 1e3 * seconds / grown["engine_steps"]
                total[armed] = {name: total[armed][name] + grown[name] for name in counters}
                said = "on" if armed else "off"
                print(f"round {number}, hook {said}: {step[armed][number]:.3f} ms a step")
    engine.llm_engine.engine_core.shutdown()  # before its dataset's folder goes
    off, on = total[False], total[True]
    steps, spent = on["engine_steps"], {one: on[f"{one}_seconds"] for one in spending}
    cost = percent_change(step[True], step[False])
    return {
        "requests": options.requests,
        "k": options.k,
        "layer": options.layer,
        "rounds": options.rounds,
        "steps": steps,
        **{name: on[name] for name in counts},
        **{f"{one}_us_per_step": 1e6 * seconds / steps for one, seconds in spent.items()},
        "engine_ms_per_step_off": 1e3 * off["process_seconds"] / off["engine_steps"],
        "engine_ms_per_step_on": 1e3 * on["process_seconds"] / steps,
        "share_of_engine_percent": 100 * sum(spent.values()) / on["process_seconds"],
        "step_ms_off": mean_of(step[False]).mean,
        "step_ms_on": mean_of(step[True]).mean,
        "cost_percent": cost.mean,
        "cost_percent_half_interval": cost.half,
    }


def _phase(
    engine: Any, prompts: list[Any], tokens: int, armed: bool, counters: list[str]
) -> tuple[float, dict[str, float]]:
    """Serve all requests; return the seconds, and by how much the counters grew."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.collective_rpc("headway_arm", args=(armed,))
    before = _status(engine)
    started = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = _status(engine)
    return seconds, {name: after[name] - before[name] for name in counters}


def _status(engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.collective_rpc("headway_status")[0]
    return found


if __name__ == "__main__":
    main()
